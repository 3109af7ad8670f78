"""NVML's readings of the last minutes as lines of bars."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from kvchat.protocol.figures import Snapshot
from kvchat.tui.gpu_history import GpuHistory, Moment
from kvchat.tui.panel_rows import EXPLANATIONS, GPU_HISTORY, has_gpu
from kvchat.units import BARS, MISSING, figure, size

LABEL_WIDTH, VALUE_WIDTH = 7, 20
UNREAD = "·"  # the sign of a moment without a reading
NO_GPU = "no GPU, so there is no history"
NO_READING = "NVML gives no reading of this GPU"


class GpuHistoryPlot(Widget, can_focus=False):
    """Memory, load, power and PCIe traffic; one line that says why where there are none."""

    DEFAULT_CSS = """
    GpuHistoryPlot { height: auto; border-top: solid $foreground 15%; border-title-color: $primary; padding: 0 1;
                     color: $text-muted; }
    GpuHistoryPlot:focus { border-top: solid $primary; }
    """

    lines: reactive[tuple[tuple[str, tuple[float | None, ...], float, str], ...]] = reactive(())
    absence: reactive[str] = reactive(NO_GPU)

    def on_mount(self) -> None:
        self.border_title = f" {GPU_HISTORY} "

    @property
    def explanation(self) -> str:
        """The meaning of the figures shown."""
        return EXPLANATIONS[GPU_HISTORY]

    def show(self, history: GpuHistory, snapshot: Snapshot | None) -> None:
        """Draw the history as it is now."""
        before = len(self.lines)
        self.absence = NO_READING if snapshot and has_gpu(snapshot) else NO_GPU
        self.lines = rows(tuple(history.moments))
        if len(self.lines) != before:
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.lines) or 1

    def render(self) -> Content:
        """A line for each reading: its name, its course and its present value."""
        if not self.lines:
            return Content.assemble((self.absence, "dim"))
        room = max(self.content_size.width - LABEL_WIDTH - VALUE_WIDTH - 1, 4)
        return Content("\n").join(
            Content.assemble(
                f"{name:<{LABEL_WIDTH}}",
                (spark(values[-room:], top).rjust(room), "$primary"),
                (f" {value:>{VALUE_WIDTH}}", "dim" if value == MISSING else "$foreground"),
            )
            for name, values, top, value in self.lines
        )


def rows(moments: Sequence[Moment]) -> tuple[tuple[str, tuple[float | None, ...], float, str], ...]:
    """Name, course, the value of a full bar and the present value of each reading; nothing without a moment."""
    if not moments:
        return ()
    now = moments[-1]
    power, pcie = tuple(one.power for one in moments), tuple(one.pcie for one in moments)
    used = MISSING if now.used is None else f"{size(now.used)} / {size(now.total)}"
    return (
        ("memory", tuple(one.used for one in moments), float(now.total or 0), used),
        ("load", tuple(one.utilization for one in moments), 100.0, figure(now.utilization, "%")),
        ("power", power, _top(power), figure(now.power, "W")),
        ("PCIe", pcie, _top(pcie), MISSING if now.pcie is None else f"{size(now.pcie)}/s"),
    )


def spark(values: Sequence[float | None], top: float) -> str:
    """A block for each value, of which one of ``top`` is a full one."""
    last = len(BARS) - 1
    return "".join(
        UNREAD if value is None else BARS[min(round(value / top * last), last)] if top else BARS[0] for value in values
    )


def _top(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)
