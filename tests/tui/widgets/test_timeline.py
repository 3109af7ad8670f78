"""The hill of stored tokens and the part of it that is read."""

from __future__ import annotations

from kvchat.tui.widgets.timeline import MARK, MAX_POINTS, STORED, Point, Timeline, column, thin


def test_a_column_shows_read_below_stored():
    assert column(Point(50, 100), 100, 5) == [" ", STORED, STORED, "█", "█"]
    assert column(Point(0, 100), 100, 3) == [" ", STORED, STORED]
    assert column(Point(12.5, 25), 100, 5)[-1] == "▄"
    assert column(Point(0, 0), 100, 3) == [" ", " ", " "]


def test_a_switch_is_marked_on_top():
    assert column(Point(100, 100, switched=True), 100, 3) == [MARK, "█", "█"]


def test_thinning_keeps_the_last_point_and_every_mark():
    points = [Point(i, i, switched=i == 7) for i in range(100)]
    thinned = thin(points, 10)
    assert len(thinned) == 10
    assert thinned[-1] == points[-1]
    assert [point.switched for point in thinned] == [True] + [False] * 9


def test_unchanged_numbers_add_nothing_and_memory_is_bounded():
    timeline = Timeline()
    timeline.add(1, 1)
    timeline.add(1, 1)
    assert len(timeline.points) == 1
    timeline.mark()
    timeline.add(1, 1)
    assert [point.switched for point in timeline.points] == [False, True]
    for total in range(3 * MAX_POINTS):
        timeline.add(1, total)
    assert len(timeline.points) <= MAX_POINTS
