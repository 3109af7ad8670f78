"""fp8 weights whose blocks do not divide their rows or columns: the last ones are cut off.

transformers divides rows and columns by the number of scales: of 192 rows with two scales it makes blocks of 96 where
they are of 128, and it refuses 576 with five.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def cut_off() -> Iterator[None]:
    """Meanwhile transformers unpacks such weights as blocks of the size that their configuration names."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def dequantize(self: Any, stored: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Any:
        sizes, blocks = stored.shape[-2:], self.hf_quantizer.quantization_config.weight_block_size or (1, 1)
        counts = [-(-size // block) for size, block in zip(sizes, blocks, strict=True)]
        whole = [count * block for count, block in zip(counts, blocks, strict=True)]
        if list(scales.shape[-2:]) != counts or list(sizes) == whole:
            return genuine(self, stored, scales, output_dtype)  # of other blocks, as a whole tensor of one scale
        filled = stored.new_zeros((*stored.shape[:-2], *whole))
        filled[..., : sizes[0], : sizes[1]] = stored
        return genuine(self, filled, scales, output_dtype)[..., : sizes[0], : sizes[1]].contiguous()

    genuine = Fp8Dequantize._dequantize_one
    Fp8Dequantize._dequantize_one = dequantize
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = genuine
