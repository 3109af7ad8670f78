"""Answers become a bounded number of widgets, and a growing answer leaves what was drawn unchanged."""

import time

import pytest
from markdown_it import MarkdownIt

from kvchat.tui.large_answers import MOST_DEFINITIONS, MOST_NESTED, MOST_WIDGETS, definitions, parts

TABLE = "".join("| " + " | ".join(f"c{row}.{column}" for column in range(60)) + " |\n" for row in range(150))
LARGE = {
    "table": TABLE,
    "list": "".join(f"- item {n}\n" for n in range(1500)),
    "nested": "".join(f"{'  ' * (n % 4)}{n}. item\n" for n in range(1500)),
    "prose": "".join(f"Paragraph {n}.\n\n" for n in range(1500)),
    "code": "```py\n" + "".join(f"x{n} = {n}\n" for n in range(3000)) + "```\n",
    "marks": "".join(f"{'- > ' * (n % 9)}{n}\n" for n in range(1500)),
    "small tables": "| a | b |\n| --- | --- |\n| c | d |\n\n" * 500,
    "large tables": ("| a " * 70 + "|\n\n") * 500,
    "deep": "".join(f"{' ' * n}- item {n}\n" for n in range(1500)),
    "quotes": "".join(f"> quote {n}\n" for n in range(1500)),
    "line": "word " * 100_000,
    "wide line": "日本語" * 10_000,
}
SLOW = {  # what models repeat endlessly; parsing 4,000 characters takes a second
    "images": "![" * 10_000,
    "brackets in an item": f"- {'[' * 10_000}",
    "brackets on lines": "[[[[\n" * 500,
    "brackets on long lines": f"{'[' * 2000}\n" * 50,
    "brackets in brackets": "[" * 5000 + "]" * 5000,
    "addresses": "http://a." * 4000,
    "emphasis": "a*" * 20_000,
    "no definition": ("[a]: http://b " + "[" * 1900 + "\n") * 100,
}
PARSER = MarkdownIt("gfm-like", {"html": False, "maxNesting": MOST_NESTED})  # as for an answer


def markdown_of(text: str) -> str:
    return "".join(part.text for part in parts(text) if part.is_markdown)


@pytest.mark.parametrize("name", LARGE)
def test_large_answers_stay_mostly_plain_text(name):
    text = f"It begins.\n\n{LARGE[name]}\nIt ends."
    assert "".join(part.text for part in parts(text)) == text
    assert len(markdown_of(text)) < len(text) / 4
    assert len(parts(text)) <= MOST_WIDGETS


@pytest.mark.parametrize("name", SLOW)
def test_text_that_parses_slowly_stays_plain(name):
    text = f"It begins.\n\n{SLOW[name]}\n\nIt ends."
    found = parts(text)
    assert "".join(part.text for part in found) == text
    began = time.process_time()
    for part in found:
        if part.is_markdown:
            PARSER.parse(part.text)
    PARSER.parse(definitions(text))
    assert time.process_time() - began < 1  # usually a tenth of that


def test_links_and_formulas_are_parsed_as_markdown():
    sources = "".join(f"- [Paper {n}](https://example.org/papers/{n}?q=a.b#c), see [{n}]\n" for n in range(40))
    text = "**It** is `a[0]`, $x_1 + y^2 = [0, 1)$, *so*: https://example.org/a. " * 3 + f"\n\n{sources}\n- [ ] open\n"
    assert markdown_of(text) == text


@pytest.mark.parametrize("name", LARGE)
def test_growing_text_changes_only_its_last_part(name):
    text = f"It begins.\n\n{LARGE[name]}\nIt ends."
    whole = parts(text)
    for cut in range(0, len(text), len(text) // 15):
        early = parts(text[:cut])
        assert early[:-1] == whole[: max(len(early) - 1, 0)]


def test_only_the_oversized_block_is_plain():
    for block in (TABLE, LARGE["code"]):
        found = parts(f"Look:\n\n{block}\nAnd **then**.\n")
        assert [(part.text, part.is_markdown) for part in found] == [
            ("Look:\n\n", True),
            (block, False),
            ("\nAnd **then**.\n", True),
        ]


def test_parts_begin_at_items_or_paragraphs():
    items = "".join(f"- item {n}\n  more\n" for n in range(40))
    prose = "".join(f"Paragraph {n}\ngoes on.\n\n" for n in range(40))
    for text in (items, prose):
        found = [part.text for part in parts(text) if part.is_markdown]
        assert len(found) > 3
        assert all(part.startswith(("- item", "Paragraph")) for part in found)
    assert [part.begins_with_item for part in parts(items)[1:]] == [True] * (len(parts(items)) - 1)


def test_an_ordinary_answer_becomes_few_markdown_parts():
    rows = "".join(f"| {n} | b | c |\n" for n in range(18))
    items, code = "- an item\n" * 25, "```py\nx = 1\n```\n"
    text = f"# Title\n\n{'Some words. ' * 40}\n\n{items}\n{code}\n{rows}\nEnd."
    assert markdown_of(text) == text
    assert len(parts(text)) == 3
    assert parts("") == []


def test_link_definitions_are_found_outside_code():
    text = "See [a][1].\n\n[1]: https://one.org\n```\n[2]: https://two.org\n```\n  [the third]: <x> 'y'\n[4]:\n"
    assert definitions(text) == "[1]: https://one.org\n  [the third]: <x> 'y'"
    assert definitions("[no] definition") == ""
    assert definitions("[a]: b\n" * 9999).count("\n") == MOST_DEFINITIONS - 1
