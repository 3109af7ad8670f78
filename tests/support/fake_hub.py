"""A local hub that implements as much of the Hugging Face hub's HTTP as its library needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 2**16


class FakeHub:
    """Serves ``folder`` as the repository ``name``, with ``pause`` seconds between two chunks.

    ``gated`` refuses its files, as the hub does for a model that requires an agreement. ``ranges`` are the bytes at
    which downloads of the weights began, ``weight_bytes`` the bytes requested of them in total.
    """

    def __init__(self, name: str, folder: Path, pause: float = 0.0, gated: bool = False) -> None:
        self.name, self.folder, self.pause, self.gated = name, folder, pause, gated
        self.ranges: list[int] = []
        self.weight_bytes = 0
        self.url = ""

    @contextmanager
    def serve(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.partition("?")[0]
        if f"/{self.name}" not in path:
            self._refuse(request, 404, "RepoNotFound")
        elif path.startswith(f"/api/models/{self.name}/tree/"):
            self._json(request, [self._described(file) for file in self._files()])
        elif path.startswith(f"/api/models/{self.name}"):
            self._json(request, self._info())
        elif self.gated:
            self._refuse(request, 403, "GatedRepo")
        elif found := re.fullmatch(rf"/{self.name}/resolve/\w+/(.+)", path):
            self._send_file(request, self.folder / found[1], body)
        else:
            self._refuse(request, 404, "EntryNotFound")

    def _files(self) -> list[Path]:
        return sorted(file for file in self.folder.rglob("*") if file.is_file())

    def _described(self, file: Path) -> dict[str, object]:
        oid = hashlib.sha1(file.name.encode()).hexdigest()
        return {"type": "file", "path": str(file.relative_to(self.folder)), "size": file.stat().st_size, "oid": oid}

    def _info(self) -> dict[str, object]:
        siblings = [
            {"rfilename": str(file.relative_to(self.folder)), "size": file.stat().st_size} for file in self._files()
        ]
        return {"_id": "1", "id": self.name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}

    def _json(self, request: BaseHTTPRequestHandler, content: object) -> None:
        data = json.dumps(content).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("X-Error-Message", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _send_file(self, request: BaseHTTPRequestHandler, file: Path, body: bool) -> None:
        data = file.read_bytes()
        asked = re.match(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        start, stop = (int(asked[1]), int(asked[2] or len(data)) + 1) if asked else (0, len(data))
        end = min(stop, len(data))
        if body and file.suffix == ".safetensors":
            self.ranges.append(start)
            self.weight_bytes += end - start
        request.send_response(206 if end - start < len(data) else 200)
        request.send_header("ETag", f'"{hashlib.sha1(file.name.encode()).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        if end - start < len(data):
            request.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        request.send_header("Content-Length", str(end - start))
        request.end_headers()
        with suppress(ConnectionError):  # the client is gone
            for at in range(start, end if body else start, CHUNK):
                request.wfile.write(data[at : min(at + CHUNK, end)])
                time.sleep(self.pause)
