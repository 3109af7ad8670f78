"""Drive a KV manager without a model: the forwards run inside these blocks, as ``ModelRunner`` runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvchat.kv.manager import KVManager
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.modes import build
from kvchat.kv.ops.eight_bit_ops import EightBitOps
from kvchat.kv.ops.torch_ops import TorchOps


def use_gpu_path(kv: KVManager) -> None:
    """Make an empty KV manager take the path of a GPU: shapes are fixed and nothing is read back."""
    kind = EightBitOps if isinstance(kv.state.host, EightBitPool) else TorchOps
    ops = kind(kv.state.geometry, kv.state.host, kv.state.device)
    kv.state.ops = kv.state.transfer.ops = ops
    mode = kv.mode
    with torch.inference_mode(kv.state.position.is_inference()):
        kv.switch(build(mode.parameters, mode.geometry, mode.traits, mode.system_tokens))


@contextmanager
def prefill(kv: KVManager, tokens: int, pinned: Sequence[int] = ()) -> Iterator[None]:
    """One forward of ``tokens`` new tokens."""
    kv.begin_prefill(tokens)
    try:
        yield
    except BaseException:
        kv.rollback_prefill()
        raise
    kv.commit_prefill(tokens, pinned)


@contextmanager
def decode_step(kv: KVManager, pinned: bool = False) -> Iterator[None]:
    try:
        kv.begin_step(pinned)
        yield
        kv.commit_step()
    except BaseException:
        kv.rollback_step()
        raise


@contextmanager
def forward(kv: KVManager) -> Iterator[None]:
    """The forward of a step."""
    kv.forward_begin()
    yield
    kv.forward_end()
