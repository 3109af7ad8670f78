"""The needle demonstration: every mode is asked for a fact hidden in a long text; one table tells what each read."""

from __future__ import annotations

from typing import Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from kvchat.foreign_text import visible
from kvchat.tui.comparing.comparisons import Comparisons
from kvchat.tui.comparing.needle_rows import FOUND, HEADINGS, MISSED, needle_rows, verdict
from kvchat.tui.running_comparison import RunningComparison
from kvchat.tui.screens.compare import CompareScreen
from kvchat.tui.widgets.bars import KeyHints
from kvchat.units import count

WIDTH, BESIDE = 92, 6  # cells of the box, and of what is beside the table in it
GAP, ANSWER, RIGHT = 2, 1, 2  # between columns; the column of answers, and that behind which are numbers
LEAST, KEPT = 8, 4  # cells of an answer, and columns that give way only after it


class NeedleScreen(CompareScreen):
    """Rows fill as the modes answer."""

    CSS = """
    NeedleScreen { align: center middle; }
    NeedleScreen > Vertical {
        width: 92; max-width: 100%; height: auto; padding: 0 1; background: $surface; border: round $primary;
    }
    NeedleScreen Static { height: auto; margin: 0 0 1 0; }
    """

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "needle"
            yield Static(id="question", markup=False)
            yield Static(id="figures")
            yield Static(id="verdict", markup=False)
            yield KeyHints()

    def on_resize(self) -> None:
        """There is another room for the table."""
        self.show()

    def draw(self, shown: RunningComparison) -> None:
        """Update the task, the table and the line below it."""
        self.query_one("#question", Static).update(task(shown))
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


def task(shown: RunningComparison) -> Content:
    """The hidden fact, its place and the question."""
    if not shown.fact:
        return Content("A fact is being hidden in a long text.")
    read = f" of {count(shown.result.prompt_tokens)} tokens" if shown.result else ""
    return Content.assemble(
        f"A text{read} says once, early, ", (visible(shown.fact), "bold"), ". Every mode read it with the same exact"
        " K/V and is asked at its end: ", (visible(shown.question.rpartition("\n")[2]), "bold"),
    )  # fmt: skip


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
