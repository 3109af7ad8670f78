"""``kvchat serve`` in a separate process, with requests by plain HTTP and by OpenAI's client."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from openai import OpenAI
from support.environment import environ
from support.patience import PATIENCE_S, wait_until

FAKE = Path(__file__).with_name("start_serve.py")
JSON = {"Content-Type": "application/json"}
ADDRESS = re.compile(r"http://[^:]+:(\d+)/v1")


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def pieces(self) -> list[Any]:
        """The events of a stream, without its end."""
        frames = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(frame) for frame in frames if frame != "[DONE]"]


@dataclass
class Served:
    """A running server; ``said`` are the lines of its stderr so far."""

    process: subprocess.Popen[str]
    said: list[str]
    port: int = 0

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> Reply:
        """Send a request and read all of the reply."""
        connection = self.sent(path, body, method, **headers)
        response = connection.getresponse()
        reply = Reply(response.status, dict(response.getheaders()), response.read().decode())
        connection.close()
        return reply

    def sent(self, path: str, body: Any = None, method: str = "", **headers: str) -> http.client.HTTPConnection:
        """Send a request; the reply is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("GET" if body is None else "POST"), path, raw, {**JSON, **named})
        return connection

    def chat(self, *said: str, **fields: Any) -> Reply:
        """Ask with messages that alternate between user and assistant."""
        return self.ask("/v1/chat/completions", {"messages": messages(*said), "temperature": 0, **fields})

    def client(self, key: str = "none", retries: int = 0) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=retries)

    def figure(self, name: str) -> float:
        lines = self.ask("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"kvchat:{name} "))


def messages(*said: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(said)]


@contextmanager
def serving(
    folder: Path, *flags: str, fake: bool = False, is_awaited: bool = True, **environment: str
) -> Iterator[Served]:
    """A server with its files in ``folder``, stopped with the block; ``is_awaited`` waits until it is ready."""
    program = [str(FAKE), "serve"] if fake else ["-m", "kvchat", "serve"]
    env = environ(KVCHAT_DATA_DIR=str(folder), KVCHAT_CONFIG=str(folder / "config.toml"), **environment)
    command = [sys.executable, *program, "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr
    served = Served(process, [])
    reading = threading.Thread(target=lambda: served.said.extend(process.stderr), daemon=True)
    reading.start()

    def output() -> str:
        return "".join(served.said)

    try:
        wait_until(lambda: ADDRESS.search(output()) or process.poll() is not None, output)
        if address := ADDRESS.search(output()):
            served.port = int(address[1])
        if is_awaited:
            wait_until(lambda: "Ready: " in output() or process.poll() is not None, output)
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            reading.join(PATIENCE_S)
            process.stderr.close()
