"""A server of scripted frames, as documented for vLLM, SGLang, Ollama, LM Studio and transformers serve.

``FakeServer`` listens on a port of 127.0.0.1 while it is entered; ``routes`` are the replies to GET, a body or a status
and a body, ``frames`` what a chat streams. It records the requests.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvchat.errors import KvchatError
from kvchat.protocol.messages import Event, Sampling, Text, Turn
from kvchat.remote.session import RemoteSession

HI = (Turn("user", "Hi."),)
BREAK = object()  # among the frames: the connection breaks here
WAIT = object()  # sends nothing more until the client disconnects or the server stops
Body = Any


def delta(*, reason: str | None = None, **said: Any) -> dict[str, Any]:
    """A frame with a piece of an answer."""
    choice = {"index": 0, "delta": said, "finish_reason": reason}
    return {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """The last frame, with the token counts."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    counts["total_tokens"] = prompt + completion
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {
        "id": "chat-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
        "usage": counts,
    }


def models(*entries: dict[str, Any]) -> dict[str, Any]:
    """The reply of /v1/models."""
    return {"object": "list", "data": [{"object": "model", "created": 1, **entry} for entry in entries]}


HELLO = (
    delta(role="assistant", content=None),
    delta(content="Hel"),
    delta(content="lo."),
    delta(reason="stop"),
    usage(11, 2),
)
KINDS: dict[str, dict[str, Body]] = {
    "vLLM": {"/v1/models": models({"id": "Qwen/Qwen3-4B", "owned_by": "vllm", "max_model_len": 2048})},
    "SGLang": {
        "/v1/models": models({"id": "llama", "owned_by": "organization", "max_model_len": 8192}),
        "/model_info": {"model_path": "meta/llama"},
    },
    "Ollama": {
        "/v1/models": models({"id": "a:1b", "owned_by": "library"}, {"id": "b:2b", "owned_by": "library"}),
        "/api/version": {"version": "0.30.1"},
        "/api/ps": {"models": [{"name": "b:2b", "size": 5_000, "context_length": 4096}]},
    },
    "LM Studio": {
        "/v1/models": models({"id": "embed", "owned_by": "o"}, {"id": "gemma", "owned_by": "o"}),
        "/api/v0/models": {
            "data": [
                {"id": "embed", "type": "embeddings", "state": "loaded"},
                {"id": "gemma", "type": "llm", "state": "loaded", "quantization": "Q4_K_M",
                 "max_context_length": 32768, "loaded_context_length": 4096},
            ]
        },
    },
    "transformers serve": {"/v1/models": models({"id": "org/m", "owned_by": "org"}), "/health": {"status": "ok"}},
    "an OpenAI-compatible server": {"/v1/models": models({"id": "m", "owned_by": "me"})},
}  # fmt: skip
"""The routes by which each program is recognized."""


class FakeServer(ThreadingHTTPServer):
    """``frames`` are objects, raw lines, ``BREAK`` or ``WAIT``; a ``status`` other than 200 sends ``error``.

    A single body instead of a list of frames is an answer in one piece.
    """

    daemon_threads = True

    def __init__(self, kind: str = "vLLM", frames: Sequence[Any] | dict[str, Any] = HELLO) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.routes: dict[str, Body] = dict(KINDS[kind])
        self.frames = frames
        self.media_type = "text/event-stream"
        self.status, self.error = 200, {}
        self.key = self.location = ""
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.seen: list[str] = []
        self.left = threading.Event()  # the client disconnected during WAIT
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ends.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.server.seen.append(self.path)
        if self._is_known():
            found = self.server.routes.get(self.path, (404, {"error": {"message": "Not Found", "code": 404}}))
            status, body = found if isinstance(found, tuple) else (200, found)
            self._reply(status, body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self.server.headers.append(dict(self.headers))
        if not self._is_known():
            return
        if self.server.status != 200:
            self._reply(self.server.status, self.server.error)
            return
        if isinstance(self.server.frames, dict):
            self._reply(200, self.server.frames)
            return
        if self.server.frames[0] is WAIT:  # llama-server sends its headers with the first frame
            self._wait()
            return
        self.send_response(200)
        self.send_header("Content-Type", self.server.media_type)
        self.end_headers()
        for frame in self.server.frames:
            if frame is BREAK:
                self.connection.close()
                return
            if frame is WAIT:
                self._wait()
                return
            line = frame if isinstance(frame, str) else f"data: {json.dumps(frame)}\n\n"
            self.wfile.write(line.encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _wait(self) -> None:
        """Wait until the client disconnects (reading then returns nothing) or the server stops."""
        self.connection.settimeout(0.01)
        while not self.server.ends.is_set():
            try:
                if not self.connection.recv(1):
                    self.server.left.set()
                    return
            except TimeoutError:
                continue

    def _is_known(self) -> bool:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._reply(401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})
            return False
        return True

    def _reply(self, status: int, body: Body) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(text.encode())


def events_of(session: RemoteSession, turns: Sequence[Turn] = HI, sampling: Sampling = Sampling()) -> list[Event]:
    """All events of an answer."""
    return list(session.answer(turns, sampling))


def interrupted(events: Iterator[Event], meanwhile: Callable[[], object] = lambda: None) -> tuple[str, KvchatError]:
    """The text of an answer that breaks off, and the error; ``meanwhile`` is called after each piece of text."""
    text = ""
    try:
        for event in events:
            if isinstance(event, Text):
                text += event.text
                meanwhile()
    except KvchatError as error:
        return text, error
    raise AssertionError("the answer did not break off")


def text_of(events: Sequence[Event]) -> str:
    """The text of an answer."""
    return "".join(event.text for event in events if isinstance(event, Text))
