"""Looking at slots: what is wrong in them is found, and the counts of screens are those of the masks."""

from __future__ import annotations

import pytest
import torch
from support.kv_run import Run
from support.mode_rows import MIXED
from support.toy_model import toy

from kvchat.kv.inspect import (
    attended,
    attended_counts,
    check_integrity,
    held_per_head,
    read_per_head,
    read_tokens,
)


def run_of(row: str, kinds: tuple[str, ...] = MIXED) -> Run:
    run = Run.of_row(row, toy(kinds, kv_heads=4, page=8))
    run.prefill(150)
    run.step(10)
    return run


@pytest.mark.parametrize("row", ["full-resident", "streaming-slack", "speculative-four-bits", "freekv-odd", "sync-two"])
def test_counts_are_those_of_the_masks(row):
    run = run_of(row)
    state = run.kv.state
    masks = torch.stack([attended(state, layer) for layer in range(len(MIXED))])
    assert torch.equal(attended_counts(state), masks.sum((0, 1)))
    assert torch.equal(read_per_head(state), masks.sum(2))
    before = read_tokens(state)
    run.step()
    read = [attended(state, layer).sum(1).float().mean() for layer in range(len(MIXED))]
    assert read_tokens(state) - before == pytest.approx(float(torch.stack(read).mean()))


def test_what_is_held_is_what_the_tables_name():
    state = run_of("streaming").kv.state
    (slots,) = state.slots
    assert (held_per_head(state) == (slots.table >= 0).sum()).all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda slots, slot: slots.values(2)[1, slot].add_(1), "layer 2, head 1: values"),
        (lambda slots, slot: slots.keys(1)[3, slot].add_(1), "layer 1, head 3: keys"),
        (lambda slots, slot: slots.table[..., slot].fill_(1000), "layer 0, head 0: a token beyond the end"),
        (lambda slots, slot: slots.table[..., slot].sub_(1), "layer 0, head 0: values"),
        (
            lambda slots, slot: slots.attended[..., slot].copy_(slots.attended[..., slot + 1]),
            "layer 0, head 0: a token read twice",
        ),
    ],
)
def test_a_slot_that_does_not_hold_its_token_is_found(wrong, said):
    state = run_of("streaming", ("plain",) * 3).kv.state
    check_integrity(state)
    (slots,) = state.slots
    wrong(slots, int(slots.table[0, 0].argmax()) - 5)
    with pytest.raises(AssertionError, match=said):
        check_integrity(state)
