"""The baseline llama.cpp: a GGUF copy of the same weights, all K/V kept, decoded by llama.cpp in this process.

Through the package xllamacpp, which brings llama.cpp compiled. Its server reads the prompt once and keeps its K/V; the
later rounds decode after it. Tokens are its own greedy ones: a step costs the same whatever they are.
"""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvchat.bench import gguf_copy
from kvchat.bench.timing import Timing, warm_up
from kvchat.engine.model.load import LoadedModel
from kvchat.errors import UsageError
from kvchat.kv.state import KVState

INSTALL = "pip install 'kvchat[peers]'"


class LlamaCpp:
    """A variant of the decode benchmark, with as many threads as torch has and K/V in the model's dtype."""

    name = "llama.cpp"

    def __init__(self, model: LoadedModel, _state: KVState, ids: Sequence[int], spare: int) -> None:
        self.model = model
        self.prompt = list(ids)
        self.context = len(ids) + spare
        self.prepare_s = 0.0
        self.answer: list[int] = []
        self._server: Any = None

    def measure(self, tokens: Sequence[int]) -> Timing:
        if self._server is None:
            began = time.perf_counter()
            self._server = self._load()
            self._decode(1)  # reads the prompt
            self.prepare_s = time.perf_counter() - began
        stamps = self._decode(len(tokens))[warm_up(self.model.device) - 1 :]
        intervals = [1000 * (b - a) for a, b in itertools.pairwise(stamps)]
        return Timing(statistics.median(intervals), statistics.fmean(intervals))

    def close(self) -> None:
        self._server = None

    @property
    def figures(self) -> dict[str, Any]:
        return {"prepare_s": self.prepare_s}

    def _load(self) -> Any:
        if self.model.device.type != "cpu":
            raise UsageError("llama.cpp is compared on a CPU only.", "The package brings it compiled for CPUs.")
        try:
            import xllamacpp

            with tempfile.TemporaryDirectory(prefix="kvchat-") as folder:
                file = Path(folder) / "copy.gguf"
                gguf_copy.write(self.model, file)
                return xllamacpp.Server(self._parameters(xllamacpp, file))
        except ImportError as absent:
            why = f"The package {absent.name} is not installed."
            raise UsageError("llama.cpp cannot be compared.", why, INSTALL) from None

    def _parameters(self, xllamacpp: Any, file: Path) -> Any:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx = self.context
        parameters.n_parallel = 1
        parameters.n_gpu_layers = 0
        parameters.warmup = False
        parameters.use_jinja = False
        parameters.verbosity = -1
        for threads in (parameters.cpuparams, parameters.cpuparams_batch):
            threads.n_threads = torch.get_num_threads()
        kind = xllamacpp.ggml_type[f"GGML_TYPE_{gguf_copy.KINDS[self.model.dtype]}"]
        parameters.cache_type_k = parameters.cache_type_v = kind
        return parameters

    def _decode(self, count: int) -> list[float]:
        """Decode greedily; when each token came, in seconds."""
        stamps: list[float] = []
        texts: list[str] = []

        def came(part: dict[str, Any]) -> None:
            stamps.append(time.perf_counter())
            texts.append("".join(choice["text"] for choice in part.get("choices", ())))

        wanted = {"n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": True, "stream": True}
        self._server.handle_completions({"prompt": self.prompt, **wanted}, came)
        self.answer = [int(id) for id in re.findall(r"<(\d+)>", "".join(texts))]
        if len(self.answer) != count:
            raise UsageError(f"llama.cpp gave {len(self.answer)} tokens, {count} were asked for.")
        return stamps[:count]
