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
from kvchat.engine.model.recurrent_state import RecurrentState
from kvchat.engine.model.supported import keeping_state
from kvchat.engine.model.tolerances import logits_error, logits_tolerance, relative_error
from kvchat.errors import ModelError

PREFILL = (19, 14)
DECODE = 5
SECOND_TURN = 10
EXPERTS_AGREE = 0.25  # of the tokens of a mixture: attending wrongly spoils more of them


def reads_chunks(model: Any) -> bool:
    """True if a forward of several tokens continues a recurrent state; jamba's silently starts from an empty one.

    Raises:
        ModelError: transformers refuses, or keeps state where it cannot be copied.
    """
    chunks, state = _chunks(model), RecurrentState(model.config)
    if not state.exists:
        return True
    with keeping_state(model, state):
        last = _stepwise(model, chunks[:2], DenseManager(), state)[-1]
    expected = _reference(model, torch.cat(chunks[:2]))[-1]
    return relative_error(last, expected) <= logits_tolerance(model)


def selftest(model: Any, make_backend: Callable[[], AttentionBackend] = DenseManager, chunked: bool = True) -> float:
    """Compare chunked prefill, decode and a second turn through the hook with one eager forward over all tokens.

    Without ``chunked`` all tokens after the first chunk go one by one.

    Returns the relative L2 error of the logits of the tokens whose logits a chat would use.

    Raises:
        ModelError: the error is too large for the model's dtype, so its answers would be wrong.
    """
    chunks = _chunks(model, chunked)
    ends = torch.cumsum(torch.tensor([len(chunk) for chunk in chunks]), 0) - 1
    made = _stepwise(model, chunks, make_backend(), RecurrentState(model.config))
    measured = logits_error(model, made, _reference(model, torch.cat(chunks))[ends], share=EXPERTS_AGREE)
    allowed = logits_tolerance(model)
    if not measured <= allowed:
        raise ModelError(
            f"kvchat does not run {type(model).__name__} correctly.",
            f"In the self-test its logits differ from transformers' own by {measured:.2g} (relative), "
            f"and {allowed:.2g} is allowed in {str(model.dtype).removeprefix('torch.')}.",
            "Choose another model.",
        )
    return measured


def _chunks(model: Any, chunked: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [*PREFILL, *[1] * DECODE, SECOND_TURN]
    if not chunked:
        lengths = [PREFILL[0], *[1] * sum(lengths[1:])]
    vocab = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocab, (sum(lengths),), generator=generator).to(model.device)
    return list(torch.split(ids, lengths))


def _stepwise(model: Any, chunks: list[Tensor], backend: AttentionBackend, state: RecurrentState) -> Tensor:
    logits, start = [], 0
    for chunk in chunks:
        positions = torch.arange(start, start + len(chunk), device=chunk.device)
        logits.append(attention_hook.forward(model, chunk, positions, backend, logits=True, state=state))
        start += len(chunk)
    return torch.stack([last for last in logits if last is not None])


def _reference(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode(), _eager(model):  # of its own positions: a few begin to count at 2
        logits: Tensor = model(ids[None], use_cache=False).logits[0]
    return logits.float()


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention_hook.NAME)
