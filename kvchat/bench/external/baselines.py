"""Baselines: transformers' own caches and llama.cpp, decoding after the same context as kvchat's modes.

llama.cpp reads the model's GGUF file, or a GGUF copy of its weights, and decodes in another process with its own
defaults: K/V in float16, and its own choice of attention.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvchat import libraries, process
from kvchat.bench.external import peer_process
from kvchat.bench.timing import Timing, Variant, read_peak, time_steps, warm_up
from kvchat.errors import UsageError
from kvchat.kv.state import KVState
from kvchat.models import attention_hook
from kvchat.models.load import LoadedModel
from kvchat.models.recurrent import cache_argument

Make = Callable[[LoadedModel, KVState, Sequence[int], int], Variant]
PACKAGES = ("xllamacpp", "gguf")
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def in_ordinary_memory(model: LoadedModel) -> LoadedModel:
    """Return ``model`` with weights in memory as in transformers: on a CPU a copy, because kvchat uses huge pages."""
    return model if model.device.type != "cpu" else replace(model, model=copy.deepcopy(model.model))


@contextmanager
def as_written(model: Any) -> Iterator[None]:
    """Run transformers' own code with sdpa attention inside the context, except for packed weights."""
    # Only kvchat's forward can multiply by packed weights, or look up rows in them.
    ours = [
        module
        for module in model.modules()
        if "forward" in module.__dict__ and all(one.is_floating_point() for one in module.parameters(recurse=False))
    ]
    swapped = {module: module.__dict__.pop("forward") for module in ours}
    model.set_attn_implementation("sdpa")
    try:
        # Not inference_mode, because a captured graph writes to tensors made outside of it.
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(attention_hook.NAME)
        for module, forward in swapped.items():
            module.forward = forward


class Baseline:
    """Base class: decodes step by step with its own cache; ``prepare_s`` is the time of the first reset in seconds."""

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
        """Fill the cache with the K/V of the context and nothing else."""
        raise NotImplementedError

    def _step(self, token: int) -> None:
        self.ids.fill_(token)
        self._forward()
        self.position.add_(1)

    def _forward(self) -> Tensor:
        cached = {cache_argument(): self.cache, "use_cache": True}
        output = self.model.model(self.ids, position_ids=self.position, logits_to_keep=1, **cached)
        logits: Tensor = output.logits
        return logits

    def _fill(self) -> None:
        for layer in range(self.model.layers):
            keys, values = self.state.host.dense(layer, self.context)
            self.cache.update(keys[None].clone(), values[None].clone(), layer)
        self.position.fill_(self.context)


class Dynamic(Baseline):
    """The default cache of ``generate``, which copies K/V into larger tensors for every token."""

    name = "dynamic"
    offloading = False

    def _reset(self) -> None:
        from transformers import DynamicCache

        self.cache = None
        self.cache = DynamicCache(config=self.model.model.config, offloading=self.offloading)
        self._fill()


class Offloaded(Dynamic):
    """The offloaded cache: one layer is on the device, and the next one is prefetched."""

    name = "offloaded"
    offloading = True

    def _reset(self) -> None:
        if self.model.device.type != "cuda":
            raise UsageError("The offloaded cache needs a GPU.", hint="Omit it, or measure on a GPU.")
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
        self._rewind()

    def _make(self) -> None:
        from transformers import StaticCache

        self.cache = StaticCache(config=self.model.model.config, max_cache_len=self.context + self.spare)
        if any(layer.is_sliding for layer in self.cache.layers):
            raise UsageError(
                "The static cache of a model with sliding layers cannot be rewound.", hint="Omit it from --baseline."
            )
        self._fill()
        if self.model.device.type == "cuda":
            self._capture()

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


class Generate(Baseline):
    """transformers' ``generate``, timed by the intervals between its tokens, which it chooses itself."""

    name = "generate"

    def measure(self, tokens: Sequence[int]) -> Timing:
        prompt = torch.tensor([list(self.prompt)], device=self.model.device)
        with as_written(self.model.model):
            stamps = peer_process.generate(self.model.model, prompt, len(tokens))
        return between(stamps[warm_up(self.model.device) :])


def between(stamps: Sequence[float]) -> Timing:
    """Return the time per token from the seconds at which tokens arrived."""
    intervals = [1000 * (b - a) for a, b in itertools.pairwise(stamps)]
    return Timing(statistics.median(intervals), statistics.fmean(intervals))


class LlamaCpp:
    """llama.cpp as a variant of the decode benchmark, with as many threads as torch."""

    name = "llama.cpp"

    def __init__(self, model: LoadedModel, _state: KVState, ids: Sequence[int], spare: int) -> None:
        self.model = model
        self.prompt = list(ids)
        self.context = len(ids) + spare
        self.prepare_s = 0.0
        self.answer = ""
        self._process: PeerProcess | None = None

    def measure(self, tokens: Sequence[int]) -> Timing:
        if self._process is None:
            refuse_llama_cpp(self.model)
            began = time.perf_counter()
            with in_gguf(self.model) as file:  # needed only until it is loaded
                self._process = PeerProcess("xllamacpp", self.name, str(file), self.context, {"warmup": False})
            self._process.decode(self.prompt, 1)  # prefill
            self.prepare_s = time.perf_counter() - began
        answer = self._process.decode(self.prompt, len(tokens))
        self.answer = answer["text"]
        return between(answer["stamps"][warm_up(self.model.device) - 1 :])

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    @property
    def figures(self) -> dict[str, Any]:
        return {"prepare_s": self.prepare_s}


def refuse_llama_cpp(model: LoadedModel) -> None:
    """Refuse a device that is not a CPU, and missing packages.

    Raises:
        UsageError: llama.cpp cannot be compared.
    """
    if model.device.type != "cpu":
        raise UsageError(
            "llama.cpp is compared only on a CPU.", "The package is compiled for CPUs.", "Use --device cpu."
        )
    if absent := next((package for package in PACKAGES if find_spec(package) is None), ""):
        raise UsageError(
            "llama.cpp cannot be compared.",
            f"The package {absent} is not installed.",
            f"Run: {libraries.extra('baselines')}",
        )


@contextmanager
def in_gguf(model: LoadedModel) -> Iterator[Path]:
    """Provide the model's GGUF file, or a copy of its weights as one, which is deleted when the context ends."""
    with tempfile.TemporaryDirectory(prefix="kvchat-") as folder:
        if (file := model.gguf) is None:
            write(model, file := Path(folder) / "copy.gguf")
        yield file


class PeerProcess:
    """A program of ``peer_process`` in its own process, with as many threads as torch.

    Creating it loads the model, in ``loading_s`` seconds without Python's imports.

    Raises:
        UsageError: here and in ``decode``, if the process ended or its library refused.
    """

    def __init__(self, program: str, name: str, file: str, context: int, options: dict[str, Any]) -> None:
        self.name = name
        arguments = (program, file, str(context), str(torch.get_num_threads()), json.dumps(options))
        self._process = subprocess.Popen(
            process.python("-m", "kvchat.bench.external.peer_process", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=process.as_the_user_left_it(),
        )
        try:
            self.loading_s: float = self._answer()["loading_s"]
        except UsageError:
            self.close()
            raise

    @property
    def peak_bytes(self) -> int | None:
        """Bytes in RAM at the peak so far; None if the system does not report it."""
        return read_peak(process.PROCESSES / str(self._process.pid))

    def decode(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        """Decode greedily; return when it ``began`` and when each token arrived (``stamps``), and the ``text``."""
        assert self._process.stdin is not None
        print(json.dumps({"prompt": list(prompt), "count": count}), file=self._process.stdin, flush=True)
        answer = self._answer()
        if (came := len(answer["stamps"])) < count:
            raise UsageError(
                f"{self.name} gave {came} tokens, {count} were requested.",
                hint=f"Use a smaller context, or omit {self.name}.",
            )
        return answer | {"stamps": answer["stamps"][:count]}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {}
        reason = answer.get("failed") or (not line and f"Its process ended with code {self._process.wait()}.")
        if reason:
            raise UsageError(f"{self.name} ended.", str(reason), f"Use a smaller context, or omit {self.name}.")
        return answer


def write(model: LoadedModel, file: Path) -> None:
    """Write a GGUF file: matrices in the model's dtype, vectors in float32, and the architecture's parameters.

    Raises:
        UsageError: the model is not a Llama with plain rotary positions; ImportError: the package gguf is missing.
    """
    import gguf

    config = model.model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type != "llama" or rotary != "default" or config.attention_bias or config.mlp_bias:
        raise UsageError(
            f"{model.name} cannot be copied to GGUF.",
            "Only Llama models with plain rotary positions are copied.",
            "Use the bundled model, or omit llama.cpp.",
        )
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{id}>" for id in range(config.vocab_size)])
    writer.add_token_merges(["< 0"])  # at least one is required
    kind = gguf.GGMLQuantizationType[KINDS[model.dtype]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        values = rotated_in_pairs(name, weight, config).float().cpu().contiguous().numpy()
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), gguf.quants.quantize(values, stored), raw_dtype=stored
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, config: Any) -> None:
    """Write the parameters of a Llama architecture; ``writer`` is gguf's, ``config`` transformers'."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def rotated_in_pairs(name: str, weight: Tensor, config: Any) -> Tensor:
    """Return the parameter ``name`` in GGUF's order: GGUF rotates neighbors, transformers the halves of a head."""
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    count = next((heads[part] for part in heads if part in name), None)
    if count is None:
        return weight
    return weight.view(count, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


# Each is constructed with a model, the K/V of stored ids, these ids, and the number of tokens to leave room for.
BASELINES: dict[str, Make] = {cls.name: cls for cls in (Dynamic, Static, Offloaded, Generate, LlamaCpp)}
