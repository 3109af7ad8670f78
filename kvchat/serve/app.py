"""The routes of the server, who is let in, and its figures for Prometheus."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvchat.protocol.messages import Chat, Finished, Loaded, Started, Tokenize, Tokenized
from kvchat.serve.answers import Answer, Calls, timings
from kvchat.serve.engine import Again, Ended, Engine, Job
from kvchat.serve.refusals import Refusal, invalid, of_body, unavailable
from kvchat.serve.requests import Asked, ChatRequest, Defaults, TextRequest, TokenizeRequest
from kvchat.units import size

PING_S = 10.0  # without a byte some clients and proxies give up
PING = ": ping\n\n"
MAX_BODY_BYTES = 2**24
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN = ("/health",)  # also without the key
B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Guard:
    """Lets in who has the ``key``, and without one only who asks for a name of this machine, if ``is_local``.

    A web page can send to a server on the person's own machine, and by a name of its own that leads there read what
    comes back. So bodies have to be declared as JSON, which a page may not do unasked.
    """

    app: ASGIApp
    key: str
    is_local: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refusal.response() if refusal else self.app)(scope, receive, send)

    def _refusal(self, request: Request) -> Refusal | None:
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if request.url.path not in OPEN and self.key:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            known = hmac.compare_digest(given.encode("latin-1"), self.key.encode())  # as it came, byte by byte
            if scheme.lower() != "bearer" or not known:
                message = "The API key is missing or wrong: send it as Authorization: Bearer KEY."
                return Refusal(401, message, "authentication_error", code="invalid_api_key")
        elif self.is_local and not self.key and host not in LOOPBACK:
            message = f"Without --api-key only {', '.join(LOOPBACK)} are served, not the host {host[:100]}."
            return Refusal(403, message, "permission_error", code="unknown_host")
        if request.method == "POST" and not request.headers.get("content-type", "").startswith("application/json"):
            return invalid("The body must be JSON: send Content-Type: application/json.", status=415)
        return None


class Figures:
    """What happened since the server was started, in Prometheus' form; names are like llama-server's."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "answers by reason of ending", ["reason"])
        self._prompt = self._counter("prompt_tokens", "prompt tokens processed")
        self._cached = self._counter("prompt_tokens_cached", "prompt tokens reused from stored K/V")
        self._prompt_s = self._counter("prompt_seconds", "time spent processing prompts")
        self._drawn = self._counter("tokens_predicted", "tokens generated")
        self._drawn_s = self._counter("tokens_predicted_seconds", "time spent generating")
        self._recalled = self._counter("recalled_bytes", "K/V copied to the device by modes")
        self._first = Histogram("kvchat:time_to_first_token_seconds", "from the turn's start", registry=self._registry)
        self._gauge("requests_processing", "answers in progress", lambda: engine.working)
        self._gauge("requests_deferred", "requests waiting", lambda: engine.waiting)
        self._gauge("engine_restarts", "restarts of the engine after a crash", lambda: engine.restarts)
        shown = {
            "kv_tokens": ("tokens stored of the current conversation", "total"),
            "kv_tokens_read": ("tokens that the last token attended to, mean over heads", "active"),
            "kv_device_bytes": ("K/V on the device", "kv_device_bytes"),
            "kv_host_bytes": ("K/V in the host pool", "kv_host_bytes"),
            "kv_parked_bytes": ("K/V of other conversations in RAM", "kv_parked_bytes"),
            "coverage": ("share of full attention on the tokens read, in the last answer", "coverage"),
            "process_bytes": ("memory of the engine's process", "process_bytes"),
        }
        for name, (about, of) in shown.items():
            self._gauge(name, about, lambda of=of: getattr(engine.snapshot, of, None) or 0)  # type: ignore[misc]

    def _counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"kvchat:{name}", about, labels, registry=self._registry)

    def _gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        Gauge(f"kvchat:{name}", about, registry=self._registry).set_function(value)

    def note(self, finished: Finished) -> None:
        stats, times = finished.stats, timings(finished.stats)
        self._requests.labels(finished.reason).inc()
        self._cached.inc(times["cache_n"])
        self._prompt.inc(times["prompt_n"])
        self._prompt_s.inc(times["prompt_ms"] / 1000)
        self._drawn.inc(times["predicted_n"])
        self._drawn_s.inc(times["predicted_ms"] / 1000)
        self._recalled.inc(stats.recalled_bytes)
        if stats.ttft_s is not None:
            self._first.observe(stats.ttft_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Service:
    """The routes."""

    def __init__(self, engine: Engine, defaults: Defaults) -> None:
        self._engine = engine
        self._defaults = defaults
        self._figures = Figures(engine)
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """All of them; clients differ in whether they write /v1."""
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/tokenize", self.tokenize, methods=["POST"]),
        ]
        for base in ("/v1", ""):
            routes += [
                Route(f"{base}/models", self.models),
                Route(f"{base}/models/{{id:path}}", self.model),
                Route(f"{base}/chat/completions", self.chat, methods=["POST"]),
                Route(f"{base}/chat/completions/input_tokens", self.input_tokens, methods=["POST"]),
                Route(f"{base}/completions", self.complete, methods=["POST"]),
            ]
        return routes

    async def health(self, _: Request) -> Response:
        self._loaded()
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(self._figures.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, await parsed(request, ChatRequest), is_chat=True)

    async def complete(self, request: Request) -> Response:
        """Go on with a text as it is."""
        return await self._answer(request, await parsed(request, TextRequest), is_chat=False)

    async def input_tokens(self, request: Request) -> Response:
        asked = await parsed(request, ChatRequest)
        self._check_model(asked.model)
        args = asked.template_args(self._engine.load, self._loaded())
        told = await self._tokenized(request, Tokenize(asked.turns(self._defaults), args))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(told.ids)})

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, or of messages, as the model is given them."""
        asked = await parsed(request, TokenizeRequest)
        command = Tokenize(asked.turns(self._defaults), self._engine.load.template_args)
        told = await self._tokenized(request, command)
        return JSONResponse({"tokens": told.ids, "count": len(told.ids), "n_ctx": self._loaded().context})

    def _loaded(self) -> Loaded:
        if self._engine.loaded is None:
            raise unavailable("The model is being loaded.")
        return self._engine.loaded

    def _model(self) -> dict[str, Any]:
        loaded, snapshot = self._loaded(), self._engine.snapshot
        # Open WebUI looks here before it adds dozens of tools and pictures to a chat, and asks for the usage
        offered = {"builtin_tools": bool(loaded.calls), "vision": False, "usage": True}
        return {
            "id": loaded.model,
            "object": "model",
            "created": self._created,
            "owned_by": "kvchat",
            "meta": {
                "n_ctx": loaded.context,
                "n_ctx_train": loaded.context,
                "n_params": loaded.parameters,
                "size": snapshot.weight_bytes if snapshot else None,
            },
            "kvchat": {"mode": loaded.mode, "params": loaded.params, "template_variables": loaded.template_variables},
            "info": {"meta": {"capabilities": offered}},
        }

    def _check_model(self, name: str | None) -> None:
        known = self._loaded().model
        if name is not None and name not in (known, self._engine.load.model):
            message = f'There is no model "{name[:100]}" here, only "{known}".'
            raise Refusal(404, message, "invalid_request_error", "model", "model_not_found")

    async def _tokenized(self, request: Request, command: Tokenize) -> Tokenized:
        async with self._submitted(request, command, can_wait=True) as job:
            ended = await job.events.get()
        assert isinstance(ended, Ended)
        if ended.refusal:
            raise ended.refusal
        assert isinstance(ended.last, Tokenized)
        return ended.last

    async def _answer(self, request: Request, asked: Asked, is_chat: bool) -> Response:
        loaded = self._loaded()
        self._check_model(asked.model)
        command = Chat(
            asked.turns(self._defaults),
            asked.sampling(self._defaults, loaded.context),
            conversation=None,
            variant=asked.kvchat.variant(self._engine.load.mode),
            template_args=asked.template_args(self._engine.load, loaded),
            is_final=True,
            json_schema=asked.json_schema(),
            top_logprobs=asked.scored(),
        )
        tools = asked.called_tools()  # the parser is imported, which takes a second
        calls = await asyncio.to_thread(Calls, loaded.calls, tools) if tools else None
        answer = Answer(loaded.model, is_chat, asked.streams_usage, calls)
        async with self._submitted(request, command, can_wait=not asked.stream) as job:
            event: Any = None
            begins = time.monotonic() + PING_S  # what is refused until then has a status of its own
            while not (asked.stream and (isinstance(event, Started) or time.monotonic() >= begins)):
                event = await (_next(job, begins - time.monotonic()) if asked.stream else job.events.get())
                if isinstance(event, Ended):
                    return JSONResponse(answer.whole(*self._noted(event)))
                if isinstance(event, Again):
                    answer = Answer(loaded.model, is_chat, asked.streams_usage, calls)
                elif event:
                    answer.feed(event)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        left = BackgroundTask(self._leave, job)  # a client may be gone before the first piece
        pieces = self._pieces(job, answer, is_waiting=not isinstance(event, Started))
        return StreamingResponse(pieces, 200, headers, "text/event-stream", left)

    async def _leave(self, job: Job) -> None:
        self._engine.leave(job)

    async def _pieces(self, job: Job, answer: Answer, is_waiting: bool) -> AsyncIterator[str]:
        """The stream of an answer, which may be ``is_waiting`` for its turn; it ends when the client leaves."""
        try:
            if is_waiting:
                yield PING
            for piece in answer.begin():
                yield framed(piece)
            sent = time.monotonic()
            while True:
                event = await _next(job, sent + PING_S - time.monotonic())
                if isinstance(event, Ended):
                    for piece in answer.end(*self._noted(event)):
                        yield framed(piece)
                    yield "data: [DONE]\n\n"
                    return
                if event:
                    answer.feed(event)
                    for piece in answer.more():
                        yield framed(piece)
                        sent = time.monotonic()
                if time.monotonic() - sent >= PING_S:
                    yield PING
                    sent = time.monotonic()
        except Refusal as refusal:
            yield framed(refusal.body)
        finally:
            self._engine.leave(job)

    def _noted(self, ended: Ended) -> tuple[Finished, Any]:
        if ended.refusal:
            raise ended.refusal
        assert isinstance(ended.last, Finished)
        self._figures.note(ended.last)
        return ended.last, ended.snapshot

    @asynccontextmanager
    async def _submitted(self, request: Request, command: Chat | Tokenize, can_wait: bool) -> AsyncIterator[Job]:
        """A job that is given up when the client leaves during the block, or the block fails."""
        job = self._engine.submit(command, can_wait)
        left = asyncio.create_task(_left(request))
        left.add_done_callback(lambda task: None if task.cancelled() else self._engine.leave(job))
        try:
            yield job
        except BaseException:
            self._engine.leave(job)
            raise
        finally:
            left.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(job: Job, seconds: float) -> Any:
    """The next event, None after so many seconds."""
    try:
        return await asyncio.wait_for(job.events.get(), max(seconds, 0.01))
    except TimeoutError:
        return None


def framed(piece: dict[str, Any]) -> str:
    return f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"


async def parsed(request: Request, kind: type[B]) -> B:
    """The body of a request.

    Raises:
        Refusal: it is too long, or not of this kind.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise invalid(f"The body is too long: at most {size(MAX_BODY_BYTES)} are accepted.", status=413)
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise of_body(error) from None


def application(
    engine: Engine,
    defaults: Defaults,
    key: str = "",
    is_local: bool = True,
    origins: Sequence[str] = (),
) -> Starlette:
    """The server's application; web pages of ``origins`` may ask it."""
    cors = Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    guard = Middleware(Guard, key=key, is_local=is_local)
    handlers: dict[Any, Any] = {
        Refusal: _refused,
        HTTPException: _no_route,
        ClientDisconnect: _gone,
        Exception: _failed,
    }
    return Starlette(
        routes=Service(engine, defaults).routes(),
        middleware=[cors, guard] if origins else [guard],
        exception_handlers=handlers,
    )


async def _refused(_: Request, refusal: Refusal) -> Response:
    return refusal.response()


async def _no_route(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:100]
    if error.status_code == 405:
        return invalid(f"{path} does not accept {request.method}.", status=405).response()
    message = f"There is no {path} here: chats are answered at /v1/chat/completions, texts at /v1/completions."
    return Refusal(error.status_code, message, "not_found_error", code="not_found").response()


async def _gone(_: Request, __: ClientDisconnect) -> Response:
    return unavailable("The client disconnected.").response()


async def _failed(_: Request, error: Exception) -> Response:
    return Refusal(500, f"The server failed: {type(error).__name__}.", "server_error").response()
