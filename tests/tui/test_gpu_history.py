"""The history of NVML's readings: a moment a second, nothing where NVML is silent."""

from __future__ import annotations

from kvchat.protocol.figures import Gpu
from kvchat.protocol.messages import Details
from kvchat.tui.state import POINTS, GpuHistory, Moment


def test_a_moment_a_second_is_kept_and_the_oldest_go():
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


def test_traffic_is_known_while_details_are_and_silence_is_no_moment():
    now = [0.0]
    history = GpuHistory(lambda: now[0])
    history.note(None, Details(0, pcie_to_device=5))
    history.note(Gpu("H200"), Details(0))
    assert not history.moments
    for at, details in enumerate((Details(0, pcie_to_device=5, pcie_to_host=2), Details(0, pcie_to_device=5), None)):
        now[0] = at
        history.note(Gpu("H200", power=90.0), details)
    assert list(history.moments) == [Moment(power=90.0, pcie=7), Moment(power=90.0, pcie=5), Moment(power=90.0)]
