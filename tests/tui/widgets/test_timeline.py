"""The timeline, and the charts of GPU readings, fetch times and heads."""

from itertools import pairwise

import pytest
from support.message import lacks
from textual.app import App, ComposeResult

from kvchat.conversations.conversation import Conversation
from kvchat.protocol.figures import Gpu
from kvchat.protocol.messages import RECALL_EDGES_MS, Details, RecallBin, Sampling
from kvchat.tui.state import POINTS, ChatState, GpuHistory, Moment
from kvchat.tui.themes import RIBBON_DEFAULTS
from kvchat.tui.widgets.charts import (
    EXPOSED,
    HIDDEN,
    NONE,
    HeadMap,
    bin_label,
    glyph,
    layout,
    occupied_bins,
    readings,
    recall_bar,
)
from kvchat.tui.widgets.panels import MARK, MAX_POINTS, STORED, Point, Timeline, by_tokens, column_glyphs
from kvchat.units import BARS, UNREAD, bars


def test_a_column_shows_read_below_stored():
    assert column_glyphs(Point(50, 100), 100, 5) == [" ", STORED, STORED, "█", "█"]
    assert column_glyphs(Point(0, 100), 100, 3) == [" ", STORED, STORED]
    assert column_glyphs(Point(12.5, 25), 100, 5)[-1] == "▄"
    assert column_glyphs(Point(0, 0), 100, 3) == [" ", " ", " "]


def test_a_switch_is_marked_on_top():
    assert column_glyphs(Point(100, 100, switched=True), 100, 3) == [MARK, "█", "█"]


def test_columns_are_ranges_of_tokens():
    points = [Point(40, 40), Point(10, 60), Point(10, 100)]
    columns = by_tokens(points, 10, ticks=(60, 120))
    assert [point.stored for point in columns] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert [point.read for point in columns] == [0, 0, 0, 40, 40, 10, 10, 10, 10, 10]
    assert [point.switched for point in columns] == [False] * 5 + [True] + [False] * 4
    assert by_tokens([], 10) == []


def test_going_back_drops_later_points_and_points_are_bounded():
    timeline = Timeline()
    for stored in (10, 20, 30):
        timeline.add(1, stored)
    timeline.add(2, 20)
    assert [(point.read, point.stored) for point in timeline.points] == [(1, 10), (2, 20)]
    for total in range(20, 3 * MAX_POINTS):
        timeline.add(1, total)
    assert len(timeline.points) <= MAX_POINTS
    assert timeline.points[-1].stored == 3 * MAX_POINTS - 1


class TimelineApp(App[None]):
    """A timeline of five rows."""

    CSS = "Timeline { height: 5; }"

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return RIBBON_DEFAULTS

    def compose(self) -> ComposeResult:
        yield Timeline()


async def test_the_timeline_labels_its_axes_and_heights():
    app = TimelineApp()
    async with app.run_test(size=(40, 10)):
        timeline = app.query_one(Timeline)
        assert not any(timeline.render_line(y).text.strip() for y in range(5))
        timeline.add(400, 300)
        timeline.add(400, 400)
        timeline.add(512, 14203)
        rows = [timeline.render_line(y).text for y in range(5)]
        assert rows[0] == "tokens, oldest to newest                "
        assert rows[1].startswith("░ 14,203 stored  ")
        assert rows[2].startswith("█ 512 read  ")
        assert rows[4].endswith(STORED * 10 + "▁") or set(rows[4][2:]) <= set("▁▂░")
        timeline.ticks = (14203,)
        assert timeline.render_line(0).text == "tokens, oldest to newest" + 15 * " " + "▾"
        timeline.ticks = (400, 14203)
        assert timeline.render_line(0).text == " ▾" + 37 * " " + "▾", "no mark covers the label"
        timeline.styles.height = 3
        app.screen._refresh_layout()
        assert "stored" not in timeline.render_line(1).text


# ---- NVML's readings as lines of bars: each on its own scale, with missing readings marked


GiB = 2**30


def test_each_reading_has_its_own_scale_and_current_value():
    moments = [Moment(6 * GiB, 24 * GiB, 50, 100.0), Moment(12 * GiB, 24 * GiB, 100, None, GiB)]
    lines = {name: (bars(values, top), value) for name, values, top, value in readings(moments)}
    assert lines == {
        "memory": (BARS[2] + BARS[4], "12.0 GiB / 24.0 GiB"),
        "load": (BARS[4] + BARS[7], "100 %"),
        "power": (BARS[7] + UNREAD, "n/a"),
        "PCIe": (UNREAD + BARS[7], "1.0 GiB/s"),
    }
    assert readings([]) == ()
    assert bars([0, 0, None], 0) == BARS[0] * 2 + UNREAD


# ---- The history of NVML's readings: at most one a second, and no empty ones


def test_one_reading_per_second_is_kept_up_to_a_limit():
    now = [0.0]
    history = GpuHistory(lambda: now[0])
    for step in range(20):
        now[0] = step * 0.25
        history.note(Gpu("H200", used=step), None)
    assert [moment.used for moment in history.moments] == [0, 4, 8, 12, 16]
    for step in range(2 * POINTS):
        now[0] += 1
        history.note(Gpu("H200", used=step), None)
    assert len(history.moments) == POINTS
    assert history.moments[-1].used == 2 * POINTS - 1


def test_pcie_traffic_needs_details_and_a_reading():
    now = [0.0]
    history = GpuHistory(lambda: now[0])
    history.note(None, Details(0, pcie_to_device=5))
    history.note(Gpu("H200"), Details(0))
    assert not history.moments
    for at, details in enumerate((Details(0, pcie_to_device=5, pcie_to_host=2), Details(0, pcie_to_device=5), None)):
        now[0] = at
        history.note(Gpu("H200", power=90.0), details)
    assert list(history.moments) == [Moment(power=90.0, pcie=7), Moment(power=90.0, pcie=5), Moment(power=90.0)]


# ---- Fetch times: bars as long as their number of steps, divided into hidden and exposed time


def test_bars_show_steps_split_into_hidden_and_exposed():
    drawn = [
        "".join(text for text, _ in recall_bar(one, 40, 20))
        for one in (RecallBin(40, 3, 1), RecallBin(20, 0, 2), RecallBin(1, 1, 0), RecallBin())
    ]
    assert drawn == [HIDDEN * 15 + EXPOSED * 5, EXPOSED * 10 + " " * 10, HIDDEN + " " * 19, " " * 20]


def test_only_the_range_of_occurred_times_is_shown():
    bins = [RecallBin()] * (len(RECALL_EDGES_MS) + 1)
    assert not occupied_bins(bins)
    bins[2] = bins[4] = RecallBin(3, 1, 1)
    assert [bin_label(place) for place in occupied_bins(bins)] == ["0.2–0.5 ms", "0.5–1 ms", "1–2 ms"]
    assert list(occupied_bins(bins)) == [2, 3, 4]
    assert (bin_label(0), bin_label(len(RECALL_EDGES_MS))) == ("< 0.1 ms", "≥ 50 ms")


# ---- The map of layers and KV heads at every size


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (7, 3), (36, 8), (80, 8), (32, 32), (512, 512)])
@pytest.mark.parametrize(("width", "height"), [(35, 8), (91, 4), (1, 1)])
def test_every_layer_and_head_has_one_cell_and_all_cells_fit(layers, heads, width, height):
    grid = layout(layers, heads, width, height)
    assert [layer for start, end in pairwise(grid.layers) for layer in range(start, end)] == list(range(layers))
    assert [head for start, end in pairwise(grid.heads) for head in range(start, end)] == list(range(heads))
    assert (len(grid.layers) - 1) * grid.column <= width
    assert len(grid.heads) - 1 <= height
    assert bool(grid.note) == (layers > width or heads > height)


def test_each_halving_lowers_a_cell_by_one_step():
    assert [glyph(share) for share in (0, 1e-9, 1 / 64, 0.25, 0.5, 1)] == [NONE, *(BARS[n] for n in (0, 1, 5, 6, 7))]


def test_the_head_map_shows_rows_extremes_and_the_cursor_cell():
    state = ChatState(Conversation(), Sampling(), "full")
    shown, held = HeadMap(state), HeadMap(state, holds=True)
    assert "nothing stored" in shown.render().plain
    state.details = Details(100, ((100, 25), (50, 0)), ((0, 0), (50, 7)))
    assert shown.render().plain.split("\n") == ["0  ████▇▇▇▇", "1  ▆▆▆▆····", "0 to 100 of 100 tokens a head"]
    assert held.render().plain.split("\n")[1] == "1  ····▄▄▄▄"
    shown.set_reactive(HeadMap.cursor, (1, 0))
    assert not lacks(shown.explanation, "Layer 1, KV head 0", "50 of 100 (50 %)", "50 in slots")
    shown.set_reactive(HeadMap.cursor, (9, 9))
    assert "Layer" not in shown.explanation, "no cell is under the cursor"
