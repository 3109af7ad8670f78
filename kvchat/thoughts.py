"""Thoughts before an answer: text that a reasoning model writes between tags such as ``<think>`` and ``</think>``.

The first tag is at the beginning of the answer, or at the end of the prompt if the chat template writes it. A tag
anywhere else is text, because an answer may be about tags.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvchat.units import count

NAMES = (
    *("think", "thinking", "thought", "thoughts", "reason", "reasoning", "reflection", "scratchpad", "analysis"),
    *("seed:think", "longcat_think", "inner_thoughts", "internal_monologue"),
)
TAGS = (*(f"<{name}>" for name in NAMES), "[think]", "◁think▷", "<|begin_of_thought|>", "<|start_thinking|>")
"""Tags that begin a thought, in lower case."""

# gpt-oss divides an answer into parts by control tokens: <|start|>assistant<|channel|>final<|message|>Hello.<|end|>.
# A part whose channel is "analysis" is a thought.
START, CHANNEL, MESSAGE, END = PARTS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
THOUGHT, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"


def end_of(tag: str) -> str:
    """Return the tag that ends the thought that ``tag`` begins."""
    for begin, end in (("begin", "end"), ("start", "end"), ("BEGIN", "END"), ("START", "END")):
        if tag.startswith(f"<|{begin}"):
            return tag.replace(begin, end, 1)
    return f"{tag[0]}/{tag[1:]}"


_EITHER = frozenset((*TAGS, *map(end_of, TAGS)))


def is_tag(token: str) -> bool:
    """True if a token is one of ``TAGS`` or its end tag."""
    return token.lower() in _EITHER


def begun_with(text: str, tags: Sequence[str] = ()) -> str:
    """Return the tag at the beginning of ``text``, one of ``TAGS`` in any case or of a template's ``tags``, or ""."""
    begun = text.lstrip()
    for tag in (*tags, *TAGS):
        if begun[: len(tag)].lower() == tag.lower():
            return begun[: len(tag)]
    return ""


def split(text: str, end: str = "", ending: str | None = None) -> tuple[str, str]:
    """Split an answer into its thought, "" without one, and the rest.

    ``end`` is the tag that ends the thought if the prompt began it, or if the model began it with its template's own
    tag. A thought without an end is the whole answer, unless one of ``TAGS`` began it and the answer ended by itself:
    then it is not a thought. ``ending`` is the reason why the answer ended, None while it is generated.
    """
    begun = text.lstrip()
    own = (end.replace("/", "", 1),) if end else ()
    tag = begun_with(begun, own)
    if begun and not tag and ending is None and any(each.lower().startswith(begun.lower()) for each in (*own, *TAGS)):
        return "", ""  # it may become a tag; models sometimes repeat the one in the prompt
    if not (tag or end):
        return "", text
    thought, found, said = begun.removeprefix(tag).partition(end_of(tag) if tag else end)
    if not (found or end) and ending == "eos":
        return "", text
    return thought.strip(), said.lstrip("\n")


def goes_on(prompt: str) -> bool:
    """True if a prompt ends inside a thought in gpt-oss's form, which the answer continues."""
    return prompt.rfind(THOUGHT) > prompt.rfind(END)


def summarize(thought: str, is_open: bool) -> str:
    """Return the one-line summary of a folded thought."""
    words = len(thought.split())
    return f"▸ thinking … {count(words, 'word')}" if is_open else f"▸ thought, {count(words, 'word')}"
