"""Tensors stacked as one, of which they become views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(parameters: Sequence[Tensor]) -> Tensor:
    """Stack ``parameters`` along their first dimension; they become views of the result, so no memory is added."""
    merged = _one_behind_the_other(parameters)
    if merged is not None:
        return merged
    merged = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = merged[start : start + len(parameter)]
        start += len(parameter)
    return merged


def _one_behind_the_other(parameters: Sequence[Tensor]) -> Tensor | None:
    """The parameters as one, where they lie in memory like that already (``weights_memory``)."""
    first = parameters[0].data
    end = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or not parameter.is_contiguous():
            return None
        end += parameter.nbytes
    rows = sum(len(parameter) for parameter in parameters)
    size = rows * first[0].numel()
    if first.untyped_storage().nbytes() < (first.storage_offset() + size) * first.element_size():
        return None  # next to each other by chance
    return first.as_strided((rows, *first.shape[1:]), first.stride())
