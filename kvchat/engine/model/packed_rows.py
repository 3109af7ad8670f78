"""Weights on a CPU that torch's own integer kernels multiply: what is the same for 8 bits and for 4."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn

from kvchat.kv.ops.cpu_products import compiled_loops

ROWS, STACKS = "packed_rows", "packed_stacks"  # the attributes of a Linear, and of a layer's experts
CHUNK = 2**18  # weights that are quantized at once: in float32 they stay in a processor's cache
BLOCK = 64  # rows that int4 interleaves where they are packed, on some processors fewer: what follows begins a new one


class PackedRows(ABC):
    """The packed rows of a Linear's matrix ``[N, K]``, or of a stack of such; ``bias [N]`` is the Linear's."""

    data: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """In place of its Linear's own."""
        return self.multiply(x, self.bias)

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [..., K]`` through the matrix, plus ``bias [N]``: ``[..., N]``."""

    @abstractmethod
    def matrix(self, index: int) -> Self:
        """One matrix of a stack, in the same memory."""

    @property
    @abstractmethod
    def constants(self) -> tuple[Tensor, ...]:
        """The tensors beside ``data``; unlike it they are no parameters of the Linear."""

    @property
    def mergeable(self) -> bool:
        """True if rows of another matrix can follow these."""
        return True

    @classmethod
    @abstractmethod
    def merged(cls, linears: Sequence[Any]) -> Self:
        """The rows of several Linears as one matrix; theirs become views of it, so no memory is added."""


Weight = Tensor | PackedRows


@cache
def block_loops() -> ModuleType | None:
    """The loops that unpack and pack weights in blocks; None where numba does not run."""
    if compiled_loops() is None:
        return None
    from kvchat.engine.model import block_loops

    return block_loops


def weight_of(linear: Any) -> Weight:
    """The matrix of a Linear, as it multiplies."""
    rows: PackedRows | None = linear.__dict__.get(ROWS)
    return linear.weight if rows is None else rows


def attach(linear: Any, rows: PackedRows) -> None:
    """Let a Linear multiply by ``rows``."""
    linear.__dict__ |= {ROWS: rows, "forward": rows.forward}


def in_chunks(matrix: Tensor, elements: int) -> tuple[Tensor, ...]:
    """Runs of rows of ``matrix [N, K]``, of about so many ``elements`` each."""
    return torch.split(matrix, max(1, elements // (BLOCK * matrix.shape[1])) * BLOCK)


def all_rows(model: Any) -> Iterator[tuple[str, PackedRows]]:
    """The packed rows of the Linears and of the stacks of experts in ``model``, with their names."""
    for name, module in model.named_modules():
        if ROWS in module.__dict__:
            yield name, module.__dict__[ROWS]
        yield from ((f"{name}.{stack}", rows) for stack, rows in module.__dict__.get(STACKS, {}).items())


def body(model: Any) -> Iterator[nn.Linear]:
    """The Linears of ``model`` but its head."""
    head = model.get_output_embeddings()
    return (module for module in model.modules() if type(module) is nn.Linear and module is not head)


def is_tied(model: Any) -> bool:
    """True if the head of ``model`` shares the weights of its embeddings."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def packs_head(model: Any, quantize: str) -> bool:
    """True if the head of ``model`` has 8 bits beside layers in ``quantize``: with 4 where its weights are its own.

    Those that it shares with the embeddings stay beside it, so packing them takes memory.
    """
    return quantize == "int8" or (quantize == "int4" and not is_tied(model))
