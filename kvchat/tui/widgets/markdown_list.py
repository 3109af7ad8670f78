"""A list of Markdown with one widget an item; Textual's own has four, one in the other, and each layout visits all."""

from __future__ import annotations

from collections.abc import Iterator

from rich.segment import Segment
from textual.app import ComposeResult
from textual.content import Content
from textual.css.styles import RulesMap
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownList,
    MarkdownListItem,
    MarkdownOrderedListItem,
    MarkdownParagraph,
)

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
        """Cells of its longest line with the bullet."""
        return len(self.bullet) + self.text.get_optimal_width(rules, container_width)

    def get_height(self, rules: RulesMap, width: int) -> int:
        """Rows at a width in cells."""
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
        """Its items' blocks, indented."""
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
