"""llama.cpp in a process of its own: ``python -m kvchat.bench.llama_cpp_process FILE CONTEXT THREADS``.

Loads a GGUF file, then answers each line ``{"prompt": [ids], "count": n}`` on its input with a line ``{"stamps":
[seconds], "text": ...}``; the first line says that it is loaded. Apart because llama.cpp's threads and torch's would
count as more than there are processors, and OpenMP then lets both sleep at every wait. It never imports torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load and answer until the input ends."""
    # What llama.cpp prints goes elsewhere; only answers go to the caller.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    file, context, threads = sys.argv[1:]
    server = _load(file, int(context), int(threads))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_decode(server, **json.loads(line))), file=answers, flush=True)


def _load(file: str, context: int, threads: int) -> Any:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.warmup = False
    parameters.use_jinja = False
    parameters.verbosity = -1
    for group in (parameters.cpuparams, parameters.cpuparams_batch):
        group.n_threads = threads
    return xllamacpp.Server(parameters)


def _decode(server: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """Decode greedily after the prompt, whose K/V is kept; when each token came, and the text."""
    stamps: list[float] = []
    texts: list[str] = []

    def came(part: dict[str, Any]) -> None:
        stamps.append(time.perf_counter())
        texts.append("".join(choice["text"] for choice in part.get("choices", ())))

    wanted = {"n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": True, "stream": True}
    server.handle_completions({"prompt": prompt, **wanted}, came)
    return {"stamps": stamps, "text": "".join(texts)}


if __name__ == "__main__":
    main()
