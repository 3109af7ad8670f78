"""The verbs of ``kvchat.kv.verbs`` as Triton kernels: same tensors in, same tensors out."""

from __future__ import annotations

from kvchat.kv.verbs import Verbs


class TritonVerbs(Verbs):
    """Verbs for bfloat16 and float16 on a CUDA device."""

    name = "triton"
