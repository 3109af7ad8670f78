"""llama.cpp's server in a separate process: ``llama_server.py FILE PORT CONTEXT``.

It exits when its standard input ends. A free port may be taken before the server starts: then it never answers, and
the test fails.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PATIENCE_S = 60.0


class LlamaServer:
    """Serves SmolLM2 at ``url`` while it is entered."""

    def __init__(self, context: int, port: int = 0) -> None:
        self.context, self.port = context, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LlamaServer:
        from support.real_models import FILES

        words = [str(FILES["smollm2"]), str(self.port), str(self.context)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            assert self._process.poll() is None, "llama.cpp's server ended"
            assert time.monotonic() < deadline, "llama.cpp's server did not start"
            time.sleep(0.1)
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the server, even in the middle of an answer."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    """Serve until the standard input ends."""
    import xllamacpp

    file, port, context = sys.argv[1:]
    parameters: Any = xllamacpp.CommonParams()
    parameters.model.path, parameters.port, parameters.n_ctx = file, int(port), int(context)
    parameters.n_parallel, parameters.n_gpu_layers, parameters.warmup, parameters.verbosity = 1, 0, False, -1
    parameters.endpoint_metrics = parameters.endpoint_slots = parameters.endpoint_props = True
    for group in (parameters.cpuparams, parameters.cpuparams_batch):
        group.n_threads = 1
    server = xllamacpp.Server(parameters)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
