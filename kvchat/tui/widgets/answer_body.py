"""An answer's text in parts, mounted one after the other, so that no single layout has many new widgets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline, emphasis, escape, newline
from markdown_it.token import Token
from rich.segment import Segment
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.css.styles import RulesMap
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual
from textual.widgets import Markdown
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownFence,
    MarkdownList,
    MarkdownListItem,
    MarkdownOrderedListItem,
    MarkdownParagraph,
)

from kvchat.conversations.conversation import MARKED
from kvchat.tui import large_answers
from kvchat.tui.large_answers import MOST_NESTED, Part, definitions, parts
from kvchat.tui.widgets.base import PlainText

PAUSE_S = 0.03
TAB, WIDEST = 4, 200  # cells
_SPACES = re.compile(r"([ \t]*\t[ \t]*|[ ]{2,})")
_FACTORS = re.compile(r"[A-Za-z0-9]{2}|\)\(")  # before and after asterisks that multiply, where emphasis cannot begin
LEAST_WIDTH = 8  # of an item's text, however deep it is nested
MOST_INDENT = 24  # of tables, code and quotes in items


class Hanging(Visual):
    """A text whose rows begin behind a bullet, which stands in the first one."""

    def __init__(self, bullet: str, text: Content) -> None:
        self.bullet = bullet
        self.text = text

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        """Its rows; an item without words has one."""
        indent = self._indent(width)
        rows = self.text.render_strips(width - indent, height, style, options) or [Strip([])]
        first = (style + options.get_style(".bullet")).rich_style
        before = [Segment(self.bullet[len(self.bullet) - indent :], first), Segment(" " * indent, style.rich_style)]
        return [Strip.join([Strip([before[bool(number)]]), row]) for number, row in enumerate(rows)]

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return len(self.bullet) + self.text.get_optimal_width(rules, container_width)

    def get_height(self, rules: RulesMap, width: int) -> int:
        return max(self.text.get_height(rules, width - self._indent(width)), 1)

    def _indent(self, width: int) -> int:
        return max(min(len(self.bullet), width - LEAST_WIDTH), 0)


class ItemText(MarkdownBlock):
    """A paragraph of an item behind its bullet, or behind blanks."""

    COMPONENT_CLASSES = {"bullet"}  # noqa: RUF012 (as Textual declares it)
    DEFAULT_CSS = """
    ItemText > .bullet { color: $text-primary; }
    ItemText:light > .bullet { color: $text-secondary; }
    """

    def __init__(self, block: MarkdownBlock, bullet: str) -> None:
        super().__init__(block._markdown, block._token)
        self._bullet = bullet
        self._content = block._content
        self.update(Hanging(bullet, block._content))

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """The selected text, with the bullet where it is selected from its beginning."""
        chosen = selection.extract(self._content.plain)
        is_whole = selection.start is None or not any(selection.start)
        return (self._bullet if is_whole else "") + chosen, "\n"


class ItemList(MarkdownList):
    """A list, and the lists in its items, as one column."""

    DEFAULT_CSS = "ItemList { margin: 0 0 1 0; }"

    def compose(self) -> ComposeResult:
        yield from self.column("")
        self._blocks.clear()

    def column(self, indent: str) -> Iterator[MarkdownBlock]:
        items = [block for block in self._blocks if isinstance(block, MarkdownListItem)]
        for item, symbol in zip(items, _bullets(items), strict=True):
            bullet = indent + symbol
            blanks = " " * len(bullet)
            if not (item._blocks and isinstance(item._blocks[0], MarkdownParagraph)):
                yield ItemText(item, bullet)
                bullet = blanks
            for block in item._blocks:
                if isinstance(block, ItemList):
                    yield from block.column(blanks)
                elif isinstance(block, MarkdownParagraph):
                    yield ItemText(block, bullet)
                    bullet = blanks
                else:
                    block.styles.margin = (1, 0, 1, min(len(blanks), MOST_INDENT))
                    yield block


def _bullets(items: list[MarkdownListItem]) -> list[str]:
    if not (items and isinstance(items[0], MarkdownOrderedListItem)):
        return [item.bullet for item in items]
    counted = enumerate(items, int(items[0].bullet))
    numbers = [f"{item._token.attrGet('value') or number}{item._token.markup} " for number, item in counted]
    return [number.rjust(max(map(len, numbers)) + 1) for number in numbers]


class CodeBlock(MarkdownFence):
    """Textual's own guesses a language that is not named: it imports all 250 that there are, which takes 0.2 s.

    It also cuts long lines off, without a sign; here they wrap.
    """

    DEFAULT_CSS = "CodeBlock > Label { width: 1fr; }"

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        return super().highlight(code, language or "text", ansi, dark)


class MarkdownPart(Markdown):
    """Some blocks of Markdown, which grow at their end; ``tail`` is what cannot be parsed yet."""

    DEFAULT_CSS = """
    MarkdownPart { padding: 0; margin: 0; background: transparent; }
    MarkdownPart.in-list > MarkdownList:last-child { margin: 0; }
    """
    BLOCKS = Markdown.BLOCKS | {
        "bullet_list_open": ItemList,
        "ordered_list_open": ItemList,
        "fence": CodeBlock,
        "code_block": CodeBlock,
    }

    def __init__(self, links: dict[str, Any]) -> None:
        super().__init__(open_links=False, parser_factory=partial(_Parser, links))
        self.tail = ""
        self._links = links
        self._known_links: dict[str, Any] = {}
        self._drawn = ""
        self._appended = 0

    async def show(self, text: str, is_closed: bool, is_final: bool) -> bool:
        """Show another text; only what follows is drawn where it begins with what is drawn. Whether anything was.

        A text that is ``is_closed`` has no tail; one that is ``is_final`` is parsed once more as one text, where it
        came in pieces or may refer to links defined since.
        """
        has_new_links = "[" in self._drawn and self._known_links != self._links
        if not self._drawn or is_final:
            self._known_links = dict(self._links)
        if is_final and (self._appended > 1 or has_new_links):
            await self.update(text)
            self._drawn, self.tail, self._appended = text, "", 1
            return True
        if not text.startswith(self._drawn):
            await self.update("")
            self._drawn, self._appended = "", 0
        new = text[len(self._drawn) :]
        end = (
            len(new)
            if is_closed
            else large_answers.closed_end(new, bool(self._drawn) and not self._drawn.endswith("\n"))
        )
        self._drawn, self.tail = self._drawn + new[:end], new[end:]
        if end:
            self._appended += 1
            await self.append(new[:end])
        return bool(end)


class AnswerBody(Vertical):
    """The text of an answer; ``tail`` is its end that cannot be parsed yet."""

    DEFAULT_CSS = "AnswerBody { height: auto; }"

    def __init__(self) -> None:
        super().__init__()
        self.tail = ""
        self._links: dict[str, Any] = {}  # of all parts, by label
        self._definitions = ""

    async def show(self, text: str, is_final: bool) -> None:
        """Show another text, part by part; it is ``is_final`` where no more follows."""
        wanted = parts(text)
        if (defined := definitions(text)) != self._definitions:
            self._definitions = defined
            self._links.clear()
            _Parser(self._links).parse(defined)
        for number, part in enumerate(wanted):
            widget = await self._widget(number, part)
            if widget is None:
                return
            is_closed = is_final or number + 1 < len(wanted)
            if isinstance(widget, PlainText):
                widget.show(part.text)
                continue
            widget.set_class(number + 1 < len(wanted) and wanted[number + 1].begins_with_item, "in-list")
            if await widget.show(part.text, is_closed, is_final):
                await pause()
        await self.remove_children(self.children[len(wanted) :])
        last = self.children[-1] if self.children else None
        self.tail = last.tail if isinstance(last, MarkdownPart) else ""

    async def _widget(self, number: int, part: Part) -> MarkdownPart | PlainText | None:
        """The widget of a part; None where the answer has gone from the screen meanwhile."""
        kind = MarkdownPart if part.is_markdown else PlainText
        if number < len(self.children) and not isinstance(self.children[number], kind):
            await self.remove_children(self.children[number:])
        if not self.is_attached:
            return None
        if number == len(self.children):
            await self.mount(MarkdownPart(self._links) if part.is_markdown else PlainText())
        found = self.children[number] if number < len(self.children) else None
        assert found is None or isinstance(found, MarkdownPart | PlainText)
        return found


async def pause() -> None:
    """Let the screen be laid out and keys be read."""
    await asyncio.sleep(PAUSE_S)


class _Parser(MarkdownIt):
    """As Textual's own, but HTML is text: nothing of an answer is dropped. ``links`` are those of other texts too."""

    def __init__(self, links: dict[str, Any]) -> None:
        super().__init__("gfm-like", {"html": False, "maxNesting": MOST_NESTED})
        keep_as_written(self)
        self.inline.ruler.at("newline", _keep_indent)
        self.core.ruler.push("switch_marks", _set_off_switch_marks)
        self.core.ruler.push("spaces", _keep_spaces)
        self._links = links

    def parse(self, src: str, env: MutableMapping[str, Any] | None = None) -> list[Token]:
        """The tokens of a text; links that it defines are kept."""
        return super().parse(src, {"references": self._links})


def keep_as_written(parser: MarkdownIt) -> None:
    """Show Markdown as the model wrote it.

    Poems and addresses have line breaks that Markdown joins; ``\\(x_1\\)``, ``C:\\_new``, ``__init__``, ``2*3*4`` and
    ``&lt;`` have marks that it takes for its own, and "2. and 4. are right" would become 2. and 3. Emphasis is written
    with asterisks.
    """

    def keep_backslash(state: StateInline, silent: bool) -> bool:
        before, is_break = len(state.tokens), state.src[state.pos : state.pos + 2] == "\\\n"
        if is_break and not silent:
            state.pending += "\\"
        if not escape(state, silent):
            return False
        for token in state.tokens[before:]:
            if token.type == "text_special":
                token.content = token.markup
        return True

    def only_asterisks(state: StateInline, silent: bool) -> bool:
        begin, before = state.pos, len(state.delimiters)
        if state.src[begin] == "_" or not emphasis.tokenize(state, silent):
            return False
        if _FACTORS.fullmatch(state.src[begin - 1 : begin] + state.src[state.pos : state.pos + 1]):
            for delimiter in state.delimiters[before:]:
                delimiter.open = False
        return True

    parser.inline.ruler.at("escape", keep_backslash)
    parser.inline.ruler.at("emphasis", only_asterisks)
    parser.disable("entity")
    parser.core.ruler.push("breaks_and_numbers", _keep_breaks_and_numbers)


def _keep_breaks_and_numbers(state: StateCore) -> None:
    """Keep line breaks; give the items of a list the numbers that were written as their ``value``, but where they are
    all the same.
    """
    lists: list[list[Token]] = []
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type, child.tag = "hardbreak", "br"
        if token.type in ("ordered_list_open", "bullet_list_open"):
            lists.append([])
        elif token.type == "list_item_open":
            lists[-1].append(token)
        elif token.type in ("ordered_list_close", "bullet_list_close"):
            items = lists.pop()
            if len({item.info for item in items}) > 1:
                for item in items:
                    item.attrSet("value", item.info)


def _keep_indent(state: StateInline, silent: bool) -> bool:
    """Begin a line with the white space that Markdown leaves out: poems and columns stand as they were written."""
    begin = state.pos
    if not newline(state, silent):
        return False
    if not silent:
        state.pending += state.src[begin + 1 : state.pos]
    return True


def _keep_spaces(state: StateCore) -> None:
    """Keep runs of spaces, which Textual draws as one: it draws a soft break as a space, and none is left but these."""
    _replace(state, _SPACES, lambda spaces: [Token("softbreak", "br", 0) for _ in spaces.expandtabs(TAB)[:WIDEST]])


def _set_off_switch_marks(state: StateCore) -> None:
    """Draw the marks of switches as code is drawn, apart from what the model says."""
    _replace(state, MARKED, lambda mark: [Token("code_inline", "code", 0, content=mark)])


def _replace(state: StateCore, pattern: re.Pattern[str], made: Callable[[str], list[Token]]) -> None:
    """Put what is ``made`` of each match of a pattern in the texts in its place."""
    for token in state.tokens:
        if not (token.children and pattern.search(token.content)):
            continue
        children = list[Token]()
        for child in token.children:
            end = 0
            for found in pattern.finditer(child.content) if child.type == "text" else ():
                children += [child.copy(content=child.content[end : found.start()]), *made(found[0])]
                end = found.end()
            children.append(child.copy(content=child.content[end:]) if end else child)
        token.children = [one for one in children if one.type != "text" or one.content]
