"""The server process: listens, runs the engine in a child process and ends on Ctrl+C."""

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
LAST_ANSWERS_S = 5  # the longest that a shutdown waits for answers in progress


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
    """Answer requests at ``address`` until a signal; at most ``queue`` wait. ``show`` and ``say`` are as in ``Engine``.

    Raises:
        UsageError: the address cannot be used; EngineError: the model cannot be loaded.
    """
    listener = _listen(*address)
    engine = Engine(load, log_file, queue, show, say, ENGINE)
    is_local = address[0] in LOCAL
    app = application(engine, defaults, key, is_local, origins)
    host, port = listener.getsockname()[:2]
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1 · Ctrl+C stops it")
    if not (is_local or key):
        say("Anyone who can reach this address can use it: require a key with --api-key KEY or KVCHAT_API_KEY.")
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=LAST_ANSWERS_S,
        server_header=False,
    )
    asyncio.run(_serve(engine, config, listener))


async def _serve(engine: Engine, config: uvicorn.Config, listener: socket.socket) -> None:
    server = Server(config, engine)
    working, serving = asyncio.create_task(engine.run()), asyncio.create_task(server.serve([listener]))
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
    """Ends on SIGINT or SIGTERM and stops the answer in progress; a second SIGINT ends it without waiting."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; unlike uvicorn's own handler, do not raise them again at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._engine.begin_shutdown)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{host}:{port} cannot be used.", f"{why}.", "Use another: --port 0 picks a free one."
        ) from None
