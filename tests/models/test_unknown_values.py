"""Values of tensors without memory, which some code asks for; those of other tensors are as they are."""

from __future__ import annotations

import torch

from kvchat.models.probe import UnknownValues


def test_nothing_without_memory_differs_from_zero():
    with UnknownValues():
        found = torch.ones(3, 2, device="meta").nonzero()
    assert (found.shape, found.is_meta) == ((0, 2), True)


def test_the_first_of_parts_of_unknown_sizes_is_everything():
    with UnknownValues():
        sizes = torch.ones(3, device="meta").tolist()
        parts = torch.ones(4, 5, device="meta").split(sizes, dim=0)
    assert [part.shape for part in parts] == [(4, 5), (0, 5), (0, 5)]


def test_values_in_memory_are_those_of_the_tensor():
    with UnknownValues():
        assert torch.tensor([0, 3]).nonzero().tolist() == [[1]]
        assert [len(part) for part in torch.ones(4).split([1, 3])] == [1, 3]
