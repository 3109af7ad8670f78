"""The baseline llama.cpp: a GGUF copy of the same weights, all K/V kept, decoded by llama.cpp beside this process.

Through the package xllamacpp, which brings llama.cpp compiled (for AVX2, not for what a newer processor could do
beyond). Its server reads the prompt once and keeps its K/V; the later rounds decode after it. Tokens are its own greedy
ones: a step costs the same whatever they are.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvchat import install, process
from kvchat.bench import gguf_copy
from kvchat.bench.timing import Timing, warm_up
from kvchat.errors import UsageError
from kvchat.kv.state import KVState
from kvchat.models.load import LoadedModel

PACKAGES = ("xllamacpp", "gguf")


class LlamaCpp:
    """A variant of the decode benchmark, with as many threads as torch has and K/V in the model's dtype."""

    name = "llama.cpp"

    def __init__(self, model: LoadedModel, _state: KVState, ids: Sequence[int], spare: int) -> None:
        self.model = model
        self.prompt = list(ids)
        self.context = len(ids) + spare
        self.prepare_s = 0.0
        self.answer: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    def measure(self, tokens: Sequence[int]) -> Timing:
        if self._process is None:
            began = time.perf_counter()
            self._start()
            self._decode(1)  # reads the prompt
            self.prepare_s = time.perf_counter() - began
        stamps = self._decode(len(tokens))[warm_up(self.model.device) - 1 :]
        intervals = [1000 * (b - a) for a, b in itertools.pairwise(stamps)]
        return Timing(statistics.median(intervals), statistics.fmean(intervals))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @property
    def figures(self) -> dict[str, Any]:
        return {"prepare_s": self.prepare_s}

    def _start(self) -> None:
        """Start llama.cpp with a copy of the weights; it is loaded when this returns."""
        if self.model.device.type != "cpu":
            raise UsageError(
                "llama.cpp is compared on a CPU only.", "The package brings it compiled for CPUs.", "Give --device cpu."
            )
        if absent := next((package for package in PACKAGES if find_spec(package) is None), ""):
            raise UsageError(
                "llama.cpp cannot be compared.",
                f"The package {absent} is not installed.",
                f"Run: {install.extra('baselines')}",
            )
        with tempfile.TemporaryDirectory(prefix="kvchat-") as folder:
            file = Path(folder) / "copy.gguf"
            gguf_copy.write(self.model, file)
            told = str(file), str(self.context), str(torch.get_num_threads()), gguf_copy.KINDS[self.model.dtype]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvchat.bench.llama_cpp_process", *told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=process.as_the_user_left_it(),
            )
            self._answer()

    def _decode(self, count: int) -> list[float]:
        """Decode greedily; when each token came, in seconds."""
        assert self._process is not None
        assert self._process.stdin is not None
        print(json.dumps({"prompt": self.prompt, "count": count}), file=self._process.stdin, flush=True)
        answer = self._answer()
        self.answer = [int(id) for id in re.findall(r"<(\d+)>", answer["text"])]
        if len(self.answer) != count:
            raise UsageError(
                f"llama.cpp gave {len(self.answer)} tokens, {count} were asked for.",
                hint="Take a smaller context, or leave llama.cpp out.",
            )
        return list(answer["stamps"][:count])

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UsageError(
                "llama.cpp ended.",
                f"Its process ended with code {self._process.wait()}.",
                "Take a smaller context, or leave llama.cpp out.",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
