"""An answer's text in parts that are mounted in turn, so that no layout has many new widgets."""

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
TAB, MAX_SPACES = 4, 200  # cells
_SPACES = re.compile(r"([ \t]*\t[ \t]*|[ ]{2,})")
_FACTORS = re.compile(r"[A-Za-z0-9]{2}|\)\(")  # around asterisks that multiply rather than begin emphasis
MIN_WIDTH = 8  # of an item's text, however deeply it is nested
MAX_INDENT = 24  # of tables, code and quotes in items


class HangingIndent(Visual):
    """A text with a bullet before its first row and its other rows equally indented."""

    def __init__(self, bullet: str, text: Content) -> None:
        self.bullet = bullet
        self.text = text

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        """Render the rows; an empty item has one."""
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
        return max(min(len(self.bullet), width - MIN_WIDTH), 0)


class ItemText(MarkdownBlock):
    """A paragraph of a list item, behind the item's bullet or as many blanks."""

    COMPONENT_CLASSES = {"bullet"}  # noqa: RUF012 (as Textual declares it)
    DEFAULT_CSS = """
    ItemText > .bullet { color: $text-primary; }
    ItemText:light > .bullet { color: $text-secondary; }
    """

    def __init__(self, block: MarkdownBlock, bullet: str) -> None:
        super().__init__(block._markdown, block._token)
        self._bullet = bullet
        self._content = block._content
        self.update(HangingIndent(bullet, block._content))

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """Return the selected text, with the bullet if the selection starts at or before the text's beginning."""
        chosen = selection.extract(self._content.plain)
        is_whole = selection.start is None or not any(selection.start)
        return (self._bullet if is_whole else "") + chosen, "\n"


class ItemList(MarkdownList):
    """A list with its nested lists, flattened to one column of items."""

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
                    block.styles.margin = (1, 0, 1, min(len(blanks), MAX_INDENT))
                    yield block


def _bullets(items: list[MarkdownListItem]) -> list[str]:
    if not (items and isinstance(items[0], MarkdownOrderedListItem)):
        return [item.bullet for item in items]
    counted = enumerate(items, int(items[0].bullet))
    numbers = [f"{item._token.attrGet('value') or number}{item._token.markup} " for number, item in counted]
    return [number.rjust(max(map(len, numbers)) + 1) for number in numbers]


class CodeBlock(MarkdownFence):
    """A block of code that wraps long lines, which Textual's block cuts off, and never guesses the language.

    Guessing imports all 250 lexers, which takes 0.2 s.
    """

    DEFAULT_CSS = "CodeBlock > Label { width: 1fr; }"

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        return super().highlight(code, language or "text", ansi, dark)


class MarkdownPart(Markdown):
    """Blocks of Markdown that grow at their end; ``tail`` is the last text, which cannot be parsed yet."""

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
        """Show ``text``, appending to the drawn text if it begins with that; return whether anything was drawn.

        A text that ``is_closed`` has no tail. One that ``is_final`` is parsed again as a whole if it was drawn in
        pieces, or if links that it may refer to have been defined since.
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
        is_mid_line = bool(self._drawn) and not self._drawn.endswith("\n")
        end = len(new) if is_closed else large_answers.closed_end(new, is_mid_line)
        self._drawn, self.tail = self._drawn + new[:end], new[end:]
        if end:
            self._appended += 1
            await self.append(new[:end])
        return bool(end)


class AnswerBody(Vertical):
    """The text of an answer; ``tail`` is its last text, which cannot be parsed yet."""

    DEFAULT_CSS = "AnswerBody { height: auto; }"

    def __init__(self) -> None:
        super().__init__()
        self.tail = ""
        self._links: dict[str, Any] = {}  # of all parts, by label
        self._definitions = ""

    async def show(self, text: str, is_final: bool) -> None:
        """Show ``text`` part by part; ``is_final`` says that nothing will be added to it."""
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
        """Find or mount the widget of a part; return None if the answer is removed meanwhile."""
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
    """Let Textual lay out the screen and handle keys."""
    await asyncio.sleep(PAUSE_S)


class _Parser(MarkdownIt):
    """Textual's parser, but HTML is shown as text. ``links`` are shared by all parts of an answer."""

    def __init__(self, links: dict[str, Any]) -> None:
        super().__init__("gfm-like", {"html": False, "maxNesting": MOST_NESTED})
        keep_as_written(self)
        self.inline.ruler.at("newline", _keep_indent)
        self.core.ruler.push("switch_marks", _set_off_switch_marks)
        self.core.ruler.push("spaces", _keep_spaces)
        self._links = links

    def parse(self, src: str, env: MutableMapping[str, Any] | None = None) -> list[Token]:
        """Parse a text and add the links that it defines to those of the other parts."""
        return super().parse(src, {"references": self._links})


def keep_as_written(parser: MarkdownIt) -> None:
    """Make a parser keep what Markdown would change.

    It keeps line breaks, as in poems and addresses; characters that Markdown takes for markup in ``\\(x_1\\)``,
    ``C:\\_new``, ``__init__``, ``2*3*4`` and ``&lt;``; and the numbers of a list, which Markdown would make
    consecutive. Only asterisks mark emphasis.
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
    """Keep line breaks, and store the written numbers of list items as their ``value``, unless all are the same."""
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
    """Keep the white space at the beginning of a line, for poems and columns; Markdown strips it."""
    begin = state.pos
    if not newline(state, silent):
        return False
    if not silent:
        state.pending += state.src[begin + 1 : state.pos]
    return True


def _keep_spaces(state: StateCore) -> None:
    """Keep runs of spaces, which Textual collapses: write them as soft breaks, which it draws as a space each."""
    _replace(state, _SPACES, lambda spaces: [Token("softbreak", "br", 0) for _ in spaces.expandtabs(TAB)[:MAX_SPACES]])


def _set_off_switch_marks(state: StateCore) -> None:
    """Draw the marks of mode switches as code, to set them off from the model's text."""
    _replace(state, MARKED, lambda mark: [Token("code_inline", "code", 0, content=mark)])


def _replace(state: StateCore, pattern: re.Pattern[str], make: Callable[[str], list[Token]]) -> None:
    """Replace each match of ``pattern`` in the texts by the tokens that ``make`` returns for it."""
    for token in state.tokens:
        if not (token.children and pattern.search(token.content)):
            continue
        children = list[Token]()
        for child in token.children:
            end = 0
            for found in pattern.finditer(child.content) if child.type == "text" else ():
                children += [child.copy(content=child.content[end : found.start()]), *make(found[0])]
                end = found.end()
            children.append(child.copy(content=child.content[end:]) if end else child)
        token.children = [child for child in children if child.type != "text" or child.content]
