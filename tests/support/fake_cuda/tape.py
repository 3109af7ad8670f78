"""A tape that acts as a captured CUDA graph: operations and kernels, replayed on the memory they were captured on.

The fake CUDA device uses ``Tape``. ``TapeRecorder`` puts it in place of ``CudaRecorder`` on a plain CPU, for tests that
compare graphed steps with eager ones and need no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# Operations whose result, or its shape, must be known on the host.
WAITS = ("_local_scalar_dense", "nonzero", "item", "unique", "masked_select", "equal", "is_nonzero", "bincount")
# torch.tensor(...) and indexing with a list: copies to the device.
UPLOADS = ("lift_fresh",)
# Their results contain what earlier allocations left there.
UNWRITTEN = [f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")]


class Tape:
    """What was launched during a capture.

    Like a graph it refers to memory, not to names: a replay reads and writes the tensors of the capture. A capture must
    have no effect, so everything that it writes is saved first and restored by ``undo``.
    """

    def __init__(self) -> None:
        self._launches: list[Callable[[], Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._allocated: set[int] = set()
        self._made: list[torch.Tensor] = []
        self.events: list[Any] = []  # recorded by a replay

    @property
    def written(self) -> set[int]:
        """Addresses of the storages that were written and existed before the capture."""
        return set(self._before) - self._allocated

    def operation(self, run: partial, schema: torch._C.FunctionSchema) -> Any:
        """Run and record one of torch's operations, with its operands bound; return its result."""
        changed = _written(schema, run.args, run.keywords)
        self._save(changed)
        result = run()
        inputs = {_address(tensor) for tensor in _tensors((run.args, run.keywords))}
        made = [tensor for tensor in _tensors(result) if _address(tensor) not in inputs]
        new = {_address(tensor) for tensor in made}
        self._allocated |= new
        self._made += made
        if schema.name in UNWRITTEN:  # an allocation launches nothing
            return result
        if new:
            self._launches.append(partial(_rerun, run, result, new))
        elif changed:  # a view launches nothing
            self._launches.append(run)
        return result

    def kernel(self, run: Callable[[], Any], operands: list[torch.Tensor]) -> Any:
        """Run and record a kernel, which may write any of its ``operands``; return its result."""
        self._save(operands)
        self._launches.append(run)
        return run()

    def undo(self) -> None:
        """Restore what existed before the capture; what it allocated may be input to another capture."""
        with _disable_current_modes():  # no GPU does this: memory must not run out in it
            for address in self.written:
                storage, before = self._before[address]
                storage.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        """Run everything again on the same memory; another graph may have reused what the capture allocated."""
        with torch.inference_mode(), _disable_current_modes():
            for made in self._made:
                poison(made)
            for launch in self._launches:
                launch()

    def _save(self, tensors: list[torch.Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = (storage, storage.clone())


def poison(tensor: torch.Tensor) -> None:
    """Fill memory with values that cannot be mistaken for results."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def _rerun(run: Callable[[], Any], result: Any, allocated: set[int]) -> None:
    """Run an operation again and put its results into the memory that it ``allocated`` during the capture."""
    if isinstance(result, torch.Tensor):
        result.copy_(run())
        return
    for old, new in zip(tree_leaves(result), tree_leaves(run()), strict=True):
        if isinstance(old, torch.Tensor) and _address(old) in allocated:
            old.copy_(new)


def _written(schema: torch._C.FunctionSchema, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Operands that an operation of this schema changes in place."""
    operands = [*zip(schema.arguments, args, strict=False)]
    operands += [(spec, kwargs[spec.name]) for spec in schema.arguments if spec.name in kwargs]
    changed = [given for spec, given in operands if spec.alias_info is not None and spec.alias_info.is_write]
    return list(_tensors(changed))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Capture(TorchDispatchMode):
    """Record every operation on a tape; refuse what CUDA refuses during a capture."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith((*WAITS, *UPLOADS)):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return self._tape.operation(partial(func, *args, **(kwargs or {})), func._schema)


class TapeRecorder:
    """A ``Recorder`` for the CPU; ``recorded`` and ``played`` count captures and replays.

    ``buffers`` returns the tensors that a step may change. A step that changes another one fails: the key of its graph
    would not change if that tensor moved.
    """

    def __init__(self, buffers: Callable[[], list[torch.Tensor]]) -> None:
        self.buffers = buffers
        self.recorded = 0
        self.played = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        tape = Tape()
        try:
            with _Capture(tape):
                result = run()
            known = {_address(buffer) for buffer in self.buffers()}
            assert tape.written <= known, "a step changes a tensor that is not among the store's buffers"
        finally:
            tape.undo()
        self.recorded += 1

        def replay() -> None:
            self.played += 1
            tape.replay()

        return replay, result
