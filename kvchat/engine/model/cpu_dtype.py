"""Chooses a model's dtype on a CPU where the setting is "auto": the faster one for a token's largest product.

What decodes a token there is reading the weights, which bfloat16 halves where they come from memory. A small model
gains little by it and stays exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.engine.model import quantization
from kvchat.engine.model.fusion import one_row
from kvchat.units import figure

CPU = torch.device("cpu")
# Bytes of a matrix in float32: a smaller one may lie in a cache (bfloat16 on an AMD EPYC with AVX-512 BF16: 2 MB as
# fast, 17 MB 1.8 times, 67 MB 1.9 times, 180 MB 2.2 times as fast).
MEASURED_FROM = 2**24
ROUNDS = 5
# It must win clearly: what K/V was stored in decides whether a saved conversation goes on without being read again.
CLEARLY = 0.85


def auto_dtype(own: torch.dtype | None, config: Any) -> torch.dtype:
    """float32, or ``own``, a checkpoint's dtype, if that is bfloat16 and clearly faster at its size; measured once.

    Weights that stay packed are not multiplied as either, and some in ``own`` only.
    """
    rows, columns = _largest(config)
    if only := quantization.own_dtype(config, CPU):
        return only
    packed = quantization.own_method(config) and not quantization.is_unpacked(config, CPU)
    if packed or own != torch.bfloat16 or 4 * rows * columns < MEASURED_FROM:
        return torch.float32
    exact, half = milliseconds(rows, columns)
    return torch.bfloat16 if half < CLEARLY * exact else torch.float32


def note(dtype: str, chosen: torch.dtype, config: Any, packs: bool = False) -> str:
    """A sentence about the dtype chosen for the setting ``dtype``; "" where nothing was chosen.

    Where loading ``packs`` the weights its matrices are multiplied as neither.
    """
    if dtype != "auto" or chosen != torch.bfloat16 or quantization.own_dtype(config, CPU):
        return ""
    if packs:
        return "It runs in bfloat16, in which K/V take half as much as in float32 (model.dtype = float32 overrules)."
    exact, half = milliseconds(*_largest(config))
    return (
        f"It runs in bfloat16: its largest matrix takes {figure(half, 'ms', 1)} a token here, in float32 "
        f"{figure(exact, 'ms', 1)} (model.dtype = float32 overrules)."
    )


@cache
def milliseconds(rows: int, columns: int) -> tuple[float, float]:
    """The least time for one token through a matrix ``[rows, columns]``, in float32 and in bfloat16."""
    weight, x = torch.ones(rows, columns), torch.ones(1, columns)
    half, half_x = weight.to(torch.bfloat16), x.to(torch.bfloat16)
    with torch.inference_mode(), one_row.without_onednn(torch.bfloat16, CPU):
        times = [
            (_timed(partial(one_row.linear, x, weight)), _timed(partial(F.linear, half_x, half))) for _ in range(ROUNDS)
        ]
    return min(exact for exact, _ in times), min(half for _, half in times)


def _timed(product: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    product()
    return 1000 * (time.perf_counter() - began)


def _largest(config: Any) -> tuple[int, int]:
    """Rows and columns of the MLP's first matrix; none where the configuration does not say."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "intermediate_size", None) or 0, getattr(text, "hidden_size", None) or 0
