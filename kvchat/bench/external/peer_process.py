"""A peer in its own process: ``python -m kvchat.bench.external.peer_process PROGRAM FILE CONTEXT THREADS OPTIONS``.

It loads a model, writes ``{"loading_s": seconds}`` (without Python's imports), then answers each input line
``{"prompt": [ids], "count": n}`` with ``{"began": seconds, "stamps": [seconds], "text": ...}``. If its library refuses,
it writes ``{"failed": ...}`` and ends. It is a separate process because llama.cpp's and torch's threads together exceed
the processors, and OpenMP then lets both sleep at every wait. For llama.cpp it never imports torch.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Decoded(NamedTuple):
    """When each token arrived, in seconds, and the text if the library returns one."""

    stamps: list[float]
    text: str = ""


Decode = Callable[[list[int], int], Decoded]


class _Clock:
    """A transformers streamer that records when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _ids: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    # Only answers go to the caller's pipe; library output goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    program, file, context, threads, options = sys.argv[1:]
    try:
        load = PROGRAMS[program]()
        began = time.perf_counter()
        decode = load(file, int(context), int(threads), **json.loads(options))
        print(json.dumps({"loading_s": time.perf_counter() - began}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            began = time.perf_counter()
            answer = decode(asked["prompt"], asked["count"])
            print(json.dumps({"began": began, **answer._asdict()}), file=answers, flush=True)
    except Exception as error:  # noqa: BLE001  # the caller reports whatever a library refuses
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=answers, flush=True)


def _xllamacpp() -> Callable[..., Decode]:
    import xllamacpp

    def load(file: str, context: int, threads: int, **options: Any) -> Decode:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = file
        parameters.n_ctx = context
        parameters.n_parallel = 1
        parameters.n_gpu_layers = 0
        parameters.use_jinja = False
        parameters.verbosity = -1
        for name, value in options.items():
            setattr(parameters, name, value)
        for group in (parameters.cpuparams, parameters.cpuparams_batch):
            group.n_threads = threads
        server = xllamacpp.Server(parameters)

        def decode(prompt: list[int], count: int) -> Decoded:
            stamps: list[float] = []
            texts: list[str] = []

            def came(part: dict[str, Any]) -> None:
                stamps.append(time.perf_counter())
                texts.append("".join(choice["text"] for choice in part.get("choices", ())))

            wanted = {"n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": True, "stream": True}
            server.handle_completions({"prompt": prompt, **wanted}, came)
            return Decoded(stamps, "".join(texts))

        return decode

    return load


def _llama_cpp() -> Callable[..., Decode]:
    import llama_cpp

    def load(file: str, context: int, threads: int, **options: Any) -> Decode:
        chosen = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        model = llama_cpp.Llama(file, **chosen, **options)
        return lambda prompt, count: Decoded(_stamps(model.generate(prompt, temp=0.0), count))

    return load


def _transformers() -> Callable[..., Decode]:
    import torch
    from transformers import AutoModelForCausalLM

    def load(file: str, context: int, threads: int, dtype: str) -> Decode:
        torch.set_num_threads(threads)
        gguf = {"gguf_file": Path(file).name} if file.endswith(".gguf") else {}
        folder = Path(file).parent if gguf else file
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **gguf)
        return lambda prompt, count: Decoded(generate(model, torch.tensor([prompt]), count))

    return load


def generate(model: Any, prompt: Any, count: int) -> list[float]:
    """Return when each of ``count`` tokens arrives from transformers' ``generate`` after ``prompt [1, tokens]``."""
    clock = _Clock()
    chosen = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
    model.generate(prompt, attention_mask=prompt.new_ones(prompt.shape), streamer=clock, **chosen)
    return clock.times[1:]  # without the echo of the prompt


def _kvchat() -> Callable[..., Decode]:
    import kvchat

    open_session = kvchat.load

    def load(file: str, context: int, threads: int, **options: Any) -> Decode:
        from kvchat.models import compile_ahead

        session = open_session(file, device="cpu", **options)
        compile_ahead.finish(lambda stage: None)

        def tokens(prompt: list[int]) -> Iterator[None]:
            session.truncate(0)
            logits = session.prefill(prompt)
            while True:
                token = int(logits.argmax())
                yield
                logits = session.step(token)

        return lambda prompt, count: Decoded(_stamps(tokens(prompt), count))

    return load


def _stamps(tokens: Iterator[Any], count: int) -> list[float]:
    """Return when each of ``count`` tokens arrives, in seconds."""
    return [time.perf_counter() for _ in itertools.islice(tokens, count)]


# Each imports its library and returns a function that loads a file.
PROGRAMS: dict[str, Callable[[], Callable[..., Decode]]] = {
    "kvchat": _kvchat,
    "llama_cpp": _llama_cpp,
    "transformers": _transformers,
    "xllamacpp": _xllamacpp,
}

if __name__ == "__main__":
    main()
