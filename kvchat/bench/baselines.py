"""Baselines: transformers' own caches and llama.cpp, decoding after the same context as kvchat's modes.

transformers' caches are filled from the host pool, so that they need not read the prompt, and the model runs as
transformers wrote it: sdpa attention, none of kvchat's fused forwards, and on a CPU weights in ordinary memory.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvchat.bench.llama_cpp import LlamaCpp
from kvchat.bench.timing import Timing, Variant, time_steps, warm_up
from kvchat.errors import UsageError, did_you_mean
from kvchat.kv.state import KVState
from kvchat.models import attention_hook
from kvchat.models.load import LoadedModel

DEFAULTS: dict[str, tuple[str, ...]] = {"cpu": ("generate",), "cuda": ("dynamic", "static", "compile", "offloaded")}


def check(names: Sequence[str]) -> None:
    """Check the names of baselines.

    Raises:
        UsageError: an unknown name; the message has the nearest known one.
    """
    for name in names:
        if name not in BASELINES:
            raise UsageError(f'There is no baseline "{name}".', did_you_mean(name, BASELINES))


def build(name: str, model: LoadedModel, state: KVState, ids: Sequence[int], spare: int) -> Variant:
    """Make the baseline ``name`` that continues after the stored ``ids``, with room for ``spare`` tokens more."""
    return BASELINES[name](model, state, ids, spare)


def default_baselines(device: torch.device, random_weights: bool) -> tuple[str, ...]:
    """Baselines that suit the device; ``generate`` would read a prompt of random tokens in every round."""
    return ("dynamic",) if device.type == "cpu" and random_weights else DEFAULTS[device.type]


def in_ordinary_memory(model: LoadedModel) -> LoadedModel:
    """``model`` with its weights where transformers would have them: on a CPU a copy, kvchat's lie in huge pages."""
    return model if model.device.type != "cpu" else replace(model, model=copy.deepcopy(model.model))


@contextmanager
def as_written(model: Any) -> Iterator[None]:
    """Run ``model`` as transformers wrote it, with sdpa attention, inside the context."""
    swapped = {module: module.__dict__.pop("forward") for module in model.modules() if "forward" in module.__dict__}
    model.set_attn_implementation("sdpa")
    try:
        # Not inference_mode: what is compiled or captured writes to tensors made outside it.
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(attention_hook.NAME)
        for module, forward in swapped.items():
            module.forward = forward


class Baseline:
    """Base: measures step by step with a cache of its own; ``prepare_s`` is the time of the first reset in seconds."""

    name = ""

    def __init__(self, model: LoadedModel, state: KVState, ids: Sequence[int], spare: int) -> None:
        self.model = model
        self.state = state
        self.context = len(ids)
        self.prompt = ids
        self.spare = spare
        self.prepare_s = 0.0
        device = model.device
        self.ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.position = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.cache: Any = None

    def measure(self, tokens: Sequence[int]) -> Timing:
        with as_written(self.model.model):
            began = time.perf_counter()
            self._reset()
            self.prepare_s = self.prepare_s or time.perf_counter() - began
            return time_steps(self._step, tokens, self.model.device)

    def close(self) -> None:
        self.cache = None

    @property
    def figures(self) -> dict[str, Any]:
        return {"kv_device_bytes": self.kv_device_bytes, "prepare_s": self.prepare_s}

    @property
    def kv_device_bytes(self) -> int | None:
        """Bytes of the cache on the device; None without a cache."""
        if self.cache is None:
            return None
        tensors: list[Tensor] = [t for layer in self.cache.layers for t in (layer.keys, layer.values)]
        return sum(t.nbytes for t in tensors if t.device.type == self.model.device.type)

    def _reset(self) -> None:
        """Make the cache hold the K/V of the context and nothing else."""
        raise NotImplementedError

    def _step(self, token: int) -> None:
        self.ids.fill_(token)
        self._forward()
        self.position.add_(1)

    def _forward(self) -> Tensor:
        output = self.model.model(
            self.ids, position_ids=self.position, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = output.logits
        return logits

    def _fill(self) -> None:
        for layer in range(self.model.layers):
            keys, values = self.state.host.dense(layer, self.context)
            self.cache.update(keys[None].clone(), values[None].clone(), layer)
        self.position.fill_(self.context)


class Dynamic(Baseline):
    """The default cache of ``generate``: every token copies K/V into larger tensors."""

    name = "dynamic"
    offloading = False

    def _reset(self) -> None:
        from transformers import DynamicCache

        self.cache = None
        self.cache = DynamicCache(config=self.model.model.config, offloading=self.offloading)
        self._fill()


class Offloaded(Dynamic):
    """The offloaded cache: one layer on the device, the next one prefetched."""

    name = "offloaded"
    offloading = True

    def _reset(self) -> None:
        if self.model.device.type != "cuda":
            raise UsageError("The offloaded cache needs a GPU.", hint="Leave it out, or measure on a GPU.")
        super()._reset()


class Static(Baseline):
    """A cache of fixed size; on a GPU the step is one CUDA graph."""

    name = "static"

    def __init__(self, model: LoadedModel, state: KVState, ids: Sequence[int], spare: int) -> None:
        super().__init__(model, state, ids, spare)
        self._graph: torch.cuda.CUDAGraph | None = None

    def close(self) -> None:
        super().close()
        self._graph = None

    def _reset(self) -> None:
        if self.cache is None:
            self._make()
            if self.model.device.type == "cuda":
                self._capture()
        self._rewind()

    def _make(self) -> None:
        from transformers import StaticCache

        self.cache = StaticCache(config=self.model.model.config, max_cache_len=self.context + self.spare)
        if any(layer.is_sliding for layer in self.cache.layers):
            raise UsageError(
                "The static cache of a model with sliding layers cannot be rewound.", hint="Leave it out of --baseline."
            )
        self._fill()

    def _rewind(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)
        self.position.fill_(self.context)

    def _capture(self) -> None:
        side = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream(self.model.device).wait_stream(side)
        self._rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._forward()
            self.position.add_(1)
        self._graph = graph

    def _step(self, token: int) -> None:
        if self._graph is None:
            super()._step(token)
            return
        self.ids.fill_(token)
        self._graph.replay()


class Compiled(Static):
    """The static cache under ``torch.compile``; with CUDA graphs on a GPU."""

    name = "compile"

    def close(self) -> None:
        super().close()
        torch.compiler.reset()

    def _reset(self) -> None:
        if self.cache is None:
            self._make()
            mode = "reduce-overhead" if self.model.device.type == "cuda" else "default"
            self._compiled = torch.compile(self._forward, mode=mode, dynamic=False)
            for _ in range(2):  # the second run records the graphs
                self._rewind()
                self._step(0)
        self._rewind()

    def _step(self, token: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self.ids.fill_(token)
        self._compiled()
        self.position.add_(1)


class _Clock:
    """A transformers streamer that notes when each token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _ids: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Generate(Baseline):
    """transformers' ``generate``: the median interval between its tokens, which are its own. Reads the prompt."""

    name = "generate"

    def measure(self, tokens: Sequence[int]) -> Timing:
        clock = _Clock()
        prompt = torch.tensor([list(self.prompt)], device=self.model.device)
        arguments: dict[str, Any] = {
            "do_sample": False,
            "max_new_tokens": len(tokens),
            "min_new_tokens": len(tokens),
            "pad_token_id": 0,
        }
        with as_written(self.model.model):
            self.model.model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **arguments)
        stamps = clock.times[1 + warm_up(self.model.device) :]  # the first is the prompt's echo
        intervals = [1000 * (b - a) for a, b in itertools.pairwise(stamps)]
        return Timing(statistics.median(intervals), statistics.fmean(intervals))


Make = Callable[[LoadedModel, KVState, Sequence[int], int], Variant]
BASELINES: dict[str, Make] = {cls.name: cls for cls in (Dynamic, Static, Compiled, Offloaded, Generate, LlamaCpp)}
