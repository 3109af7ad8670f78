"""The needle demonstration: every mode is asked for a fact hidden in a long text; one table tells what each read."""

from __future__ import annotations

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

    def draw(self, shown: RunningComparison) -> None:
        """Update the task, the table and the line below it."""
        self.query_one("#question", Static).update(task(shown))
        colors = self.app.theme_variables
        self.query_one("#figures", Static).update(needle_table(shown, colors["success"], colors["error"]))
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
        f"A text{read} says once, early, that the passkey is ", (shown.fact, "bold"), ". Every mode read it with the"
        " same exact K/V and is asked at its end: ", (visible(shown.question), "bold"),
    )  # fmt: skip


def needle_table(shown: RunningComparison, good: str, bad: str) -> Table:
    """A row for each mode; ``good`` and ``bad`` are colors."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for heading in HEADINGS:
        table.add_column(no_wrap=True, justify="right" if heading in HEADINGS[3:] else "left", overflow="ellipsis")
    table.add_row(*(Text(heading, style="dim") for heading in HEADINGS))
    for row in needle_rows(shown):
        style = {FOUND: good, MISSED: bad}.get(row[2], "")
        table.add_row(*(Text(cell, style=style if at == 2 else "") for at, cell in enumerate(row)))
    return table
