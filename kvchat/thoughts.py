"""Thoughts before an answer: what a reasoning model writes between tags such as ``<think>`` and ``</think>``.

Either the model writes the first tag, at the beginning of its answer, or the chat template has written it at the end of
the prompt. A tag anywhere else is text: an answer may be about tags.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvchat.units import count

NAMES = (
    *("think", "thinking", "thought", "thoughts", "reason", "reasoning", "reflection", "scratchpad", "analysis"),
    *("seed:think", "longcat_think", "inner_thoughts", "internal_monologue"),
)
TAGS = (*(f"<{name}>" for name in NAMES), "[think]", "◁think▷", "<|begin_of_thought|>", "<|start_thinking|>")
"""Tags that models begin a thought with, in small letters."""

# The control tokens by which gpt-oss cuts an answer into parts, each with a head: <|start|>assistant<|channel|>final
# <|message|>Hello.<|end|>. A part whose head is "analysis" is a thought.
START, CHANNEL, MESSAGE, END = PARTS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
THOUGHT, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"


def end_of(tag: str) -> str:
    """The tag that ends what ``tag`` begins."""
    for begin, end in (("begin", "end"), ("start", "end"), ("BEGIN", "END"), ("START", "END")):
        if tag.startswith(f"<|{begin}"):
            return tag.replace(begin, end, 1)
    return f"{tag[0]}/{tag[1:]}"


_EITHER = frozenset((*TAGS, *map(end_of, TAGS)))


def is_tag(token: str) -> bool:
    """True if a token is a tag of ``TAGS`` or ends what one begins."""
    return token.lower() in _EITHER


def begun_with(text: str, tags: Sequence[str] = ()) -> str:
    """The tag at the beginning of a text: one of ``TAGS``, in any case, or of a template's own ``tags``; else empty."""
    begun = text.lstrip()
    for tag in (*tags, *TAGS):
        if begun[: len(tag)].lower() == tag.lower():
            return begun[: len(tag)]
    return ""


def split(text: str, end: str = "", ending: str | None = None) -> tuple[str, str]:
    """Split an answer into the thought, empty without one, and what is said.

    ``end`` is the tag that ends the thought where the prompt has begun it, or the model with the template's own tag. A
    thought that is not over is all there is. ``ending`` is that of the answer, None while it goes on: one that ended by
    itself and has a tag of ``TAGS`` at its beginning, but no end of it, is no thought.
    """
    begun = text.lstrip()
    own = (end.replace("/", "", 1),) if end else ()
    tag = begun_with(begun, own)
    if begun and not tag and ending is None and any(one.lower().startswith(begun.lower()) for one in (*own, *TAGS)):
        return "", ""  # it may become one, which a model repeats now and then behind that of the prompt
    if not (tag or end):
        return "", text
    thought, found, said = begun.removeprefix(tag).partition(end_of(tag) if tag else end)
    if not (found or end) and ending == "eos":
        return "", text
    return thought.strip(), said.lstrip("\n")


def goes_on(prompt: str) -> bool:
    """True of a prompt that ends within a thought which is a part of its own: the answer goes on with it."""
    return prompt.rfind(THOUGHT) > prompt.rfind(END)


def summarize(thought: str, is_open: bool) -> str:
    """The line of a folded thought."""
    words = len(thought.split())
    return f"▸ thinking … {count(words, 'word')}" if is_open else f"▸ thought, {count(words, 'word')}"
