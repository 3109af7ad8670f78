"""kvchat, llama.cpp and transformers, each in its own process: start, prefill, decoding and memory.

For each context, every peer is started again in each round and does the work of a user's first question: load, answer a
short prompt, prefill the context, decode after it. All files are in the page cache, so the disk's speed does not
matter. llama.cpp reads the GGUF file that kvchat reads, or a copy of the weights in kvchat's dtype; transformers
unpacks a GGUF file to that dtype. Both run with their own defaults and with as many threads as kvchat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from kvchat.bench.decode import Rounds
from kvchat.bench.decoding import prose
from kvchat.bench.external.baselines import PeerProcess, between, in_gguf, refuse_llama_cpp
from kvchat.bench.frame import Cell, Frame, ModelChoice, Result, Row, experiment, methods, parsed, split
from kvchat.bench.report import line
from kvchat.bench.settings import Peers
from kvchat.bench.timing import Timing, warm_up
from kvchat.config.profiles import Measured
from kvchat.errors import UsageError, check_known
from kvchat.models import checkpoint

SHORT = 16  # tokens of a first prompt, during which libraries do their one-time work
# Names in the table by the module that runs the peer; llama.cpp may be installed in two builds.
OTHERS = {"xllamacpp": "llama.cpp", "llama_cpp": "llama.cpp by llama-cpp-python", "transformers": "transformers"}
BUILT = "llama_cpp"  # compiled for this processor, if it was installed from source
OF_FILES = ModelChoice(quantize="auto")  # keeps weights as small as in the file, like llama.cpp


class Peer:
    """One peer after one context; each measurement is a new process, started with ``options``."""

    def __init__(
        self, program: str, name: str, file: str, options: Mapping[str, Any], ids: Sequence[int], spare: int
    ) -> None:
        self.name = name
        self._start = (program, name, file, len(ids) + spare, dict(options))
        self._prompt = ids
        self._measured: list[Row] = []

    def measure(self, tokens: Sequence[int]) -> Timing:
        """Start it, answer a short prompt, prefill the context and generate ``tokens`` tokens.

        Raises:
            UsageError: its process ended, or returned fewer tokens.
        """
        began = time.perf_counter()
        running = PeerProcess(*self._start)
        ready_s = time.perf_counter() - began
        try:
            first = running.decode(self._prompt[-SHORT:], 2)
            answer = running.decode(self._prompt, len(tokens))
            peak = running.peak_bytes
        finally:
            running.close()
        stamps = answer["stamps"]
        self._measured.append(
            {
                "ready_s": ready_s,
                "loading_s": running.loading_s,
                "first_token_s": ready_s + first["stamps"][0] - first["began"],
                "prompt_s": stamps[0] - answer["began"],
                "peak_bytes": peak,
            }
        )
        return between(stamps[warm_up(torch.device("cpu")) - 1 :])

    @property
    def figures(self) -> Row:
        """Medians of the rounds: seconds until ready, to load, to the first token; tokens/s of prefill."""
        found = {key: [each[key] for each in self._measured] for key in self._measured[0]}
        medians = {key: statistics.median(values) for key, values in found.items() if None not in values}
        return medians | {"prompt_tokens_per_s": len(self._prompt) / medians.pop("prompt_s")}

    def close(self) -> None:
        """Do nothing, because each measurement ends its process."""


def run(settings: Peers, choice: ModelChoice = OF_FILES, frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each context and peer.

    A context of 0, or beyond the model's, is the longest possible. A peer that fails gives a row with the reason.
    llama.cpp is left out, with a report, if the model has no GGUF file and cannot be copied to one.

    Raises:
        KvchatError: the model, a mode or a peer is refused, or a package that llama.cpp needs is not installed.
    """
    frame, found = frame or Frame(), methods(settings.modes)
    wanted = OTHERS if settings.peers is None else settings.peers
    for name in wanted:
        check_known(name, OTHERS, "peer")
    model = choice.load(frame.progress)
    others = [name for name in wanted if find_spec(name)]
    if absent := [name for name in wanted if name not in others]:
        frame.report(f"Not installed, left out: {', '.join(absent)}")
    of_files = [name for name in others if name != "transformers"]
    if of_files or model.device.type != "cpu":
        refuse_llama_cpp(model)
    spare = settings.steps + warm_up(model.device) + 1
    contexts = sorted({min(context or model.context, model.context - spare) for context in settings.contexts})
    location = checkpoint.locate(choice.model, frame.progress)
    with ExitStack() as copies:
        gguf = ""
        if of_files:
            try:
                gguf = str(copies.enter_context(in_gguf(model)))
            except UsageError as refusal:
                frame.report(f"Left out: {', '.join(of_files)}. {refusal.title} {refusal.detail}")
                others = [name for name in others if name not in of_files]
        head = experiment(
            "peers",
            "each measured in a fresh process",
            asdict(settings) | {"contexts": contexts, "peers": others},
            found,
            model,
            peers={name: version(name.replace("_cpp", "-cpp-python")) for name in others},
        )
        unpacked = str(location.folder / location.gguf), {"dtype": str(model.dtype).removeprefix("torch.")}

        def rows(cell: Cell) -> list[Row]:
            ids = prose(model.tokenizer, cell["context"])
            starts: list[tuple[str, str, str, dict[str, Any]]] = [
                (name, OTHERS[name], *(unpacked if name == "transformers" else (gguf, {}))) for name in others
            ]
            if BUILT in others:  # it depends on context and processor whether flash attention is faster
                starts.append((BUILT, f"{OTHERS[BUILT]}, flash attention", gguf, {"flash_attn": True}))
            starts += [("kvchat", f"kvchat {mode}", choice.model, _given(mode, choice)) for mode in settings.modes]
            peers = [Peer(*start, ids, spare) for start in starts]
            measured = Rounds(peers, settings.rounds, 0, None, Measured(), model.device).rows([0] * (spare - 1))
            for row in measured:
                ratios = row.get("times_as_fast", {})
                row["times_as_fast"] = {name: ratios[name] for name in ratios if not name.startswith("kvchat")}
            return measured

        return frame.measure(head, [{"context": context} for context in contexts], rows, line)


def _given(variant: str, choice: ModelChoice) -> dict[str, Any]:
    """Return options for kvchat's own process: weights, mode and the parameters that the variant sets."""
    mode, named = split(variant)
    params = {name: getattr(parsed(variant), name) for name in named}
    return {"dtype": choice.dtype, "quantize": choice.quantize, "mode": mode} | params
