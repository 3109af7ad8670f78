"""A large answer is shown in full by few widgets, and few of them are added between two layouts."""

import itertools
from itertools import pairwise

import pytest
from markdown_it import MarkdownIt
from support.app_driver import drawn as screen
from support.app_driver import wait_for
from textual.app import App, ComposeResult
from textual.style import Style
from textual.widgets._markdown import MarkdownBlock

from kvchat.conversations.conversation import Message
from kvchat.tui.large_answers import MOST_WIDGETS
from kvchat.tui.widgets import answer_body
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.answer_body import ItemText, keep_as_written
from kvchat.tui.widgets.base import PlainText
from kvchat.tui.widgets.transcript import Transcript

ROW = "| " + " | ".join(f"cell {column}" for column in range(60)) + " |\n"
LARGE = {
    "table": ROW * 150,
    "list": "".join(f"- item {n}\n" for n in range(1500)),
    "code in items": "".join(f"- item {n}\n\n  ```py\n  x = {n}\n  ```\n" for n in range(500)),
    "code": "".join(f"```py\n{'x = 1' * n}\n```\n\n" for n in range(150)),
    "quotes": "".join(f"{'>' * (n % 30)} quote {n}\n\n" for n in range(500)),
    "prose": "".join(f"Paragraph {n}.\n\n" for n in range(1500)),
}
NEW_AT_ONCE = 40


class Page(App[None]):
    def compose(self) -> ComposeResult:
        yield Transcript()


@pytest.fixture
def paused(monkeypatch):
    """A list of the number of Markdown widgets at each pause; its first element has to be set to the answer."""
    seen: list = [None]
    genuine = answer_body.pause

    async def pause():
        seen.append(len(seen[0].query("MarkdownPart *")))
        await genuine()

    monkeypatch.setattr(answer_body, "pause", pause)
    return seen


def most_at_once(paused: list) -> int:
    """The most widgets added between two pauses."""
    counts = [0, *paused[1:]]
    del paused[1:]
    return max(after - before for before, after in pairwise(counts))


def drawn(answer: Answer) -> str:
    """The text that its widgets show."""
    markdown = [block._content.plain for block in answer.query(MarkdownBlock)]
    return "\n".join([*markdown, *(part.text for part in answer.query(PlainText))])


@pytest.mark.parametrize("name", LARGE)
async def test_a_huge_answer_adds_few_widgets_at_a_time(name, paused):
    text = f"Here it is:\n\n{LARGE[name]}\nThat was it."
    app = Page()
    async with app.run_test(size=(120, 40)) as _:
        answer = paused[0] = await app.query_one(Transcript).add(Answer())
        answer.feed(text[:-4])
        await wait_for(lambda: not answer._paced._is_requested and "That was" in drawn(answer))
        assert most_at_once(paused) <= NEW_AT_ONCE
        await answer.finish(Message(parent=None, role="assistant", text=text, ending="eos"), "receipt")
        for word in ("Here it is:", "That was it.", "149" if name == "list" else ""):
            assert word in drawn(answer)
        assert len(answer.query("*")) < 2 * MOST_WIDGETS
        await wait_for(lambda: answer.size.height)
        await answer.set_collapsed(True)
        assert not answer.query("MarkdownPart")
        paused[1:] = []
        await answer.set_collapsed(False)
        assert most_at_once(paused) <= NEW_AT_ONCE
        assert "That was it." in drawn(answer)


async def test_a_split_list_has_no_gap():
    text = "".join(f"- item {n}\n" for n in range(25)) + f"\n{ROW * 9}\nAnd **then**."
    app = Page()
    async with app.run_test(size=(120, 60)) as _:
        answer = await app.query_one(Transcript).add(Answer())
        await answer.finish(Message(parent=None, role="assistant", text=text, ending="eos"), "")
        kinds = [type(part).__name__ for part in answer.query_one("AnswerBody").children]
        assert kinds == ["MarkdownPart", "MarkdownPart", "PlainText", "MarkdownPart"]

        def rows():
            return [bullet.region.y for bullet in answer.query(ItemText)]

        await wait_for(lambda: len(rows()) == 25 and all(below - above == 1 for above, below in pairwise(rows())))


@pytest.mark.parametrize("removed", ["the answer", "its text"])
async def test_removing_an_answer_while_drawing_does_not_crash(monkeypatch, removed):
    app = Page()
    async with app.run_test():
        answer = await app.query_one(Transcript).add(Answer())
        body = answer.query_one(answer_body.AnswerBody)

        async def pause():
            await (answer.remove() if removed == "the answer" else body.remove_children())

        # ``feed`` would deadlock: its task would wait for the drawing, and the removal for that task.
        monkeypatch.setattr(answer_body, "pause", pause)
        await answer.finish(Message(parent=None, role="assistant", text=LARGE["prose"], ending="eos"), "done")
        assert not answer.is_attached or answer.receipt == "done"


def links_of(answer: Answer) -> set[str]:
    """The actions of its links."""
    spans = [span for block in answer.query(MarkdownBlock) for span in block._content.spans]
    return {
        span.style.meta["@click"] for span in spans if isinstance(span.style, Style) and "@click" in span.style.meta
    }


@pytest.mark.parametrize(("between", "is_streamed"), [("prose", True), ("list", False)])
async def test_links_use_definitions_from_other_parts(between, is_streamed):
    first = "[0]: https://zero.org\n\nSee [one][1] and [One].\n\n" + LARGE["prose"][:600]
    last = f"And [zero][0].\n\n{LARGE[between]}\n[1]: https://one.org\n[one]: https://another.org\n"
    app = Page()
    async with app.run_test() as _:
        answer = await app.query_one(Transcript).add(Answer())
        if is_streamed:
            answer.feed(first)
            await wait_for(lambda: not answer._paced._is_requested and links_of(answer) == set())
            answer.feed(last)
            await wait_for(lambda: not answer._paced._is_requested and links_of(answer))
        await answer.finish(Message(parent=None, role="assistant", text=first + last, ending="eos"), "")
        assert links_of(answer) == {f"link('https://{name}.org')" for name in ("zero", "one", "another")}


async def test_line_breaks_backslashes_and_underscores_are_kept():
    text = (
        "Roses are red,\nviolets are blue.\n\n- 12 Main Street\n  Springfield\n\n\\(a_1\\) and __init__ in C:\\_new\n"
    )
    app = Page()
    async with app.run_test(size=(80, 40)):
        answer = await app.query_one(Transcript).add(Answer())
        for start in range(0, len(text), 7):
            answer.feed(text[start : start + 7])
            await answer._draw()
        lines = [
            "Roses are red,",
            "violets are blue.",
            "12 Main Street",
            "Springfield",
            r"\(a_1\) and __init__ in C:\_new",
        ]
        await wait_for(lambda: [line for line in lines if line not in drawn_lines(app)] == [])
        await answer.finish(Message(parent=None, role="assistant", text=text, ending="eos"), "")
        await wait_for(lambda: [line for line in lines if line not in drawn_lines(app)] == [])


def drawn_lines(app: App[None]) -> list[str]:
    return [line.strip(" ▌▊▎│•") for line in screen(app).split("\n")]


async def test_spaces_are_drawn_as_written():
    texts = {
        "Down\n    the page\n  and   back": "Down\n    the page\n  and   back",
        "Name:    Bob\nAge:\t41": "Name:    Bob\nAge:    41",
        "**bold  two** and `co  de`": "bold  two and co  de",
        "end of line  \nnext": "end of line\nnext",
        f"a{' ' * 2500}b": f"a{' ' * 200}b",
    }
    app = Page()
    async with app.run_test(size=(300, 40)) as _:
        for pieces, (text, expected) in itertools.product((1, 4), texts.items()):
            answer = await app.query_one(Transcript).add(Answer())
            for at in range(0, len(text), step := -(-len(text) // pieces)):
                answer.feed(text[at : at + step])
            await answer.finish(Message(parent=None, role="assistant", text=text, ending="eos"), "receipt")
            await wait_for(lambda answer=answer, expected=expected: drawn(answer) == expected)


# ---- Line breaks, backslashes and underscores


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
    """The text of rendered Markdown."""
    parser = MarkdownIt("commonmark")
    keep_as_written(parser)
    parts = []
    for token in parser.parse(text):
        for child in token.children or ():
            parts.append("\n" if child.type.endswith("break") else child.content)
        parts.append("\n\n" if token.type == "paragraph_close" else "")
    return "".join(parts).strip()


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_text_is_shown_as_written(text):
    assert shown(text) == text.replace("  \n", "\n")


def test_emphasis_and_code_are_still_rendered():
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
def test_list_items_keep_their_numbers(text, values):
    parser = MarkdownIt("commonmark")
    keep_as_written(parser)
    assert [token.attrGet("value") for token in parser.parse(text) if token.type == "list_item_open"] == values
