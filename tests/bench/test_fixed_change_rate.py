"""Speculative mode at a fixed change rate: how many tokens change and how many move."""

import pytest
import torch
from support.integrity import check_integrity
from support.shape_runner import filled

from kvchat.bench import model_shapes
from kvchat.bench.decoding import FixedPages, FixedTokens, fixed_change_rate
from kvchat.bench.frame import parsed
from kvchat.engine.runner import geometry_of, traits_of
from kvchat.errors import UsageError
from kvchat.kv.modes import build

SPECULATIVE = parsed("speculative:sink=64,window=64", 320)  # six retrieved pages


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_exactly_the_fixed_share_of_pages_moves(tiny_shape, rate):
    mode = FixedPages(rate, SPECULATIVE, geometry_of(tiny_shape), traits_of(tiny_shape))
    runner = filled(tiny_shape, mode, 900)
    kv, slots = runner.kv, runner.kv.state.slots[-1]
    changed = round(rate * 6)
    for token in range(8):
        before, moved = slots.pages.clone(), kv.state.transfer.totals.moved
        runner.step(token)
        assert ((slots.pages != before).sum(-1) == changed).all()
        assert kv.state.transfer.totals.moved - moved == changed * 3 * 2 * 32  # layers, heads, tokens per page
        ordered = slots.pages.sort(-1).values
        assert (ordered[..., 1:] > ordered[..., :-1]).all(), "no page twice"
        check_integrity(kv.state)


@pytest.mark.cuda
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_exactly_the_fixed_share_of_tokens_moves_on_a_gpu(rate):
    model = model_shapes.build("tiny", "cuda")
    by_tokens = parsed("speculative:sink=4,window=32", 96)  # 60 selected tokens
    mode = fixed_change_rate(rate, by_tokens, geometry_of(model), traits_of(model))
    assert isinstance(mode, FixedTokens)
    runner = filled(model, mode, 200)
    kv, slots = runner.kv, runner.kv.state.slots[-1]
    changed = round(rate * 60)
    runner.step(9)  # reads what was selected when the mode was entered
    before, moved = slots.table[..., :60].clone(), kv.state.transfer.totals.moved
    runner.step(1)
    assert ((slots.table[..., :60] != before).sum(-1) == changed).all()
    assert kv.state.transfer.totals.moved - moved == changed * 3 * 2  # layers, heads
    ordered = slots.table[..., :60].sort(-1).values
    assert (ordered[..., 1:] > ordered[..., :-1]).all(), "no token twice"
    check_integrity(kv.state)


def test_corrections_move_no_extra_pages(tiny_shape):
    mode = FixedPages(0.5, SPECULATIVE.model_copy(update={"tau": 2.0}), geometry_of(tiny_shape), traits_of(tiny_shape))
    runner = filled(tiny_shape, mode, 900)
    runner.step(1)
    moved = runner.kv.state.transfer.totals.moved
    runner.step(2)
    assert runner.kv.state.transfer.totals.moved - moved == 3 * 3 * 2 * 32
    # With tau = 2 nothing is selected ahead: the slots hold what the last token was to read.
    assert (runner.kv.state.slots[-1].pages == mode._sliding.at(runner.kv.state.position - 1)).all()


def test_too_few_pages_are_rejected_and_the_mode_stays(tiny_shape):
    runner = filled(tiny_shape, build(parsed("full", 0), geometry_of(tiny_shape), traits_of(tiny_shape)), 300)
    with pytest.raises(UsageError, match="longer context or a smaller budget"), torch.inference_mode():
        runner.kv.switch(FixedPages(1.0, SPECULATIVE, geometry_of(tiny_shape), traits_of(tiny_shape)))
    assert runner.kv.mode.name == "full"
