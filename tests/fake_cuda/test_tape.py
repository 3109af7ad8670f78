"""A tape leaves no trace of a capture, replays on the same memory, and names steps that change unknown tensors."""

from __future__ import annotations

import pytest
import torch
from support.fake_cuda.tape import TapeRecorder


def test_a_capture_leaves_no_trace_and_a_replay_repeats_it():
    total, table = torch.zeros(2), torch.arange(4)

    def step() -> torch.Tensor:
        total.add_(1)
        table.view(2, 2)[1].copy_(table[:2])
        return torch.topk(total * 2, 1).values

    recorder = TapeRecorder(lambda: [total, table])
    replay, result = recorder(step)
    assert (total.tolist(), table.tolist()) == ([0, 0], [0, 1, 2, 3])
    for _ in range(2):
        replay()
    assert (total.tolist(), table.tolist(), result.tolist()) == ([2, 2], [0, 1, 0, 1], [4])
    assert (recorder.recorded, recorder.played) == (1, 2)


def test_a_step_that_changes_another_tensor_fails_and_is_undone():
    known, unknown = torch.zeros(1), torch.zeros(1)
    recorder = TapeRecorder(lambda: [known])
    with pytest.raises(AssertionError, match="not among the store's buffers"):
        recorder(lambda: known.add_(unknown.add_(1)))
    assert (known.item(), unknown.item(), recorder.recorded) == (0, 0, 0)


def test_an_answer_from_the_device_is_refused():
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing: nonzero"):
        TapeRecorder(list)(lambda: torch.ones(2).nonzero())
