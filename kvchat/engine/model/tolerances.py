"""The tolerances of the start-up checks: rounding passes, a wrong computation does not.

Each limit lies between what right models measure and what wrong ones do. The check of kv's kernels has its own
(``kvchat.kv.ops.verify``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvchat.engine.model.quantization import is_packed
from kvchat.engine.model.weight_sizes import has_experts

# Logits of the self-test and of fused modules, relative L2 error. Right models measure below 1e-5 in float32 and about
# 0.02 in bfloat16; wrong ones (bloom, llama4, gemma3n under an attention that ignores their rules) 0.2 to 1.1.
LOGITS = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.15}

# Rotated keys of the probe, relative to the largest element. Right rotations measure below 1e-5 in float32 and 0.02 in
# bfloat16, wrong ones above 0.3.
ROTATED_KEYS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
# Far from the start the model's own float32 angles add their rounding: this many radians for each position.
ANGLE_PER_POSITION = 2e-7
# Keys and values of one token at two positions, relative to the largest element: less is rounding, not a change.
UNCHANGED = 1e-3

# A module's output against that of an RMSNorm, relative L2 error in units of the dtype's epsilon: its steps round a
# few times in that dtype, where the expected result is computed in float32.
NORM_ROUNDINGS = 8
# A module's own sums and products of small numbers: another order or factor changes the result by a whole number.
SMALL_NUMBERS = 1e-4
# Elements of rotated random heads in float32, of size 1: two products and one sum.
ROTATION = 1e-5


def logits_tolerance(model: Any) -> float:
    """The relative error of logits that rounding explains."""
    return products_tolerance(model.dtype, is_packed(model))


def products_tolerance(dtype: torch.dtype, packed: bool) -> float:
    """The same of what is computed in ``dtype``; packed weights are multiplied in half precision."""
    return LOGITS[torch.bfloat16 if packed else dtype]


def logits_error(model: Any, measured: Tensor, reference: Tensor, share: float) -> float:
    """The relative error of logits ``[tokens, vocab]``, of a mixture of experts that of a ``share`` of its tokens.

    Rounding sends some tokens to other experts. Of eight in bfloat16, in a mixture of random weights, five were 0.16 to
    0.95 off and the others 0.1.
    """
    if not has_experts(model):
        return relative_error(measured, reference)
    pairs = zip(measured, reference, strict=True)
    return float(torch.tensor([relative_error(*pair) for pair in pairs]).quantile(share))


def relative_error(measured: Tensor, reference: Tensor) -> float:
    """||measured - reference|| / ||reference||; NaN anywhere gives NaN."""
    return float((measured - reference).norm() / reference.norm())
