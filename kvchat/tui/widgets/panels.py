"""The panel columns: labelled numbers from one snapshot; a missing reading is drawn ``n/a``."""

from __future__ import annotations

import time
from collections.abc import Iterable

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from kvchat.config.modes import mode_names
from kvchat.protocol.figures import RIBBON, Gpu, Params, Snapshot
from kvchat.tui.state import describe_price
from kvchat.tui.widgets.badges import Badges
from kvchat.tui.widgets.ribbon import CLASSES, GLYPHS
from kvchat.tui.widgets.timeline import Timeline
from kvchat.units import MISSING, count, figure, percent, size

Rows = list[tuple[str, str]]
MAX_EVENTS = 200
CALM = "calm"
WIDTH = 32  # of a line in the column, beside a scrollbar


def mode_rows(snapshot: Snapshot) -> Rows:
    """The mode's parameters in force; more than four share lines, so that the column fits 40 lines."""
    rows = [(name, _value(value)) for name, value in snapshot.params.items()]
    return [*((packed(rows) if len(rows) > 4 else rows) or [("parameters", "none")]), *price_rows(snapshot)]


def packed(rows: Rows) -> Rows:
    """Put each row on the first line that has room for it, labels before values."""
    lines: Rows = []
    for label, value in rows:
        joined = [(f"{labels} · {label}", f"{values} · {value}") for labels, values in lines]
        fits = (i for i, (labels, values) in enumerate(joined) if len(labels) + 1 + len(values) <= WIDTH)
        if (line := next(fits, None)) is None:
            lines.append((label, value))
        else:
            lines[line] = joined[line]
    return lines


def price_rows(snapshot: Snapshot) -> Rows:
    """What switching to the next mode would cost."""
    modes = mode_names()
    after = modes[(modes.index(snapshot.mode) + 1) % len(modes)] if snapshot.mode in modes else ""
    return [(f"next → {price.mode}", describe_price(price)) for price in snapshot.prices if price.mode == after]


def context_rows(s: Snapshot) -> Rows:
    """Tokens read by the last step and tokens stored."""
    share = f" · {percent(s.active / s.total)}" if s.total else ""
    rows = [("read", f"{count(s.active)} tok{share}"), ("stored", f"{count(s.total)} of {count(s.context)}")]
    return [*rows, ("reduced context", f"{count(s.reduced_tokens)} tok")] if s.reduced_tokens else rows


def recall_rows(s: Snapshot) -> Rows:
    """Recall from host to device: bytes, hit rate and time."""
    p50, p95 = figure(s.recall_ms_p50, digits=1), figure(s.recall_ms_p95, "ms", 1)
    exposed = []
    if s.exposed_ms_p95 not in (None, s.recall_ms_p95):  # without a GPU nothing is hidden
        exposed = [("exposed", f"{figure(s.exposed_ms_p50, digits=1)} / {figure(s.exposed_ms_p95, 'ms', 1)}")]
    corrections = [("corrections", count(s.corrections))] if s.corrections else []  # one mode alone corrects
    return [
        ("moved", size(s.recalled_bytes)),
        ("last step", size(s.step_bytes)),
        ("hit rate", percent(s.recall_hit_rate)),
        *corrections,
        ("p50 / p95", MISSING if s.recall_ms_p95 is None else f"{p50} / {p95}"),
        *exposed,
    ]


def memory_rows(s: Snapshot) -> Rows:
    """Memory: of the device by NVML, of torch, and of kvchat."""
    return [
        *(gpu_rows(s.gpu) if s.gpu else [("GPU", MISSING)]),
        ("torch", MISSING if s.torch_allocated is None else f"{size(s.torch_allocated)} of {size(s.torch_reserved)}"),
        ("weights", size(s.weight_bytes)),
        ("KV on the device", size(s.kv_device_bytes)),
        ("KV on the host", size(s.kv_host_bytes)),
    ]


def gpu_rows(gpu: Gpu) -> Rows:
    """Readings of NVML."""
    vitals = (figure(gpu.utilization, "%"), figure(gpu.temperature, "°C"), figure(gpu.power, "W"))
    return [
        ("GPU", gpu.name),
        ("used", MISSING if gpu.used is None else f"{size(gpu.used)} / {size(gpu.total)}"),
        ("this process", size(gpu.process)),
        ("load", " · ".join(vitals)),
    ]


def extra_rows(extras: Params) -> Rows:
    """Numbers that only the present mode has."""
    return [(name, _value(value)) for name, value in extras.items()]


def _value(value: object) -> str:
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return str(value)


class Rowed(Widget):
    """A titled block of label and value rows, values at the right edge."""

    DEFAULT_CSS = """
    Rowed { height: auto; border-top: solid $foreground 15%; border-title-color: $primary; padding: 0 1;
            color: $text-muted; }
    """

    rows: reactive[Rows] = reactive(list)

    def __init__(self, title: str, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = f" {title} "

    def watch_rows(self, old: Rows, new: Rows) -> None:
        """Numbers change ten times a second: a new layout only where their count does."""
        self.refresh(layout=len(old) != len(new))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """A line a row; asking ``render`` would need a width that is not known while the column is hidden."""
        return len(self.rows)

    def render(self) -> Content:
        """One line a row; a value too long is cut, the label never."""
        width = self.content_size.width or 34
        return Content("\n").join(self._line(label, value, width) for label, value in self.rows)

    def _line(self, label: str, value: str, width: int) -> Content:
        room = max(width - len(label) - 1, 3)
        shown = value if len(value) <= room else value[: room - 1] + "…"
        style = "dim" if value == MISSING else "$foreground"
        return Content.assemble(label, " " * max(width - len(label) - len(shown), 1), (shown, style))


class KvColumn(VerticalScroll, can_focus=False):
    """Mode, tokens read and stored over time, the mode's own numbers, recall and memory.

    The timeline takes the lines that are left. The mode's own numbers stand in ``DetailColumn`` where that is shown.
    """

    DEFAULT_CSS = """
    KvColumn { width: 36; padding: 0 0 0 1; scrollbar-size-vertical: 1; }
    KvColumn > #own-rows { border-top: none; }
    KvColumn > Timeline { height: 1fr; min-height: 2; max-height: 6; margin: 0 1; }
    """

    def compose(self) -> ComposeResult:
        yield Badges()
        yield Rowed("mode", id="mode-rows")
        yield Rowed("read and stored", id="context-rows")
        yield Rowed("", id="own-rows")
        yield Timeline()
        yield Rowed("recall", id="recall-rows")
        yield Rowed("memory", id="memory-rows")

    def on_mount(self) -> None:
        """All labels from the start, so that nothing jumps when the numbers come."""
        self.show(Snapshot("mode", {}, 0, 0, 0, 0, 0))
        for block in self.query(Rowed):
            block.rows = [(label, MISSING) for label, _ in block.rows]

    def show(self, s: Snapshot) -> None:
        """Draw one snapshot."""
        mode = self.query_one("#mode-rows", Rowed)
        mode.border_title, mode.rows = Content(f" {s.mode} "), mode_rows(s)  # a str would be markup
        self.query_one(Badges).badges = s.badges
        self.query_one("#context-rows", Rowed).rows = context_rows(s)
        # "calm" is no news, and in freeze on a GPU the column has no line to spare for it.
        self.query_one("#own-rows", Rowed).rows = [row for row in extra_rows(s.extras) if row != ("recovery", CALM)]
        self.query_one("#recall-rows", Rowed).rows = recall_rows(s)
        self.query_one("#memory-rows", Rowed).rows = memory_rows(s)
        if s.total:
            self.query_one(Timeline).add(s.active, s.total)


class DetailColumn(VerticalScroll, can_focus=False):
    """The second column of large screens: the mode's own numbers, the ribbon's legend and the event log."""

    DEFAULT_CSS = """
    DetailColumn { width: 42; padding: 0 0 0 1; scrollbar-size-vertical: 1; }
    DetailColumn > .block { height: auto; padding: 0 1; border-top: solid $foreground 15%; }
    DetailColumn > .block { border-title-color: $primary; }
    """

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._events: list[str] = []

    def compose(self) -> ComposeResult:
        yield Rowed("this mode", id="extra-rows")
        yield Static(legend(), id="legend", classes="block")
        yield Static(id="events", classes="block", markup=False)

    def on_mount(self) -> None:
        self.query_one("#legend").border_title = " ribbon "
        self.query_one("#events").border_title = " events "
        self.query_one("#extra-rows", Rowed).rows = [("own numbers", MISSING)]

    def show(self, s: Snapshot) -> None:
        """Draw the mode's own numbers."""
        self.query_one("#extra-rows", Rowed).rows = extra_rows(s.extras) or [("own numbers", MISSING)]

    def log_event(self, text: str) -> None:
        """One line in the event log, newest first."""
        self._events = [f"{time.strftime('%H:%M:%S')}  {text}", *self._events][:MAX_EVENTS]
        self.query_one("#events", Static).update("\n".join(self._events))


def legend(letters: Iterable[str] = RIBBON) -> Content:
    """Glyph, color and word of each state of the ribbon."""
    lines = [Content.assemble((GLYPHS[x] * 2, f"$ribbon-{CLASSES[x]}"), f"  {RIBBON[x]}") for x in letters]
    return Content("\n").join([*lines, Content.assemble(("┃ ", "$ribbon-tick"), "  the mode changed")])
