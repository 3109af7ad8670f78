"""Markdown drawn as the model wrote it: its line breaks stay, and so does every backslash and underscore.

Poems and addresses have line breaks that Markdown joins; ``\\(x_1\\)``, ``C:\\_new`` and ``__init__`` have marks that
it takes for its own. Emphasis is written with asterisks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_core import StateCore
    from markdown_it.rules_inline import StateInline


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
        return state.src[state.pos] != "_" and emphasis.tokenize(state, silent)

    parser.inline.ruler.at("escape", keep_backslash)
    parser.inline.ruler.at("emphasis", only_asterisks)
    parser.core.ruler.push("line_breaks", _keep_line_breaks)


def _keep_line_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type, child.tag = "hardbreak", "br"
