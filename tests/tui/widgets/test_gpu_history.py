"""NVML's readings as lines of bars: each at its own scale, and a missing one is neither zero nor left out."""

from __future__ import annotations

from kvchat.tui.state import Moment
from kvchat.tui.widgets.charts import UNREAD, rows, spark
from kvchat.units import BARS

GiB = 2**30


def test_each_reading_has_its_scale_and_its_present_value():
    moments = [Moment(6 * GiB, 24 * GiB, 50, 100.0), Moment(12 * GiB, 24 * GiB, 100, None, GiB)]
    lines = {name: (spark(values, top), value) for name, values, top, value in rows(moments)}
    assert lines == {
        "memory": (BARS[2] + BARS[4], "12.0 GiB / 24.0 GiB"),
        "load": (BARS[4] + BARS[7], "100 %"),
        "power": (BARS[7] + UNREAD, "n/a"),
        "PCIe": (UNREAD + BARS[7], "1.0 GiB/s"),
    }
    assert rows([]) == ()
    assert spark([0, 0, None], 0) == BARS[0] * 2 + UNREAD
