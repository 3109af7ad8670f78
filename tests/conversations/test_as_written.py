"""Line breaks, backslashes and underscores of an answer, on the screen and in a page."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from kvchat.conversations.export import keep_as_written

AS_WRITTEN = [
    "Roses are red,\nviolets are blue,\n\nsugar is sweet.",
    "Biscuit Ltd.\n12 Main Street  \nSpringfield\\\nUSA",
    r"\(a_1 + b_{12}\) and \[x\], \$5, 1\. item, \* no star \\ \_x\_",
    r"C:\_new\table\*.py and \\server\share",
    "__init__, _private_, __all__ and snake_case_name",
    "2*3*4, a*b*c, 2**3**4, (a+b)*(c+d)*(e+f), 5 * 3 * 2 and f(*args, **kwargs)",
    "&lt;div&gt; &amp; &copy; &#65; &nbsp;",
]


def shown(text: str) -> str:
    """What a reader sees of Markdown."""
    parser = MarkdownIt("commonmark")
    keep_as_written(parser)
    parts = []
    for token in parser.parse(text):
        for child in token.children or ():
            parts.append("\n" if child.type.endswith("break") else child.content)
        parts.append("\n\n" if token.type == "paragraph_close" else "")
    return "".join(parts).strip()


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_a_text_is_shown_as_it_was_written(text):
    assert shown(text) == text.replace("  \n", "\n")


def test_stars_and_code_are_marks_as_ever():
    parser = MarkdownIt("commonmark")
    keep_as_written(parser)
    assert (
        parser.render("**N**ational **A**ir, *a*b*")
        == "<p><strong>N</strong>ational <strong>A</strong>ir, <em>a</em>b*</p>\n"
    )
    rendered = parser.render("**bold** *it* `a_b\\` \\*none\\* [a_b](http://x/_y_)")
    assert rendered == (
        '<p><strong>bold</strong> <em>it</em> <code>a_b\\</code> \\*none\\* <a href="http://x/_y_">a_b</a></p>\n'
    )


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2. Paris\n4. Rome", ["2", "4"]),
        ("1. one\n2. two\n\n   5) five\n   3) three\n3. three", ["1", "2", "5", "3", "3"]),
        ("1. one\n1. two", [None, None]),
        ("- a\n- b", [None, None]),
    ],
)
def test_items_keep_their_numbers(text, values):
    parser = MarkdownIt("commonmark")
    keep_as_written(parser)
    assert [token.attrGet("value") for token in parser.parse(text) if token.type == "list_item_open"] == values
