"""Turn a conversation into token ids, and find how many of them are already stored.

This depends on the tokenizer and its chat template, not on the model or K/V. A template renders the model's earlier
answers as text, and tokenizing that text may give other ids than the model generated. Therefore ``Stored``, the ids
whose K/V are stored, has marks: the exact text of its first ids. If that text is a prefix of the newly rendered text,
its ids are reused and only the rest is tokenized. After the last matching mark the longest common prefix of ids counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvchat.engine import escaping
from kvchat.engine.escaping import EDGE, ESCAPE, Edges, Escaper, found_edges
from kvchat.engine.template import TOOLS, ChatTemplate
from kvchat.errors import ModelError, UsageError, check_known
from kvchat.foreign_text import visible
from kvchat.kv.memory.page_file import Link
from kvchat.protocol.messages import Turn
from kvchat.thoughts import CHANNEL, FINAL, PARTS, TAGS, THOUGHT, end_of, is_tag, split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ROLES = ("system", "user", "assistant", "tool")
TEXT = "text"  # role of a single turn that is the whole prompt and is not rendered by the template
REASONING = "reasoning_content"  # field of a message whose thought came beside its text
# A Unicode noncharacter like ``ESCAPE``: never found in real text, and removed from all input.
GUARD = "\ufdd1"  # protects the outer white space of an answer: a template that trimmed it would prevent reuse
PROBE = "kvchat-probe"
USER = (Turn("user", PROBE),)
SYSTEM = Turn("system", f"{PROBE}-told")
PROBED = (2, 12)  # numbers of questions to try, because templates may drop all but the last few
EXCERPT = 24  # characters before and after a difference, and at the beginning of a text
OTHER_TEMPLATE = "Choose another model, or use another template: --chat-template FILE."
LONGEST_TAG = 80  # characters, with the white space after it
LONGEST_BETWEEN = 512  # characters that a template writes between an answer and the next question
_SPLIT_AT = re.compile(r"""split\(\s*['"](</[^'"\s<>]{1,40}>|\[/[^'"\s\[\]]{1,40}\])['"]""")
KEPT_RESTS = 8  # cached tokenizations of unmatched ends: with most stored conversations a text has the same one
_TOKEN_LIKE = re.compile(r"<[^\s<>]*[^\W\d_][^\s<>]*>|\[[^\s\[\]]*[^\W\d_][^\s\[\]]*\]")
_HEADING = re.compile(r"\n[^\n]*?[^\W\d_][^\n]*?(?:[^\w\s](?=\s*$|\s*\n)|\n)")
KEPT_TIMES = 64  # cached start times of conversations
_NONCHARACTERS = dict.fromkeys(map(ord, (ESCAPE, GUARD, EDGE)))


class Prompt(NamedTuple):
    """All ids of a conversation: the first ``reused`` are stored, and at least one is not.

    ``text`` is the rendered text, for ``Stored.mark_text`` once the ids are stored. ``continues``: the answer goes on
    where it ends, in the middle of a text.
    """

    ids: list[int]
    reused: int
    text: str
    continues: bool = False


class Anchor(NamedTuple):
    """A prefix that is tokenized together with a text and then removed, and its ids."""

    text: str
    ids: tuple[int, ...]


START = Anchor("", ())  # no prefix: the text is at the beginning


class PromptEncoder:
    """Renders conversations with a tokenizer's chat template, or as plain ``User:``/``Assistant:`` lines without one.

    Text in messages that is spelled like a control token is tokenized as ordinary text. Control tokens are those marked
    special, ``<|...|>`` tokens that finetunes forget to mark, and those that the template writes around turns. Other
    added tokens are allowed: runs of spaces, HTML tags, ``<think>``, which templates search for in answers.
    ``variables`` are the template variables that the user set.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, variables)
        self._anchor = _find_anchor(tokenizer)
        control = escaping.control_ids(tokenizer)
        self._escaper = Escaper(tokenizer, control)  # sufficient for testing the template
        # Tokenizers differ after an added token: Phi-3's strips the white space, Llama 2's adds a space.
        self._behind = {id: Anchor(token.content, (id,)) for id, token in tokenizer.added_tokens_decoder.items()}
        names = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._has_channels = names.issuperset(PARTS) and CHANNEL in str(tokenizer.chat_template)
        self._rest = lru_cache(KEPT_RESTS)(self._tokenize)
        self._first_seen = lru_cache(KEPT_TIMES)(lambda _question: datetime.now())
        # Templates of multimodal models may accept only messages in parts, and drop a plain string.
        self._in_parts = False
        if not self._renders(USER):
            self._in_parts = True
            self._in_parts = self._renders(USER)
        self._folds_system = not self._renders([Turn("system", PROBE), Turn("user", "Hello")])
        self.begins_with_system = self._begins_with_system()
        notes = self._notes()
        turn_markers = self._turn_markers()
        # The token for unknown characters does not count as a control token.
        self._control = control - escaping.unknown(tokenizer) | turn_markers
        self._escaper = Escaper(tokenizer, self._control)
        self.ignored = self._ignored(variables)
        self.notes = tuple(filter(None, (*notes, *self._changes(), self.ignored)))
        self._as_given = self._template
        if tools := variables.get(TOOLS):
            self._template = ChatTemplate(tokenizer, {**variables, TOOLS: self._escaped(tools)})
        self.marks_of_calls = self._marks_of_calls() if tools else frozenset[str]()
        # Control tokens and stop strings that end an answer.
        self.turn_end, self.stop = self._turn_end() if tokenizer.chat_template else (frozenset[int](), ("\nUser:",))

    @property
    def variables(self) -> tuple[str, ...]:
        return self._template.variables if self._tokenizer.chat_template else ()

    @property
    def calls(self) -> str:
        """How the model calls tools; see ``ChatTemplate.calls``."""
        return self._template.calls if self._tokenizer.chat_template else ""

    def forced_call(self, names: Collection[str]) -> str:
        """Return the grammar of one call of a tool of these ``names``; see ``ChatTemplate.forced_call``."""
        return self._as_given.forced_call(names, self.thought_tags)

    def encode(self, turns: Sequence[Turn], stored: Stored) -> Prompt:
        """Return the prompt of a conversation, reusing stored ids; ``stored`` is not modified.

        Raises:
            UsageError: a role is unknown, there is nothing to answer, or the template refuses the turns.
        """
        text = self.render(turns)
        ids = self.ids_of(text, stored)
        if not ids:
            why = "" if is_text(turns) else "The model's chat template renders nothing of this conversation."
            raise UsageError("The prompt is empty.", why, "Rephrase it.")
        continues = turns[-1].role in (TEXT, "assistant")
        return Prompt(ids, min(common_prefix(stored.ids, ids), len(ids) - 1), text, continues)

    def ids_of(self, text: str, stored: Stored) -> list[int]:
        """Return the ids of a rendered text, taken from ``stored`` up to the last matching mark."""
        kept, chars = stored.matched_prefix(text)
        anchor = self._behind.get(stored.ids[kept - 1], self._anchor) if kept else START
        return stored.ids[:kept] + self._rest(text[chars:], anchor)

    def pinned(self, turns: Sequence[Turn], stored: Stored, system: bool = False) -> list[int]:
        """Return the positions of the pinned turns' tokens and the template's tokens around them, ascending.

        ``system`` also pins a system prompt that the template does not write first.

        Raises:
            UsageError: the same as ``encode``, or the template drops or changes a turn's text.
        """
        if system and turns and turns[0].role == "system" and not self.begins_with_system:
            turns = (replace(turns[0], pinned=True), *turns[1:])
        if not any(turn.pinned for turn in turns):
            return []
        text, found = self.render(turns), list[int]()
        for begin, end in self._spans(turns, text):
            first, last = min(self._num_ids(text, begin, stored)), max(self._num_ids(text, end, stored))
            found += range(max(first, found[-1] + 1 if found else 0), last)
        return found

    def _num_ids(self, text: str, chars: int, stored: Stored) -> tuple[int, int]:
        """Return the number of ids of ``text[:chars]``, counted from the mark before and back from the mark after.

        The two differ if the ids generated between the marks differ from the tokenized text.
        """
        before = len(self.ids_of(text[:chars], stored))
        ids, end = stored.matched_prefix_from(text, chars) or (before, chars)
        return before, ids - len(self._rest(text[chars:end], self._anchor))

    def _spans(self, turns: Sequence[Turn], text: str) -> list[tuple[int, int]]:
        """Return the pinned turns' spans in ``text``, ascending, each from the end of the turn before to the next turn.

        ``text`` is the rendered conversation, which may have the turns in another order.
        """
        shown = _fold_system(turns) if self._folds_system and self._tokenizer.chat_template else turns
        found = found_edges(self.render(turns, edges=True))
        pinned = {i for i, turn in enumerate(shown) if turn.pinned}
        if found is None or found[0] != text or not pinned <= {turn for turn, *_ in found[1]}:
            raise UsageError(
                "Messages of this conversation cannot be pinned.",
                "The model's chat template drops or changes a message's text.",
                "Unpin them: /pin none.",
            )
        said = [(-1, 0, 0), *found[1], (-1, len(text), len(text))]
        around = zip(said, said[1:], said[2:], strict=False)
        return [(before[2], after[1]) for before, (turn, *_), after in around if turn in pinned]

    def system_tokens(self, turns: Sequence[Turn]) -> int:
        """Return how many tokens precede the first user turn's text if a system prompt comes first, else 0."""
        if not turns or turns[0].role != "system" or not self.begins_with_system:
            return 0
        began = self._began_at(turns).timestamp()
        # The common prefix of two conversations with this system prompt, which includes the template's own tokens.
        one, other = (self._tokenize(self.render((turns[0], Turn("user", text, at=began))), START) for text in "0A")
        return common_prefix(one, other)

    def render(self, turns: Sequence[Turn], edges: bool = False) -> str:
        """Return the text of a conversation that the model continues, with ``ESCAPE`` in would-be control tokens.

        ``edges`` adds marks before and after each turn's text, for ``found_edges``.

        An assistant turn at the end is continued: its text follows the generation prompt unchanged, as it was generated
        (transformers' ``continue_final_message`` trims it, and templates drop its thought).

        Raises:
            UsageError: the same as ``encode``.
        """
        if is_text(turns):
            return self._begun(_cleaned(turns[0].content))
        _check(turns)
        write = Edges().insert if edges else str
        if REASONING not in self._template_source:
            turns = [*map(_with_thought, turns[:-1]), turns[-1]]
        if turns[-1].role == "assistant":
            before = self._render_history(turns[:-1], write)
            head, said = self._continued(_with_thought(turns[-1], before.rstrip().endswith(TAGS[0])).content)
            return before + head + write(self._escape(said))
        return self._render_history(turns, write)

    def answered(self, prompt: Prompt, answer: str, end: int | None = None) -> str:
        """Return the text of ``prompt`` and its answer, for ``Stored.mark_text``.

        ``answer`` is the decoded text of all generated ids that are stored. ``end`` is the end token, if that is stored
        too; it need not be, because the next prompt contains it.
        """
        closing = self._tokenizer.convert_ids_to_tokens(end) if end is not None else ""
        return f"{prompt.text}{self._escape(answer)}{closing}"

    @property
    def thought_tags(self) -> tuple[str, ...]:
        """Return the tags that begin a thought, derived from the end tags at which the template splits answers."""
        ends = _SPLIT_AT.findall(self._template_source)
        return tuple(dict.fromkeys(end.replace("/", "", 1) for end in ends if "tool" not in end))

    def thought_end(self, turns: Sequence[Turn], prompt: Prompt) -> str:
        """Return the end tag of a thought that the template begins at the end of the prompt, or ""."""
        end = prompt.text[-LONGEST_TAG:].rstrip()
        said = self._escape(turns[-1].content).rstrip()
        tag = next((tag for tag in (*self.thought_tags, *TAGS) if end.lower().endswith(tag.lower())), "")
        if not tag or turns[-1].role == "assistant" or (said and prompt.text.rstrip().endswith(said)):
            return ""
        return end_of(end[-len(tag) :])

    # ---- text -----------------------------------------------------------------------------------

    @property
    def _template_source(self) -> str:
        return self._template.source if self._tokenizer.chat_template else ""

    def _render_history(self, turns: Sequence[Turn], write: Callable[[str], str]) -> str:
        if not self._tokenizer.chat_template:
            return self._plain(turns, write)
        shown = _fold_system(turns) if self._folds_system else turns
        return self._apply_template(shown, write)

    def _apply_template(self, turns: Sequence[Turn], write: Callable[[str], str] = str) -> str:
        """Return the template's text, with ``write`` applied to each turn's text."""
        messages = [
            {"role": turn.role, "content": self._content(turn, write), **self._escaped(json.loads(turn.more or "{}"))}
            for turn in turns
        ]
        try:
            return self._template.render(messages, self._began_at(turns)).replace(GUARD, "")
        except Exception as error:  # templates are third-party programs and raise anything
            raise UsageError(
                "The model's chat template refuses this conversation.",
                f"Its message: {str(error)[:500] or type(error).__name__}.",
                "Every template accepts turns that alternate between user and assistant, starting with user.",
            ) from error

    def _began_at(self, turns: Sequence[Turn]) -> datetime:
        """Return when a conversation began or, if unknown, when its first question was first seen.

        The template always gets this time, because a changed date would force the conversation to be processed again.
        """
        asked = next((turn for turn in turns if turn.role == "user"), USER[0])
        with suppress(OverflowError, ValueError, OSError):  # not a valid date
            if asked.at > 0:
                return datetime.fromtimestamp(asked.at)
        return self._first_seen(asked.content)

    def _continued(self, answer: str) -> tuple[str, str]:
        """Return the text before an answer that is continued (usually none) and the part to continue (usually all)."""
        if not self._has_channels or not answer:
            return "", answer
        thought, said = split(answer)
        return (THOUGHT, thought) if thought and not said and end_of(TAGS[0]) not in answer else (FINAL, said)

    def _content(self, turn: Turn, write: Callable[[str], str]) -> str | list[dict[str, str]]:
        is_thought_over = self._has_channels and turn.role == "assistant"
        text = self._escape(split(turn.content)[1] if is_thought_over else turn.content)
        before = GUARD if turn.role == "assistant" and text[:1].isspace() else ""
        after = GUARD if turn.role == "assistant" and text[-1:].isspace() else ""
        text = f"{before}{write(text)}{after}"
        return [{"type": "text", "text": text}] if self._in_parts else text

    def _escaped(self, value: Any) -> Any:
        """Apply ``_escape`` to every text in JSON for the template."""
        match value:
            case str():
                return self._escape(value)
            case list():
                return [self._escaped(one) for one in value]
            case dict():
                return {self._escape(name): self._escaped(one) for name, one in value.items()}
        return value

    def spelled(self, token: int) -> str:
        """Return a token's text when it is not the first; U+FFFD for a part of a character."""
        before, written = self._before_a_token
        return self._decode([*before, token])[len(written) :]

    @cached_property
    def _before_a_token(self) -> tuple[list[int], str]:
        """Ids that precede a token when it is decoded, so that it is not the first, and their text."""
        before = self._tokenizer.encode("a", add_special_tokens=False)
        return before, self._decode(before)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _marks_of_calls(self) -> frozenset[str]:
        """Return the control tokens in the model's tool calls, which are kept in its text."""
        field = json.loads(self.calls or "{}").get("fields", {}).get("tool_calls", {})
        written = json.dumps(field, ensure_ascii=False).replace("\\", "")
        names = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        return frozenset(name for name in names if name.strip() and name in written)

    def _escape(self, text: str) -> str:
        return self._escaper.escape(_cleaned(text))

    def _turn_markers(self) -> frozenset[int]:
        """Return the added tokens, special or not, that the template writes around turns."""
        if not self._tokenizer.chat_template:
            return frozenset()
        user, others = Turn("user", "x"), [Turn("assistant", "y"), Turn("user", "z")]
        text = ""
        for turns in ([user], [user, *others], [Turn("system", "s"), user, *others]):
            with suppress(UsageError):  # the template may refuse a role
                text += self._apply_template(turns)
        return escaping.markers(self._tokenizer, text)

    def _turn_end(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """Return the control token and the text that the template writes between an answer and the next question.

        Finetunes may declare another end token, or have no token for what their template writes. Text counts if it is
        spelled like a token or is a heading on its own line. If the template writes a control token before an answer
        that the model must generate, answers have several parts, and the end of a part does not end the answer.
        """
        question, answer, next_question = Turn("user", "x"), Turn("assistant", PROBE), Turn("user", f"{PROBE}-next")
        try:
            prompt = self._apply_template([question])
            text = self._apply_template([question, answer, next_question])
        except UsageError:  # the template may refuse the turns
            return frozenset(), ()
        before, _, after = text.partition(PROBE)
        after = after[:LONGEST_BETWEEN].partition(next_question.content)[0]
        added = self._tokenizer.added_tokens_decoder.items()
        names = {token.content: i for i, token in added if i in self._control and token.content in text}
        written = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
        own = re.findall(written, before[common_prefix(prompt, before) :])
        if not after or any(not is_tag(name) for name in own):
            return frozenset(), ()
        bos = self._tokenizer.bos_token
        token = next((name for name in re.findall(written, after) if name != bos), None)
        said = next((text for text in re.split(written, after) if text.strip()), "")
        if token and after.index(token) < after.index(said):
            said = ""
        heading = _TOKEN_LIKE.match(said.strip()) or _HEADING.search(said)
        return frozenset({names[token]} if token else ()), (heading[0],) if heading else ()

    def _plain(self, turns: Sequence[Turn], write: Callable[[str], str]) -> str:
        """Return the prompt for a model without a template, which generates the space before an answer itself."""
        lines = list[str]()
        for turn in turns:
            text = write(self._escape(turn.content))
            if turn.role == "system":
                lines.append(f"{text.strip()}\n\n")
            elif turn.role == "user":
                lines.append(f"User: {text.strip()}\n")
            else:
                lines.append(f"Assistant:{text if text[:1].isspace() else ' ' + text}\n")
        return self._begun("".join(lines) + "Assistant:")

    def _begun(self, text: str) -> str:
        """Return ``text`` after the beginning-of-text token if the tokenizer adds it; templates write their own.

        Some tokenizers mark the start of a word at the beginning of a text even after the token that they add, but not
        after a token that is written: there a space has the same effect.
        """
        beginning = text[:EXCERPT].partition(ESCAPE)[0]
        expected = self._tokenizer(beginning).input_ids
        if expected[:1] != [self._tokenizer.bos_token_id]:
            return text
        for between in ("", " "):
            written = self._tokenize(f"{self._tokenizer.bos_token}{between}{beginning}", START)
            if written == expected[: len(written)]:
                return f"{self._tokenizer.bos_token}{between}{text}"
        return f"{self._tokenizer.bos_token}{text}"

    def _renders(self, turns: Sequence[Turn]) -> bool:
        """True if the template renders ``PROBE`` in these turns; some raise for a role, some drop the text."""
        if not self._tokenizer.chat_template:
            return True
        try:
            return PROBE in self._apply_template(turns)
        except UsageError:
            return False

    def _begins_with_system(self) -> bool:
        """True if the template writes the system prompt first; some write it with the last question."""
        with suppress(UsageError):  # the template may refuse the turns
            found = found_edges(self.render(_conversation(2, system=True), edges=True))
            return found is None or not found[1] or found[1][0][0] == 0
        return True

    def _changes(self) -> list[str]:
        """Return a note if the template changes earlier text with each question, which is then processed again."""
        for system, questions in product((False, True), PROBED):
            with suppress(UsageError):  # the template may refuse that many turns
                text, longer = (self.render(_conversation(number, system)) for number in (questions, questions + 1))
                same = common_prefix(text, longer)
                if same < text.rfind(_asked(questions)):
                    when = "With a system prompt, at" if system else "At"
                    first = re.search(rf"{PROBE}-\d+\.", text)
                    read = "the one before" if first and same >= first.end() else "the whole conversation"
                    how = self._change(text, longer, same)
                    return [f"{when} each question, {read} is processed again: the chat template {how}."]
        return []

    def _change(self, text: str, longer: str, same: int) -> str:
        """Describe how the template changed ``text`` to ``longer`` after their first ``same`` characters."""
        if not self.begins_with_system and SYSTEM.content in longer[same:]:
            return "moves the system prompt to the last question"
        if _asked(1) not in longer:
            return "drops all but the last messages"
        lines = (one[max(0, same - EXCERPT) : same + EXCERPT].replace("\n", " ").strip() for one in (text, longer))
        return "writes “{}” first and “{}” later".format(*map(visible, lines))

    def _notes(self) -> tuple[str, ...]:
        """Return a note if the template drops user messages.

        Raises:
            ModelError: it renders nothing or refuses every conversation.
        """
        if not self._tokenizer.chat_template or self._renders(USER):
            return ()
        try:
            text = self._apply_template(USER)
        except UsageError as error:
            if not self._folds_system:  # it accepts conversations with a system prompt
                return ()
            raise ModelError(
                "The model's chat template refuses every conversation.", error.detail, OTHER_TEMPLATE
            ) from error
        if not self._tokenize(text, START):
            why = "Questions come out empty, so the model has nothing to answer."
            raise ModelError("The model's chat template renders nothing.", why, OTHER_TEMPLATE)
        return ("The model's chat template drops user messages: answers do not depend on the questions.",)

    def _ignored(self, variables: Mapping[str, Any]) -> str:
        """Return a sentence about ``variables`` that the template does not read, or ""."""
        unknown = [name for name in variables if name not in (TOOLS, *self.variables)]
        reads = ", ".join(self.variables) or "none"
        return f"The template ignores {', '.join(unknown)}; it reads {reads}." if unknown else ""

    # ---- ids ------------------------------------------------------------------------------------

    def _tokenize(self, text: str, anchor: Anchor) -> list[int]:
        ids: list[int] = []
        for part in text.split(ESCAPE):
            ids += self._tokenize_part(part, anchor)
            anchor = self._anchor
        return ids

    def _tokenize_part(self, text: str, anchor: Anchor) -> list[int]:
        """Return the ids of a text as the tokenizer produces them after ``anchor``."""
        if not text:
            return []
        ids: list[int] = self._tokenizer.encode(anchor.text + text, add_special_tokens=False, verbose=False)
        if tuple(ids[: len(anchor.ids)]) != anchor.ids:  # the beginning of the text was merged with the anchor
            return self._tokenize_part(text, START if anchor is self._anchor else self._anchor)
        return ids[len(anchor.ids) :]


def is_text(turns: Sequence[Turn]) -> bool:
    """True if the turns are plain text, without the template."""
    return [turn.role for turn in turns] == [TEXT]


def _cleaned(text: str) -> str:
    return text.translate(_NONCHARACTERS).encode("utf-8", "replace").decode()


def _asked(number: int) -> str:
    return f"{PROBE}-{number}."


def _conversation(questions: int, system: bool) -> list[Turn]:
    """Return a conversation to test the template with; a longer one begins with all shorter ones."""
    turns = [Turn("user", _asked(1))]
    for number in range(2, questions + 1):
        turns += [Turn("assistant", "I see."), Turn("user", _asked(number))]
    return [SYSTEM, *turns] if system else turns


def _find_anchor(tokenizer: PreTrainedTokenizerBase) -> Anchor:
    """Find text after which a tokenizer treats a text as a continuation; ``START`` if there is none.

    Tokenizers with word-start marks (SentencePiece) add one at the beginning of a text, but not after a control token.
    Some, such as Llama 2's, add one there too, but not after a line end.
    """
    for id, token in tokenizer.added_tokens_decoder.items():
        for text in (token.content, f"{token.content}\n") if token.special and not token.rstrip else ():
            ids = tokenizer.encode(f"{text}a", add_special_tokens=False)
            if ids[:1] == [id] and ids[1:][-1:] == [tokenizer.convert_tokens_to_ids("a")]:
                return Anchor(text, tuple(ids[:-1]))
    return START


def _with_thought(turn: Turn, is_begun: bool = False) -> Turn:
    """Return an answer with the thought beside it written into it; the thought's tag precedes it if it ``is_begun``."""
    more = json.loads(turn.more or "{}")
    if not (thought := more.pop(REASONING, "")):
        return turn
    tag = "" if is_begun else f"{TAGS[0]}\n"
    written = f"{tag}{thought}\n{end_of(TAGS[0])}\n\n{turn.content}"
    return replace(turn, content=written, more=json.dumps(more) if more else "")


def _check(turns: Sequence[Turn]) -> None:
    for turn in turns:
        check_known(turn.role, ROLES, "role")
    user = [turn for turn in turns if turn.role == "user"]
    # Other programs may send only a system prompt; the template decides whether that is enough.
    if not any(turn.content.strip() for turn in user[-1:] or turns):
        raise UsageError("The prompt is empty.", "The last user turn has no text to answer.", "Write a message.")


def _fold_system(turns: Sequence[Turn]) -> list[Turn]:
    """Move the system text into the first user turn, for templates without a system role."""
    system = "\n\n".join(turn.content.strip() for turn in turns if turn.role == "system")
    rest = [turn for turn in turns if turn.role != "system"]
    first = next((i for i, turn in enumerate(rest) if turn.role == "user"), None)
    if first is None:
        return [*([Turn("user", system)] if system else ()), *rest]
    if system:
        pinned = rest[first].pinned or any(turn.pinned for turn in turns if turn.role == "system")
        rest[first] = replace(rest[first], content=f"{system}\n\n{rest[first].content}", pinned=pinned)
    return rest


@dataclass
class Stored:
    """The ids whose K/V are stored, and their text.

    Attributes:
        marks: ascending pairs (number of ids, number of characters): the first ids stand for exactly the first
            characters of ``text``. The text of ids after the last mark is unknown.
        reduced: for each id, True if its K/V were computed with reduced context.
        saved: how many of the first ids have their K/V on disk, in pages with these ``links``.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    marks: list[tuple[int, int]] = field(default_factory=list)
    reduced: list[bool] = field(default_factory=list)
    saved: int = 0
    links: list[Link] = field(default_factory=list)

    @property
    def reduced_tokens(self) -> int:
        """Number of ids whose K/V were computed with reduced context."""
        return sum(self.reduced)

    @property
    def first_reduced(self) -> int:
        """Index of the first such id, or the number of ids."""
        return self.reduced.index(True) if True in self.reduced else len(self.ids)

    def extend(self, ids: Sequence[int], reduced: bool = False) -> None:
        """Append ids whose text is unknown."""
        self.ids.extend(ids)
        self.reduced.extend([reduced] * len(ids))

    def replace_with(self, other: Stored) -> None:
        vars(self).update(vars(other))

    def copy_text_of(self, other: Stored) -> None:
        """Copy text and marks of ``other``, which has the same ids."""
        self.text, self.marks = other.text, other.marks

    def mark_text(self, text: str) -> None:
        """Record that the ids so far stand for ``text``; older marks that contradict it are dropped."""
        matched, _ = self.matched_prefix(text)
        kept = [mark for mark in self.marks if mark[0] <= matched and mark[0] < len(self.ids)]
        self.marks = [*kept, (len(self.ids), len(text))]
        self.text = text

    def truncate(self, length: int) -> None:
        del self.ids[length:], self.reduced[length:]
        self.saved = min(self.saved, length)
        self.marks = [mark for mark in self.marks if mark[0] <= length]
        self.text = self.text[: self.marks[-1][1]] if self.marks else ""

    def matched_prefix(self, text: str) -> tuple[int, int]:
        """Return the last mark whose text is a prefix of ``text``, else (0, 0)."""
        found = (mark for mark in reversed(self.marks) if text.startswith(self.text[: mark[1]]))
        return next(found, (0, 0))

    def matched_prefix_from(self, text: str, chars: int) -> tuple[int, int] | None:
        """Return the first mark with at least ``chars`` characters whose text is a prefix of ``text``."""
        found = (mark for mark in self.marks if mark[1] >= chars and text.startswith(self.text[: mark[1]]))
        return next(found, None)


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
