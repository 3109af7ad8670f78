"""A stand-in for CUDA graphs on a CPU: operations are taped with the tensors they touch, and carried out again.

Like a graph it holds memory, not names: what a step reads or changes is where it was when it was taped. What it does
while it is taped is undone (a capture carries nothing out) as far as ``buffers`` tells what it changes; a step that
keeps state elsewhere comes out different. Reading back or sending is refused, as CUDA refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What needs an answer from the device, or gives an answer whose shape does.
WAITS = ("_local_scalar_dense", "nonzero", "item", "unique", "masked_select", "equal", "is_nonzero", "bincount")
REFUSED = (*WAITS, "lift_fresh")


class Tape(TorchDispatchMode):
    """The operations of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith(REFUSED):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        """Carry all of it out on the same memory."""
        for func, args, kwargs, result in self.operations:
            carry_out_again(partial(func, *args, **kwargs), result, (args, kwargs))


def carry_out_again(run: Callable[[], Any], result: Any, operands: Any) -> None:
    """Carry an operation out again, with its result where it was."""
    inputs = {t.untyped_storage().data_ptr() for t in tree_leaves(operands) if isinstance(t, torch.Tensor)}
    for old, new in zip(tree_leaves(result), tree_leaves(run()), strict=True):
        # A view or an operation in place has changed what it had to.
        if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in inputs:
            old.copy_(new)


class TapeRecorder:
    """Counts what it records; ``buffers`` are put back after a recording."""

    def __init__(self, buffers: Callable[[], list[torch.Tensor]]) -> None:
        self.buffers = buffers
        self.recorded = 0
        self.played = 0

    def __call__(self, run):
        buffers = self.buffers()
        before = [buffer.clone() for buffer in buffers]
        tape = Tape()
        try:
            with tape:
                result = run()
        finally:
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
        self.recorded += 1

        def replay() -> None:
            self.played += 1
            tape.play()

        return replay, result
