"""Answers for transformers' code that asks tensors for their values on torch's meta device, where they have none.

DBRX's asks which experts its tokens go to, JetMoE's how many go to each. Any answer leads to the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class UnknownValues(TorchFunctionMode):
    """Inside this block all values without memory are zeros, and of parts of unknown sizes the first is everything."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, unless it asks for values without memory or goes by them."""
        if func is Tensor.nonzero and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        if func is Tensor.tolist and args[0].is_meta:
            return _UnknownSizes([0] * len(args[0]))
        if func is Tensor.split and isinstance(args[1], _UnknownSizes):
            return (args[0], *[args[0][:0]] * (len(args[1]) - 1))
        return func(*args, **kwargs or {})


class _UnknownSizes(list[int]):
    """The zeros that stand for the sizes of parts."""
