"""Model runners over tiny random models, in every mode, and a step-by-step comparison of two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from support import byte_tokenizer, tiny_models
from support.integrity import check_integrity
from support.toy_model import calibration

from kvchat.config.modes import parse
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.kv.inspect import attended, read_tokens
from kvchat.kv.modes import build
from kvchat.kv.modes.base import Mode
from kvchat.models import split
from kvchat.models.load import LoadedModel
from kvchat.models.probe import probe, reads_chunks

PARAMS = {
    "full": ("full", {}),
    "full-resident": ("full", {"resident": 64}),
    "streaming": ("streaming", {"budget": 64, "R": 8, "sigma": 6, "delta": 5}),
    "speculative": ("speculative", {"budget": 128, "sink": 8, "window": 32, "tau": 0.7}),
    "speculative-reuse": ("speculative", {"budget": 128, "sink": 8, "window": 32, "tau": -2.0}),
    "freeze": ("freeze", {"K": 8, "k": 1.0, "recovery": False}),
    "freeze-paper": ("freeze", {"profile": "paper", "K": 8}),
    "sync": ("sync", {"budget": 80, "m": 3}),
}
COMPARED = {
    "quest": ("quest", {"budget": 64, "whole_layers": 0}),
    "arkvale": ("arkvale", {"budget": 160}),
    "shadowkv": ("shadowkv", {"budget": 96}),
    "raas": ("raas", {"budget": 64}),
    "razor": ("razor", {"budget": 64}),
    **{name: (name, {"budget": 64}) for name in ("snapkv", "pyramidkv", "cake", "h2o")},
}


class EmptyTokenizer:
    """A tokenizer without control tokens that encodes every text as no tokens."""

    added_tokens_decoder: ClassVar[dict[int, object]] = {}
    all_special_ids: ClassVar[list[int]] = []
    bos_token_id = eos_token_id = unk_token_id = None
    is_fast = False

    def __init__(self, chat_template: str = "", vocabulary: dict[str, int] | None = None) -> None:
        self.chat_template = chat_template
        self._vocabulary = vocabulary or {}

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def __call__(self, text: str, **options: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[])


def load_tiny(
    name: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    places: Sequence[torch.device] = (),
    **changes: Any,
) -> LoadedModel:
    """Return a tiny random model as ``load_model`` returns one; ``changes`` apply to its config.

    Its layers are on the devices ``places``, one for each layer, if given.
    """
    model = tiny_models.fresh(name, **changes).to(dtype)
    split.move(model, torch.device(device), places)
    split.connect(model, torch.device(device), places)
    seen = probe(model)
    chunked = reads_chunks(model)
    sizes = (len(seen.specs), seen.q_heads, seen.kv_heads, seen.d_k, seen.d_v)
    fixed = (name, name, torch.device(device), dtype, tiny_models.CONTEXT, tiny_models.VOCAB, frozenset({2}))
    return LoadedModel(model, EmptyTokenizer(), *fixed, *sizes, seen, (), 0, reads_chunks=chunked)


def load_tiny_with_bytes(name: str) -> LoadedModel:
    """A tiny random model with one token per byte."""
    model = load_tiny(name, vocab_size=byte_tokenizer.SIZE)
    end = byte_tokenizer.SIZE - 1
    return replace(model, tokenizer=byte_tokenizer.byte_level(), vocab=end + 1, eos_ids=frozenset({end}))


def runner_of(model: LoadedModel, mode: str = "full", **params) -> ModelRunner:
    return ModelRunner(model, build(parse(mode, params), geometry_of(model), traits_of(model)))


def prefill_logits(one: ModelRunner, ids: list[int]) -> torch.Tensor:
    return [logits for _, logits in one.prefill(ids)][-1]


def mode_of(model: LoadedModel, row: str, instead: dict | None = None) -> Mode:
    name, params = (PARAMS | COMPARED)[row]
    params = params if instead is None else instead
    geometry = geometry_of(model)
    return build(parse(name, params), geometry, traits_of(model, calibration(geometry)))


def token_ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, tiny_models.VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_same_steps(one: ModelRunner, other: ModelRunner, ids: list[int]) -> None:
    for i, token in enumerate(ids):
        assert torch.equal(one.step(token).cpu(), other.step(token).cpu()), f"step {i}"
    for layer in range(one.kv.state.geometry.layers):
        assert torch.equal(attended(one.kv.state, layer).cpu(), attended(other.kv.state, layer).cpu())
        stored = [each.kv.state.host.dense(layer, each.kv.total) for each in (one, other)]
        assert all(torch.equal(mine.cpu(), its.cpu()) for mine, its in zip(*stored, strict=True))
    assert one.kv.state.transfer.totals == other.kv.state.transfer.totals
    assert read_tokens(one.kv.state) == read_tokens(other.kv.state)
    check_integrity(one.kv.state)
