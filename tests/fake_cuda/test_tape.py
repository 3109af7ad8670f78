"""Capturing on a tape has no effect; it replays on the same memory and reports steps that change unknown tensors."""

import numpy as np
import pytest
import torch
from support.fake_cuda import races
from support.fake_cuda.tape import TapeRecorder


def test_a_capture_has_no_effect_and_a_replay_does():
    total, table = torch.zeros(2), torch.arange(4)

    def step():
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


def test_changing_an_unknown_tensor_fails_and_is_undone():
    known, unknown = torch.zeros(1), torch.zeros(1)
    recorder = TapeRecorder(lambda: [known])
    with pytest.raises(AssertionError, match="not among the store's buffers"):
        recorder(lambda: known.add_(unknown.add_(1)))
    assert (known.item(), unknown.item(), recorder.recorded) == (0, 0, 0)


def test_synchronizing_during_a_capture_is_refused():
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing: nonzero"):
        TapeRecorder(list)(lambda: torch.ones(2).nonzero())


# ---- An access counts the bytes of its elements, each once, whatever the layout of the tensor


WHOLE = torch.arange(24, dtype=torch.int16).view(4, 6)


@pytest.mark.parametrize(
    ("tensor", "picked"),
    [
        (WHOLE[1:3], None),
        (WHOLE[:, 2:4], None),
        (WHOLE.t(), None),
        (WHOLE.t()[1:], None),
        (WHOLE[:1].expand(5, 6), None),
        (WHOLE, (0, torch.tensor([3, 1, 3]))),
        (WHOLE.t(), (1, torch.tensor([0]))),
        (WHOLE, (0, torch.tensor([], dtype=torch.int64))),
    ],
    ids=["rows", "columns", "transposed", "its rows", "expanded", "picked rows", "a picked column", "nothing picked"],
)
def test_an_access_covers_the_bytes_of_its_elements(tensor, picked):
    access = races.of_tensor(tensor, True, picked)
    elements = tensor if picked is None else tensor.index_select(*picked)  # each holds its number
    expected = sorted({2 * number + byte for number in elements.flatten().tolist() for byte in (0, 1)})
    assert np.arange(access.size)[access.bytes].tolist() == expected


def test_kernel_accesses_are_grouped_by_operand_and_direction():
    operand, start = WHOLE.clone(), WHOLE.clone()
    at = operand.data_ptr() + 2 * np.array([5, 5, 1])
    other = start.data_ptr() + np.array([0])
    found = races.of_kernel([(at, 2, True), (other, 4, False)], [operand, start])
    grouped = {(access.address, access.writes): access.bytes.tolist() for access in found}
    assert grouped == {(operand.data_ptr(), True): [2, 3, 10, 11], (start.data_ptr(), False): [0, 1, 2, 3]}
    with pytest.raises(races.Race, match="outside its operands"):
        races.of_kernel([(at + 48, 2, True)], [operand])
