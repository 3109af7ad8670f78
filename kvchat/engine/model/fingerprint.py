"""Digests of weights, tokenizers and texts: what was computed by others is not taken for theirs.

A checkpoint's revision tells trainings apart by the sizes and ends of their files, and nothing of a tokenizer; a model
that was tuned or merged in place may have both alike.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from kvchat.engine.model.quantization import weights

DIGEST_BYTES = 16
WORD = 8


def of_weights(model: Any) -> str:
    """A digest of names, shapes and bit patterns of all weights, at the memory's speed.

    The patterns of one tensor are added up: a change of any bit changes the sum, an exchange of values does not.
    """
    found = blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in weights(model):
        found.update(f"{name} {tuple(tensor.shape)} {_sum(tensor)}\n".encode())
    return found.hexdigest()


def of_tokenizer(tokenizer: Any) -> str:
    """A digest of all that turns text into ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return of_text(backend.to_str()).hex()
    vocabulary = sorted(getattr(tokenizer, "get_vocab", dict)().items())
    return of_text(f"{type(tokenizer).__name__} {vocabulary}").hex()


def of_text(text: str) -> bytes:
    """A digest of ``text``, ``DIGEST_BYTES`` long."""
    return blake2b(text.encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()


def _sum(weight: Tensor) -> int:
    """The words of a tensor's memory added up, and the bytes behind the last whole one."""
    stored = weight.contiguous().view(-1).view(torch.uint8)
    whole = stored.numel() // WORD * WORD
    words, rest = stored[:whole].view(torch.int64), stored[whole:]
    return int(words.sum()) + int(rest.sum())
