"""What a model loses by its packed weights: its logits on a short text, against those of the weights in its files.

Each weight is unpacked again as it is multiplied, so that no more than one is unpacked at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from kvchat.engine.model import attention_hook, quantization, repacking
from kvchat.engine.model.checkpoint import Checkpoint
from kvchat.engine.model.dense_attention import DenseManager
from kvchat.engine.model.description import ModelDescription
from kvchat.engine.model.packed_rows import ROWS, STACKS, PackedRows

MOST = 0.005  # nats: a loss below that is not told
LARGEST = 2**29  # weights of a model that is measured
TOKENS = 32
PLAIN = ("F32", "F16", "BF16")  # others are quantized, and have scales beside them
TEXT = """The old lighthouse keeper wrote in his journal that the storm of 1897 had carried away two boats and a shed.

def total(prices):
    return sum(price * 1.2 for price in prices)
"""

Source = Callable[[], Tensor]


def note(model: Any, tokenizer: Any, described: ModelDescription, checkpoint: Checkpoint) -> str:
    """A sentence where the packed weights of ``model``, which is not fused yet, lose more than ``MOST``; else empty.

    Also where that is not known: of weights on a GPU, of packed experts, and of what the files have in another form.
    Nor is it measured where it would take longer than loading does: about a second for each ``LARGEST`` / 4 weights.
    """
    packed = {name: module for name, module in model.named_modules() if ROWS in module.__dict__}
    weights = sum(module.in_features * module.out_features for module in packed.values())
    if not packed or weights > LARGEST or any(STACKS in module.__dict__ for module in model.modules()):
        return ""
    sources, head = _sources(described, checkpoint), model.get_output_embeddings()
    if head in packed.values():  # where it is tied the files have it as the embeddings
        embeddings: Tensor = model.get_input_embeddings().weight
        sources = {f"{name}.weight": lambda: embeddings for name, one in packed.items() if one is head} | sources
    ids, known = tokenizer(TEXT).input_ids[:TOKENS], all(f"{name}.weight" in sources for name in packed)
    if not known or len(ids) < TOKENS or max(ids) >= len(model.get_input_embeddings().weight):
        return ""  # no tokenizer for such a text
    found = _logits(model, ids)
    with _unpacked({module: sources[f"{name}.weight"] for name, module in packed.items()}):
        divergence, same = _compared(_logits(model, ids), found)
    if not divergence > MOST:
        return ""
    kind = quantization.describe(model)
    return (
        f"In {kind} its weights answer otherwise than unpacked: KL {divergence:.2g} on average over a short text, "
        f"{same:.0%} of its tokens the same. --quantize {'int8 or none is' if kind == 'int4' else 'none is'} closer."
    )


def _sources(described: ModelDescription, checkpoint: Checkpoint) -> dict[str, Source]:
    """What makes each weight as the files have it, by the model's names."""
    if checkpoint.gguf:
        return {name: weight.make for name, weight in described.gguf_weights.items()}
    if repacking.is_unpacked(described):
        return {}
    files: list[Any] = [safe_open(file, "pt") for file in checkpoint.weights]
    names = ((file, name) for file in files for name in file.keys())  # noqa: SIM118 - it is no mapping
    return {name: _read(file, name) for file, name in names if file.get_slice(name).get_dtype() in PLAIN}


def _read(file: Any, name: str) -> Source:
    return lambda: file.get_tensor(name)


@contextmanager
def _unpacked(sources: dict[nn.Module, Source]) -> Iterator[None]:
    """Let these Linears multiply by what is unpacked from their sources."""
    packed: dict[nn.Module, PackedRows] = {linear: linear.__dict__[ROWS] for linear in sources}
    try:
        for linear, source in sources.items():
            linear.__dict__["forward"] = _product(linear, source)
        yield
    finally:
        for linear, rows in packed.items():
            linear.__dict__["forward"] = rows.forward


def _product(linear: Any, source: Source) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, source().to(x.dtype), linear.bias)


def _logits(model: Any, ids: list[int]) -> Tensor:
    """The logits ``[tokens, vocab]`` after each of ``ids``, in float32."""
    with torch.inference_mode(), attention_hook.bound(DenseManager()):
        output = model(torch.tensor([ids]), position_ids=torch.arange(len(ids))[None], use_cache=False)
    logits: Tensor = output.logits[0].float()
    return logits


def _compared(expected: Tensor, found: Tensor) -> tuple[float, float]:
    """KL in nats on average over the tokens but the first, and the share of them whose likeliest next is the same."""
    expected, found = expected[1:].log_softmax(-1), found[1:].log_softmax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    return float(divergence), float((expected.argmax(-1) == found.argmax(-1)).float().mean())
