"""The comparison screen: answers side by side with their first difference marked, and figures; the needle screen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from kvchat.conversations import comparison
from kvchat.conversations.attachments import folded
from kvchat.conversations.comparison import COLUMNS, Comparison, first_difference, label
from kvchat.foreign_text import visible
from kvchat.protocol.figures import Run
from kvchat.tui.actions import bindings
from kvchat.tui.comparisons import FOUND, HEADINGS, MISSED, Comparisons, needle_rows, verdict
from kvchat.tui.screens.base import Dialog, errors_as_toasts
from kvchat.tui.state import RunningComparison
from kvchat.tui.widgets.bars import KeyHints
from kvchat.tui.widgets.base import Paced
from kvchat.units import count

MARK = "▶"  # before the first token that the answers do not share
MIN_ROWS = 4  # of an answer, with its frame
WIDTH, FRAME = 92, 6  # cells of the box, and of its frame
GAP, ANSWER, FOUND_IN = 2, 1, 2  # cells between columns; the columns of the answer and of whether it has the fact
MIN_FLEXIBLE, MIN_COLUMNS = 8, 4  # cells of the flexible column; number of columns at which it, no other, is left out


class CompareScreen(Dialog):
    """Shows the comparison ``shown``, also while it is running; all of it scrolls if it does not fit."""

    CSS = """
    CompareScreen #all { height: 1fr; scrollbar-size-vertical: 1; }
    CompareScreen #question { height: auto; max-height: 2; color: $text-muted; }
    CompareScreen #answers { layout: vertical; height: 1fr; }
    CompareScreen.-wide #answers { layout: horizontal; }
    CompareScreen #answers VerticalScroll {
        border: round $foreground 30%; padding: 0 1; height: 1fr; width: 1fr;
        border-title-color: $primary; scrollbar-size-vertical: 1;
    }
    CompareScreen #answers VerticalScroll:focus { border: round $primary; }
    CompareScreen #figures { height: auto; }
    CompareScreen #verdict { height: auto; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012  (Textual declares it)
    BINDINGS: ClassVar[list[BindingType]] = bindings("compare")

    def __init__(self, comparisons: Comparisons, shown: RunningComparison) -> None:
        super().__init__()
        self._comparisons = comparisons
        self.shown = shown
        # With rests, because Textual keeps a text's height if it changes again before its last change is laid out.
        self._drawing = Paced(self, self._draw_shown)

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "compare"
            with VerticalScroll(id="all"):
                yield Static(id="question", markup=False)
                with Container(id="answers") as answers:
                    answers.styles.min_height = MIN_ROWS * len(self.shown.variants)  # they may be below each other
                    for variant in self.shown.variants:
                        with VerticalScroll() as column:
                            column.border_title = visible(label(variant))
                            yield Static(markup=False)
                yield Static(id="figures")
                yield Static(id="verdict", markup=False)
            yield KeyHints()

    def on_resize(self) -> None:
        self.show()

    def show(self) -> None:
        self._drawing.request()

    async def _draw_shown(self) -> None:
        if self in self.app.screen_stack:  # its widgets are gone once it is closed
            self.draw(self.shown)
            self.refresh_bindings()

    def draw(self, shown: RunningComparison) -> None:
        self.query_one("#question", Static).update(visible(folded(shown.question).strip()))
        answers = self.query("#answers Static").results(Static)
        if shown.result:
            shared = first_difference(shown.result.runs)
            texts = [answer_text(run, shared) for run in shown.result.runs]
            texts += [Content("")] * (len(shown.variants) - len(texts))  # of variants that did not run
        else:
            progress = map(shown.progress.get, range(len(shown.variants)))
            texts = [Content(visible(partial.text if partial else "")) for partial in progress]
        for static, text in zip(answers, texts, strict=True):
            static.update(text)
        verdict = self.query_one("#verdict", Static)
        if shown.result is None:
            verdict.update(visible(shown.error or shown.stage))
            return
        self.query_one("#figures", Static).update(figures_table(shown.result, self.app.size.width - FRAME))
        verdict.update(visible("\n".join(comparison.verdicts(shown.result))))
        self.query_one(Vertical).border_subtitle = f"seed {shown.sampling.seed}"

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Enable writing once there is a result."""
        return action != "write" or self.shown.result is not None

    def action_leave(self) -> None:
        """Stop the comparison; close the screen if it is over."""
        if self.shown.is_over:
            self.dismiss()
        else:
            self._comparisons.stop()

    def action_write(self) -> None:
        """Write the result into the current folder, as Markdown and as JSON."""
        assert self.shown.result is not None
        name = time.strftime("comparison-%Y%m%d-%H%M%S")
        with errors_as_toasts(self.app):
            for ending in comparison.FORMATS:
                comparison.write(self.shown.result, Path(f"{name}{ending}"))
            endings = " and ".join(comparison.FORMATS)
            self.app.notify(f"{Path(name).absolute()}: {endings}", title="Written", timeout=10)


def answer_text(run: Run, shared: int | None) -> Content:
    """Return an answer; if the answers differ after ``shared`` tokens, dim these and mark the next one."""
    if run.refusal:
        return Content(visible(run.refusal))
    if shared is None:
        return Content(visible(run.text))
    slices = slice(shared), slice(shared, shared + 1), slice(shared + 1, None)
    same, other, rest = (visible("".join(run.pieces[part])) for part in slices)
    return Content.assemble((same, "dim"), (f"{MARK}{other}", "bold reverse $warning"), rest)


def figures_table(result: Comparison, room: int) -> Table:
    """Return a row for each variant in ``room`` cells."""
    rows = [COLUMNS, *comparison.rows(result)]
    return fitted([[Text(visible(cell)) for cell in row] for row in rows], room, flexible=0)


class NeedleScreen(CompareScreen):
    """Shows a needle comparison as a table that fills as the modes answer."""

    CSS = """
    NeedleScreen > Vertical { width: 92; height: auto; max-height: 100%; }
    NeedleScreen #all { height: auto; max-height: 100%; scrollbar-size-vertical: 1; }
    NeedleScreen KeyHints { dock: bottom; }
    NeedleScreen Static { height: auto; margin: 0 0 1 0; }
    NeedleScreen #question { max-height: 5; }
    """

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "needle"
            with VerticalScroll(id="all"):
                yield Static(id="question", markup=False)
                yield Static(id="figures")
                yield Static(id="verdict", markup=False)
            yield KeyHints()

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
        room = min(self.app.size.width, WIDTH) - FRAME
        self.query_one("#figures", Static).update(needle_table(shown, colors["success"], colors["error"], room))
        self.query_one("#verdict", Static).update(visible(verdict(shown) if shown.is_over else shown.stage))


def show(app: App[None], comparisons: Comparisons, shown: RunningComparison) -> None:
    """Show a comparison or a needle in its own screen, opened unless it is already, perhaps below another screen."""
    for screen in app.screen_stack:
        if isinstance(screen, CompareScreen) and screen.shown is shown:
            screen.show()
            return
    app.push_screen((CompareScreen if shown.fact is None else NeedleScreen)(comparisons, shown))


def needle_table(shown: RunningComparison, good: str, bad: str, room: int) -> Table:
    """Return a row for each mode in ``room`` cells; ``good`` and ``bad`` are colors."""
    colors = {FOUND: good, MISSED: bad}
    rows = [[Text(cell) for cell in row] for row in (HEADINGS, *needle_rows(shown))]
    for row in rows:
        row[FOUND_IN].style = colors.get(row[FOUND_IN].plain, "")
    return fitted(rows, room, flexible=ANSWER, words=FOUND_IN + 1)


def fitted(rows: Sequence[Sequence[Text]], room: int, flexible: int, words: int = 1) -> Table:
    """Return headings and rows as a table in ``room`` cells; the columns after the first ``words`` are numbers.

    The ``flexible`` column gets what the others leave. If that is too little, first the last columns are left out,
    then the flexible one.
    """
    widths = [max(row[at].cell_len for row in rows) for at in range(len(rows[0]))]
    columns = list(range(len(widths)))
    while (rest := room - sum(widths[at] + GAP for at in columns if at != flexible)) < MIN_FLEXIBLE and len(
        columns
    ) > MIN_COLUMNS:
        columns.pop()
    widths[flexible] = min(widths[flexible], rest)
    if rest < MIN_FLEXIBLE:
        columns.remove(flexible)
    table = Table.grid(padding=(0, GAP, 0, 0))
    for at in columns:
        justify: Literal["left", "right"] = "left" if at < words else "right"
        table.add_column(width=widths[at], no_wrap=True, justify=justify, overflow="ellipsis")
    for number, row in enumerate(rows):
        table.add_row(*(row[at] for at in columns), style="" if number else "dim")
    return table
