"""The hill of stored tokens and the part of it that is read."""

from __future__ import annotations

from textual.app import App, ComposeResult

from kvchat.tui.themes import RIBBON_DEFAULTS
from kvchat.tui.widgets.panels import MARK, MAX_POINTS, STORED, Point, Timeline, by_tokens, column


def test_a_column_shows_read_below_stored():
    assert column(Point(50, 100), 100, 5) == [" ", STORED, STORED, "█", "█"]
    assert column(Point(0, 100), 100, 3) == [" ", STORED, STORED]
    assert column(Point(12.5, 25), 100, 5)[-1] == "▄"
    assert column(Point(0, 0), 100, 3) == [" ", " ", " "]


def test_a_switch_is_marked_on_top():
    assert column(Point(100, 100, switched=True), 100, 3) == [MARK, "█", "█"]


def test_columns_are_ranges_of_tokens():
    points = [Point(40, 40), Point(10, 60), Point(10, 100)]
    columns = by_tokens(points, 10, ticks=(60, 120))
    assert [point.stored for point in columns] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert [point.read for point in columns] == [0, 0, 0, 40, 40, 10, 10, 10, 10, 10]
    assert [point.switched for point in columns] == [False] * 5 + [True] + [False] * 4
    assert by_tokens([], 10) == []


def test_a_conversation_cut_back_forgets_later_steps_and_memory_is_bounded():
    timeline = Timeline()
    for stored in (10, 20, 30):
        timeline.add(1, stored)
    timeline.add(2, 20)
    assert [(point.read, point.stored) for point in timeline.points] == [(1, 10), (2, 20)]
    for total in range(20, 3 * MAX_POINTS):
        timeline.add(1, total)
    assert len(timeline.points) <= MAX_POINTS
    assert timeline.points[-1].stored == 3 * MAX_POINTS - 1


class Shown(App[None]):
    """A timeline of five rows."""

    CSS = "Timeline { height: 5; }"

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return RIBBON_DEFAULTS

    def compose(self) -> ComposeResult:
        yield Timeline()


async def test_it_says_what_its_axes_are_and_how_high_the_hills_are():
    app = Shown()
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
        assert timeline.render_line(0).text == " ▾" + 37 * " " + "▾", "no mark stands among letters"
        timeline.styles.height = 3
        app.screen._refresh_layout()
        assert "stored" not in timeline.render_line(1).text


async def test_only_rows_that_are_others_are_drawn_again():
    app = Shown()
    async with app.run_test(size=(40, 10)) as pilot:
        timeline, drawn = app.query_one(Timeline), []
        for stored in range(14000, 14300):
            timeline.add(512, stored)
        await pilot.pause()
        line = timeline.render_line
        timeline.render_line = lambda y: drawn.append(y) or line(y)
        timeline.add(512, 14300)
        await pilot.pause()
        assert drawn == [1], "that with the number of tokens stored"
