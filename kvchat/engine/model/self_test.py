"""The numerical self-test: the seam against transformers' own eager attention, on the same weights.

Flags and names do not tell whether a model's attention is done right (bloom, llama4 and gemma3n answer fluently and
wrongly), so every model proves it when it is loaded. The reference is eager and not sdpa, which in transformers 5.17
drops gemma2's soft cap without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvchat.engine.model import attention_hook
from kvchat.engine.model.quantization import is_packed
from kvchat.errors import ModelError
from kvchat.kv.attention_spec import AttentionSpec

PREFILL = (19, 14)
DECODE = 5
SECOND_TURN = 10

# Relative L2 error of the logits. Right models measure below 1e-5 in float32 and about 0.02 in bfloat16; the wrong
# ones in the module's docstring 0.2 to 1.1.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.15}


class DenseManager:
    """Keeps all K/V of one conversation and attends to it densely, in float32: slow, short and exact."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """``query`` [H_q, n, d_k] against everything stored and the new ``key``, ``value`` [H, n, d]."""
        if layer in self._stored:
            keys, values = self._stored[layer]
            key, value = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        self._stored[layer] = key, value
        group = query.shape[0] // key.shape[0]
        scores = query.float() @ key.float().repeat_interleave(group, 0).transpose(1, 2) * spec.scaling
        weights = _softmax(_masked(_capped(scores, spec.softcap), spec.window), spec.sinks)
        return (weights @ value.float().repeat_interleave(group, 0)).to(query.dtype)


def selftest(model: Any, make_manager: Callable[[], attention_hook.KeyValueManager] = DenseManager) -> float:
    """Chunked prefill, decode and a second turn through the seam against one eager forward over all tokens.

    Returns the relative L2 error of the logits at every token whose logits a chat would use.

    Raises:
        ModelError: the error is too large for the model's dtype, so its answers would be wrong.
    """
    chunks = _chunks(model)
    ends = torch.cumsum(torch.tensor([len(chunk) for chunk in chunks]), 0) - 1
    measured = relative_error(_stepwise(model, chunks, make_manager()), _reference(model, torch.cat(chunks))[ends])
    allowed = tolerance(model)
    if not measured <= allowed:
        raise ModelError(
            f"kvchat does not run {type(model).__name__} correctly.",
            f"In the self-test its logits differ from transformers' own by {measured:.2g} (relative), "
            f"and {allowed:.2g} is allowed in {str(model.dtype).removeprefix('torch.')}.",
            "Choose another model.",
        )
    return measured


def tolerance(model: Any) -> float:
    """The relative error that rounding alone may make; quantized weights are multiplied in half precision."""
    return TOLERANCE[torch.bfloat16 if is_packed(model) else model.dtype]


def relative_error(measured: Tensor, reference: Tensor) -> float:
    """||measured - reference|| / ||reference||; NaN anywhere gives NaN."""
    return float((measured - reference).norm() / reference.norm())


def _chunks(model: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [*PREFILL, *[1] * DECODE, SECOND_TURN]
    vocab = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocab, (sum(lengths),), generator=generator).to(model.device)
    return list(torch.split(ids, lengths))


def _stepwise(model: Any, chunks: list[Tensor], manager: attention_hook.KeyValueManager) -> Tensor:
    logits, start = [], 0
    for chunk in chunks:
        positions = torch.arange(start, start + len(chunk), device=chunk.device)
        logits.append(attention_hook.forward(model, chunk, positions, manager, logits=True))
        start += len(chunk)
    return torch.stack([last for last in logits if last is not None])


def _reference(model: Any, ids: Tensor) -> Tensor:
    positions = torch.arange(len(ids), device=ids.device)
    with torch.inference_mode(), _eager(model):
        logits: Tensor = model(ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return logits.float()


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention_hook.NAME)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _masked(scores: Tensor, window: int | None) -> Tensor:
    """The last queries of ``scores`` [H_q, n, total] are the newest tokens."""
    n, total = scores.shape[1:]
    queries = torch.arange(total - n, total, device=scores.device)[:, None]
    keys = torch.arange(total, device=scores.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return scores.masked_fill(hidden, -torch.inf)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
