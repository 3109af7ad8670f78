"""The server's process: an address, the engine's child, and an end by Ctrl+C."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from kvchat.errors import UsageError
from kvchat.protocol.client import ENGINE
from kvchat.protocol.messages import Load
from kvchat.serve.app import application
from kvchat.serve.engine import Engine
from kvchat.serve.requests import Defaults

LOCAL = ("127.0.0.1", "localhost", "::1")
LAST_ANSWERS_S = 5  # what the end may wait for answers in progress


def serve(
    load: Load,
    defaults: Defaults,
    address: tuple[str, int],
    queue: int,
    key: str,
    origins: Sequence[str],
    log_file: Path,
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Answer requests at ``address`` until a signal ends it; ``queue`` may wait. ``show`` and ``say`` as ``Engine``.

    Raises:
        UsageError: the address cannot be used; EngineError: the model cannot be loaded.
    """
    listening = _listen(*address)
    engine = Engine(load, log_file, queue, show, say, ENGINE)
    is_local = address[0] in LOCAL
    app = application(engine, defaults, key, is_local, origins)
    host, port = listening.getsockname()[:2]
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1 · Ctrl+C stops it")
    if not (is_local or key):
        say("Anyone who can reach this address can use it: require a key with --api-key KEY or KVCHAT_API_KEY.")
    quiet = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=LAST_ANSWERS_S,
        server_header=False,
    )
    asyncio.run(_serve(engine, quiet, listening))


async def _serve(engine: Engine, config: uvicorn.Config, listening: socket.socket) -> None:
    server = Server(config, engine)
    working, serving = asyncio.create_task(engine.run()), asyncio.create_task(server.serve([listening]))
    try:
        await asyncio.wait((working, serving), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        if working.done():
            await working
    finally:
        working.cancel()
        await engine.close()


class Server(uvicorn.Server):
    """Ends by SIGINT or SIGTERM, the answer in progress with it; a second SIGINT does not wait."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals, and raise them no more at the end: they were obeyed."""
        taken = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in taken}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._engine.close_door)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{host}:{port} cannot be used.", f"{why}.", "Use another: --port 0 picks a free one."
        ) from None
