"""The comparison: the answers side by side with the first difference marked, below them the table and the verdict."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from kvchat.conversations import comparison
from kvchat.conversations.comparison import COLUMNS, Comparison, first_difference, label
from kvchat.errors import KvchatError
from kvchat.foreign_text import visible
from kvchat.protocol.figures import Run
from kvchat.tui.actions import bindings
from kvchat.tui.comparing.comparisons import Comparisons
from kvchat.tui.running_comparison import RunningComparison
from kvchat.tui.screens.closing import ClosesOnce
from kvchat.tui.widgets.bars import KeyHints

MARK = "▶"  # before the first token that another answer does not have


class CompareScreen(ClosesOnce, ModalScreen[None]):
    """Shows one comparison, ``shown``, from its beginning on."""

    CSS = """
    CompareScreen { align: center middle; }
    CompareScreen > Vertical { padding: 0 1; background: $surface; border: round $primary; }
    CompareScreen #question { height: auto; max-height: 2; color: $text-muted; }
    CompareScreen #answers { layout: vertical; height: 1fr; }
    CompareScreen.-wide #answers { layout: horizontal; }
    CompareScreen #answers VerticalScroll {
        border: round $foreground 30%; padding: 0 1; height: 1fr; min-height: 4; width: 1fr;
        scrollbar-size-vertical: 1;
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
        """Draw the comparison as it is now."""
        if self._is_composed:  # the engine may report while some of the widgets are still to come
            self.draw(self.shown)
            self.refresh_bindings()

    def draw(self, shown: RunningComparison) -> None:
        """Update the widgets."""
        self.query_one("#question", Static).update(visible(shown.question.strip()))
        answers = self.query("#answers Static").results(Static)
        texts = result_texts(shown.result) if shown.result else running_texts(shown)
        for static, text in zip(answers, texts, strict=True):
            static.update(text)
        self._show_figures(shown)

    def _show_figures(self, shown: RunningComparison) -> None:
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
        """Write the result beside each other as Markdown and as JSON, into the present folder."""
        assert self.shown.result is not None
        name = time.strftime("comparison-%Y%m%d-%H%M%S")
        try:
            for ending in comparison.FORMATS:
                comparison.write(self.shown.result, Path(f"{name}{ending}"))
        except KvchatError as error:
            self.app.notify(str(error), severity="warning")
        else:
            endings = " and ".join(comparison.FORMATS)
            self.app.notify(f"{Path(name).absolute()}: {endings}", title="Written", timeout=10)


def running_texts(shown: RunningComparison) -> list[Content]:
    """The text of each variant so far."""
    texts = (shown.progress[i].text if i in shown.progress else "" for i in range(len(shown.variants)))
    return [Content(visible(text)) for text in texts]


def result_texts(result: Comparison) -> list[Content]:
    """The answers; a variant that did not come to answer has none."""
    alike = first_difference(result.runs)
    shown = [answer_text(run, alike) for run in result.runs]
    return shown + [Content("")] * (len(result.variants) - len(shown))


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
    """A row for each run."""
    rows = comparison.rows(result)
    table = Table.grid(padding=(0, 0, 0, 2))
    table.add_column(no_wrap=True, overflow="ellipsis", min_width=8)
    for column in list(zip(COLUMNS, *rows, strict=True))[1:]:
        table.add_column(no_wrap=True, justify="right", min_width=max(map(len, column)))
    table.add_row(*(Text(heading, style="dim") for heading in COLUMNS))
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table
