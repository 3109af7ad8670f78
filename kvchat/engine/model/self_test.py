"""The numerical self-test: kvchat's attention hook against transformers' own eager attention, on the same weights.

Neither flags nor names tell whether the hook does a model's attention right (bloom, llama4 and gemma3n answer fluently
and wrongly), so every model is tested when it is loaded. The reference is eager and not sdpa, which in transformers
5.17 ignores gemma2's soft cap without a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvchat.engine.model import attention_hook
from kvchat.engine.model.attention_hook import AttentionBackend
from kvchat.engine.model.dense_attention import DenseManager
from kvchat.engine.model.tolerances import logits_tolerance, relative_error
from kvchat.errors import ModelError

PREFILL = (19, 14)
DECODE = 5
SECOND_TURN = 10


def selftest(model: Any, make_backend: Callable[[], AttentionBackend] = DenseManager) -> float:
    """Compare chunked prefill, decode and a second turn through the hook with one eager forward over all tokens.

    Returns the relative L2 error of the logits of every token whose logits a chat would use.

    Raises:
        ModelError: the error is too large for the model's dtype, so its answers would be wrong.
    """
    chunks = _chunks(model)
    ends = torch.cumsum(torch.tensor([len(chunk) for chunk in chunks]), 0) - 1
    measured = relative_error(_stepwise(model, chunks, make_backend()), _reference(model, torch.cat(chunks))[ends])
    allowed = logits_tolerance(model)
    if not measured <= allowed:
        raise ModelError(
            f"kvchat does not run {type(model).__name__} correctly.",
            f"In the self-test its logits differ from transformers' own by {measured:.2g} (relative), "
            f"and {allowed:.2g} is allowed in {str(model.dtype).removeprefix('torch.')}.",
            "Choose another model.",
        )
    return measured


def _chunks(model: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [*PREFILL, *[1] * DECODE, SECOND_TURN]
    vocab = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocab, (sum(lengths),), generator=generator).to(model.device)
    return list(torch.split(ids, lengths))


def _stepwise(model: Any, chunks: list[Tensor], backend: AttentionBackend) -> Tensor:
    logits, start = [], 0
    for chunk in chunks:
        positions = torch.arange(start, start + len(chunk), device=chunk.device)
        logits.append(attention_hook.forward(model, chunk, positions, backend, logits=True))
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
