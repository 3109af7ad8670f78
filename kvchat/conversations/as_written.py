"""Markdown drawn as the model wrote it: line breaks, backslashes, underscores, entities and numbers stay.

Poems and addresses have line breaks that Markdown joins; ``\\(x_1\\)``, ``C:\\_new``, ``__init__``, ``2*3*4`` and
``&lt;`` have marks that it takes for its own, and "2. and 4. are right" would become 2. and 3. Emphasis is written with
asterisks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_core import StateCore
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

_FACTORS = re.compile(r"[A-Za-z0-9]{2}|\)\(")  # before and after asterisks that multiply, where emphasis cannot begin


def keep_as_written(parser: MarkdownIt) -> None:
    """Change the rules of a parser."""
    from markdown_it.rules_inline import emphasis, escape

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
    parser.core.ruler.push("line_breaks", _keep_line_breaks)
    parser.core.ruler.push("numbers", _keep_numbers)


def _keep_line_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type, child.tag = "hardbreak", "br"


def _keep_numbers(state: StateCore) -> None:
    """Give the items of a list the numbers that were written as their ``value``, but where they are all the same."""
    lists: list[list[Token]] = []
    for token in state.tokens:
        if token.type in ("ordered_list_open", "bullet_list_open"):
            lists.append([])
        elif token.type == "list_item_open":
            lists[-1].append(token)
        elif token.type in ("ordered_list_close", "bullet_list_close"):
            items = lists.pop()
            if len({item.info for item in items}) > 1:
                for item in items:
                    item.attrSet("value", item.info)
