"""Layers and KV heads in as much room as there is: each has its cell, and each cell its share."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.message import lacks

from kvchat.protocol.messages import Details
from kvchat.tui.widgets.charts import NONE, HeadMap, arranged, glyph
from kvchat.units import BARS


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (7, 3), (36, 8), (80, 8), (32, 32), (512, 512)])
@pytest.mark.parametrize(("width", "height"), [(35, 8), (91, 4), (1, 1)])
def test_every_layer_and_head_has_one_cell_and_all_cells_fit(layers, heads, width, height):
    grid = arranged(layers, heads, width, height)
    assert [layer for start, end in pairwise(grid.layers) for layer in range(start, end)] == list(range(layers))
    assert [head for start, end in pairwise(grid.heads) for head in range(start, end)] == list(range(heads))
    assert (len(grid.layers) - 1) * grid.column <= width
    assert len(grid.heads) - 1 <= height
    assert bool(grid.note) == (layers > width or heads > height)


def test_a_cell_is_a_step_lower_for_half_of_it():
    assert [glyph(share) for share in (0, 1e-9, 1 / 64, 0.25, 0.5, 1)] == [NONE, *(BARS[n] for n in (0, 1, 5, 6, 7))]


def test_the_map_tells_rows_of_heads_the_extremes_and_the_figures_under_the_cursor():
    shown, held = HeadMap(), HeadMap(holds=True)
    assert "nothing stored" in shown.render().plain
    for heads in (shown, held):
        heads.set_reactive(HeadMap.details, Details(100, ((100, 25), (50, 0)), ((0, 0), (50, 7))))
    assert shown.render().plain.split("\n") == ["0  ████▇▇▇▇", "1  ▆▆▆▆····", "0 to 100 of 100 tokens a head"]
    assert held.render().plain.split("\n")[1] == "1  ····▄▄▄▄"
    shown.set_reactive(HeadMap.cursor, (1, 0))
    assert not lacks(shown.explanation, "Layer 1, KV head 0", "50 of 100 (50 %)", "50 in slots")
    shown.set_reactive(HeadMap.cursor, (9, 9))
    assert "Layer" not in shown.explanation, "no cell is under the cursor"
