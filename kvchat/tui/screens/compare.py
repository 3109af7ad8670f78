"""The comparison: answers side by side, their first difference marked, table and verdict; the needle demonstration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar, Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from kvchat.conversations import comparison
from kvchat.conversations.comparison import COLUMNS, Comparison, first_difference, label
from kvchat.foreign_text import visible
from kvchat.protocol.figures import Run
from kvchat.tui.actions import bindings
from kvchat.tui.comparisons import FOUND, HEADINGS, MISSED, Comparisons, needle_rows, verdict
from kvchat.tui.screens.base import Dialog, errors_as_toasts
from kvchat.tui.state import RunningComparison
from kvchat.tui.widgets.bars import KeyHints
from kvchat.units import count

MARK = "▶"  # before the first token that another answer does not have
WIDTH, BESIDE = 92, 6  # cells of the box, and of what is beside the table in it
GAP, ANSWER, RIGHT = 2, 1, 2  # between columns; the column of answers, and that behind which are numbers
LEAST, KEPT = 8, 4  # cells of an answer, and columns that give way only after it


class CompareScreen(Dialog):
    """Shows one comparison, ``shown``, from its beginning on."""

    CSS = """
    CompareScreen #question { height: auto; max-height: 2; color: $text-muted; }
    CompareScreen #answers { layout: vertical; height: 1fr; }
    CompareScreen.-wide #answers { layout: horizontal; }
    CompareScreen #answers VerticalScroll {
        border: round $foreground 30%; padding: 0 1; height: 1fr; min-height: 4; width: 1fr;
        border-title-color: $primary; scrollbar-size-vertical: 1;
    }
    CompareScreen #answers VerticalScroll:focus { border: round $primary; }
    CompareScreen #figures { height: auto; }
    CompareScreen #verdict { height: auto; max-height: 6; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012  (Textual declares it)
    BINDINGS: ClassVar[list[BindingType]] = bindings("compare")

    def __init__(self, comparisons: Comparisons, shown: RunningComparison) -> None:
        super().__init__()
        self._comparisons = comparisons
        self.shown = shown
        self._is_composed = False

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "compare"
            yield Static(id="question", markup=False)
            with Container(id="answers"):
                for variant in self.shown.variants:
                    with VerticalScroll() as column:
                        column.border_title = visible(label(variant))
                        yield Static(markup=False)
            yield Static(id="figures")
            yield Static(id="verdict", markup=False)
            yield KeyHints()

    def on_mount(self) -> None:
        self._is_composed = True
        self.show()

    def show(self) -> None:
        if self._is_composed:  # the engine may report while some of the widgets are still to come
            self.draw(self.shown)
            self.refresh_bindings()

    def draw(self, shown: RunningComparison) -> None:
        self.query_one("#question", Static).update(visible(shown.question.strip()))
        answers = self.query("#answers Static").results(Static)
        said = (shown.progress[i].text if i in shown.progress else "" for i in range(len(shown.variants)))
        if shown.result:  # a variant that did not come to answer has none
            alike = first_difference(shown.result.runs)
            texts = [answer_text(run, alike) for run in shown.result.runs]
            texts += [Content("")] * (len(shown.variants) - len(texts))
        else:
            texts = [Content(visible(text)) for text in said]
        for static, text in zip(answers, texts, strict=True):
            static.update(text)
        verdict = self.query_one("#verdict", Static)
        if shown.result is None:
            verdict.update(visible(shown.error or shown.stage))
            return
        self.query_one("#figures", Static).update(figures_table(shown.result))
        verdict.update(visible("\n".join(comparison.verdicts(shown.result))))
        self.query_one(Vertical).border_subtitle = f"seed {shown.sampling.seed}"

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """True if a key does this now: only a result is written."""
        return action != "write" or self.shown.result is not None

    def action_leave(self) -> None:
        """Stop the comparison; close it when it is over."""
        if self.shown.is_over:
            self.dismiss()
        else:
            self._comparisons.stop()

    def action_write(self) -> None:
        """Write the result beside each other as Markdown and as JSON, into the current folder."""
        assert self.shown.result is not None
        name = time.strftime("comparison-%Y%m%d-%H%M%S")
        with errors_as_toasts(self.app):
            for ending in comparison.FORMATS:
                comparison.write(self.shown.result, Path(f"{name}{ending}"))
            endings = " and ".join(comparison.FORMATS)
            self.app.notify(f"{Path(name).absolute()}: {endings}", title="Written", timeout=10)


def answer_text(run: Run, alike: int | None) -> Content:
    """An answer whose first ``alike`` tokens all have: they are dim, and the token after them is marked."""
    if run.refusal:
        return Content(visible(run.refusal))
    if alike is None:
        return Content(visible(run.text))
    same, other, rest = (
        visible("".join(run.pieces[part])) for part in (slice(alike), slice(alike, alike + 1), slice(alike + 1, None))
    )
    return Content.assemble((same, "dim"), (f"{MARK}{other}", "bold reverse $warning"), rest)


def figures_table(result: Comparison) -> Table:
    rows = comparison.rows(result)
    table = Table.grid(padding=(0, 0, 0, 2))
    table.add_column(no_wrap=True, overflow="ellipsis", min_width=8)
    for column in list(zip(COLUMNS, *rows, strict=True))[1:]:
        table.add_column(no_wrap=True, justify="right", min_width=max(map(len, column)))
    table.add_row(*(Text(heading, style="dim") for heading in COLUMNS))
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


class NeedleScreen(CompareScreen):
    """Rows fill as the modes answer."""

    CSS = """
    NeedleScreen > Vertical { width: 92; height: auto; }
    NeedleScreen Static { height: auto; margin: 0 0 1 0; }
    NeedleScreen #question { max-height: 5; }
    """

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "needle"
            yield Static(id="question", markup=False)
            yield Static(id="figures")
            yield Static(id="verdict", markup=False)
            yield KeyHints()

    def on_resize(self) -> None:
        self.show()

    def draw(self, shown: RunningComparison) -> None:
        fact: Content | str = "Hiding a fact in a long text."
        if shown.fact:
            read = f" of {count(shown.result.prompt_tokens, 'token')}" if shown.result else ""
            fact = Content.assemble(
                f"A text{read} mentions a fact once, near its beginning: ", (visible(shown.fact), "bold"), ". Every"
                " mode has the same exact K/V of it and is asked at the end: ",
                (visible(shown.question.rpartition("\n")[2]), "bold"),
            )  # fmt: skip
        self.query_one("#question", Static).update(fact)
        colors = self.app.theme_variables
        room = min(self.app.size.width, WIDTH) - BESIDE
        self.query_one("#figures", Static).update(needle_table(shown, colors["success"], colors["error"], room))
        self.query_one("#verdict", Static).update(visible(verdict(shown) if shown.is_over else shown.stage))


def show(app: App[None], comparisons: Comparisons, shown: RunningComparison) -> None:
    """Show a comparison or a needle in its own screen, which is opened once and may lie below another."""
    for screen in app.screen_stack:
        if isinstance(screen, CompareScreen) and screen.shown is shown:
            screen.show()
            return
    app.push_screen((CompareScreen if shown.fact is None else NeedleScreen)(comparisons, shown))


def needle_table(shown: RunningComparison, good: str, bad: str, room: int) -> Table:
    """A row for each mode in ``room`` cells; ``good`` and ``bad`` are colors.

    The figures keep their width; the answer has what is left, and where that is little the last figures give way.
    """
    rows = [HEADINGS, *needle_rows(shown)]
    widths = [max(cell_len(row[at]) for row in rows) for at in range(len(HEADINGS))]
    places = list(range(len(HEADINGS)))
    while (left := room - sum(widths[at] + GAP for at in places if at != ANSWER)) < LEAST and len(places) > KEPT:
        places.pop()
    widths[ANSWER] = min(widths[ANSWER], left)
    if left < LEAST:
        places.remove(ANSWER)
    table = Table.grid(padding=(0, GAP, 0, 0))
    for at in places:
        right: Literal["left", "right"] = "right" if at > RIGHT else "left"
        table.add_column(width=widths[at], no_wrap=True, justify=right, overflow="ellipsis")
    for number, row in enumerate(rows):
        found = {FOUND: good, MISSED: bad}.get(row[2], "")
        table.add_row(*(Text(row[at], style="dim" if not number else found if at == 2 else "") for at in places))
    return table
