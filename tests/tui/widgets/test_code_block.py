"""Code in answers is drawn at once: no language is guessed, and the slow ones are prepared."""

from __future__ import annotations

import pytest
from pygments.lexers import JavascriptLexer, PythonLexer
from support.app_driver import wait_for
from textual import highlight
from textual.app import App, ComposeResult

from kvchat.tui.widgets.answer_body import CodeBlock, MarkdownPart, prepare_languages


class Page(App[None]):
    def compose(self) -> ComposeResult:
        yield MarkdownPart({})


@pytest.mark.parametrize("text", ["```\nx = 1\n```\n", "    x = 1\n"])
async def test_the_language_of_code_is_not_guessed(monkeypatch, text):
    guessed = []
    monkeypatch.setattr(highlight, "guess_language", lambda code, path: guessed.append(code) or "text")
    app = Page()
    async with app.run_test() as _:
        await app.query_one(MarkdownPart).show(text, is_closed=True, is_final=True)
        await wait_for(lambda: [fence._content.plain for fence in app.query(CodeBlock)] == ["x = 1"])
    assert not guessed


def test_a_language_that_is_named_is_highlighted():
    assert len(CodeBlock.highlight("x = 1", "python").spans) > len(CodeBlock.highlight("x = 1", "").spans)


@pytest.mark.parametrize("lexer", [PythonLexer, JavascriptLexer])
def test_languages_with_large_tables_are_prepared(monkeypatch, lexer):
    lexer()
    monkeypatch.delattr(lexer, "_tokens")
    prepare_languages()
    assert "_tokens" in vars(lexer)
