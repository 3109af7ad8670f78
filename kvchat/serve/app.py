"""The server's routes, access control and Prometheus metrics."""

from __future__ import annotations

import asyncio
import codecs
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
from kvchat.serve.requests import AnswerRequest, ChatRequest, Defaults, TextRequest, TokenizeRequest
from kvchat.units import size

PING_S = 10.0  # some clients and proxies give up on a silent connection
PING = ": ping\n\n"
MAX_BODY_BYTES = 2**24
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN = ("/health",)  # routes that need no key
B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Guard:
    """Requires the ``key``; without a key, an ``is_local`` server requires a ``Host`` that is a name of this machine.

    A web page can send requests to a server on its visitor's machine, and read the responses through a host name of
    its own that resolves there. Bodies must also be declared as JSON, which browsers allow no page without permission.
    """

    app: ASGIApp
    key: str
    is_local: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refusal.response() if refusal else self.app)(scope, receive, send)

    def _refusal(self, request: Request) -> Refusal | None:
        named = request.headers.get("host", "").lower()
        host = named.rpartition(":")[0] or named
        if request.url.path not in OPEN and self.key:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            matches = hmac.compare_digest(key.encode("latin-1"), self.key.encode())  # latin-1 restores the bytes sent
            if scheme.lower() != "bearer" or not matches:
                message = "The API key is missing or wrong: send it as Authorization: Bearer KEY."
                return Refusal(401, message, "authentication_error", code="invalid_api_key")
        elif self.is_local and not self.key and host not in LOOPBACK:
            message = f"Without --api-key only {', '.join(LOOPBACK)} are served, not the host {host[:100]}."
            return Refusal(403, message, "permission_error", code="unknown_host")
        kind = request.headers.get("content-type", "").lower()
        if request.method == "POST" and not kind.startswith("application/json"):
            return invalid("The body must be JSON: send Content-Type: application/json.", status=415)
        return None


class Metrics:
    """Metrics since the server was started, in Prometheus' format; most names are llama-server's."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "answers by finish reason", ["reason"])
        self._prompt = self._counter("prompt_tokens", "prompt tokens processed")
        self._cached = self._counter("prompt_tokens_cached", "prompt tokens reused from stored K/V")
        self._prompt_s = self._counter("prompt_seconds", "time spent processing prompts")
        self._generated = self._counter("tokens_predicted", "tokens generated")
        self._generated_s = self._counter("tokens_predicted_seconds", "time spent generating")
        self._recalled = self._counter("recalled_bytes", "K/V copied to the device by modes")
        self._first = Histogram("kvchat:time_to_first_token_seconds", "from the turn's start", registry=self._registry)
        self._gauge("requests_processing", "answers in progress", lambda: engine.working)
        self._gauge("requests_deferred", "requests waiting", lambda: engine.waiting)
        self._gauge("engine_restarts", "restarts of the engine after a crash", lambda: engine.restarts)
        gauges = {
            "kv_tokens": ("tokens stored of the current conversation", "total"),
            "kv_tokens_read": ("tokens that the last token attended to, mean over heads", "active"),
            "kv_device_bytes": ("K/V on the device", "kv_device_bytes"),
            "kv_host_bytes": ("K/V in the host pool", "kv_host_bytes"),
            "kv_parked_bytes": ("K/V of other conversations in RAM", "kv_parked_bytes"),
            "coverage": ("share of full attention on the tokens read, in the last answer", "coverage"),
            "process_bytes": ("memory of the engine's process", "process_bytes"),
        }
        for name, (about, field) in gauges.items():
            self._gauge(name, about, lambda f=field: getattr(engine.snapshot, f, None) or 0)  # type: ignore[misc]

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
        self._generated.inc(times["predicted_n"])
        self._generated_s.inc(times["predicted_ms"] / 1000)
        self._recalled.inc(stats.recalled_bytes)
        if stats.ttft_s is not None:
            self._first.observe(stats.ttft_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Service:
    def __init__(self, engine: Engine, defaults: Defaults) -> None:
        self._engine = engine
        self._defaults = defaults
        self._metrics = Metrics(engine)
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Return all routes, those of OpenAI's API with and without /v1, because clients differ."""
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
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, await parsed(request, ChatRequest), is_chat=True)

    async def complete(self, request: Request) -> Response:
        """Continue a text without the chat template."""
        return await self._answer(request, await parsed(request, TextRequest), is_chat=False)

    async def input_tokens(self, request: Request) -> Response:
        body = await parsed(request, ChatRequest)
        self._check_model(body.model)
        args = body.template_args(self._engine.load, self._loaded())
        ids = await self._token_ids(request, Tokenize(body.turns(self._defaults), args))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text, or of messages rendered by the chat template."""
        body = await parsed(request, TokenizeRequest)
        ids = await self._token_ids(request, Tokenize(body.turns(self._defaults), self._engine.load.template_args))
        return JSONResponse({"tokens": ids, "count": len(ids), "n_ctx": self._loaded().context})

    def _loaded(self) -> Loaded:
        if self._engine.loaded is None:
            raise unavailable("The model is being loaded.")
        return self._engine.loaded

    def _model(self) -> dict[str, Any]:
        loaded, snapshot = self._loaded(), self._engine.snapshot
        # With these, Open WebUI decides whether to add dozens of tools and images to a chat and to request the usage.
        capabilities = {"builtin_tools": bool(loaded.calls), "vision": False, "usage": True}
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
            "info": {"meta": {"capabilities": capabilities}},
        }

    def _check_model(self, name: str | None) -> None:
        loaded = self._loaded().model
        if name and name not in (loaded, self._engine.load.model):
            message = f'There is no model "{name[:100]}" here, only "{loaded}".'
            raise Refusal(404, message, "invalid_request_error", "model", "model_not_found")

    async def _token_ids(self, request: Request, command: Tokenize) -> Sequence[int]:
        async with self._submitted(request, command, can_wait=True) as job:
            ended = await job.events.get()
        assert isinstance(ended, Ended)
        if ended.refusal:
            raise ended.refusal
        assert isinstance(ended.last, Tokenized)
        return ended.last.ids

    async def _answer(self, request: Request, body: AnswerRequest, is_chat: bool) -> Response:
        loaded = self._loaded()
        self._check_model(body.model)
        command = Chat(
            body.turns(self._defaults),
            body.sampling(self._defaults, loaded.context),
            conversation=None,
            variant=body.kvchat.variant(self._engine.load.mode),
            template_args=body.template_args(self._engine.load, loaded),
            is_final=True,
            json_schema=body.json_schema(),
            top_logprobs=body.num_scored(),
            must_call=body.must_call(),
        )
        tools = body.offered_tools()
        # Importing the parser takes a second.
        calls = await asyncio.to_thread(Calls, loaded.calls, tools, body.calls_once) if tools else None
        answer = Answer(loaded.model, is_chat, body.streams_usage, calls)
        async with self._submitted(request, command, can_wait=not body.stream) as job:
            event: Any = None
            stream_at = time.monotonic() + PING_S  # before that, a refusal can still set its own HTTP status
            while not (body.stream and (isinstance(event, Started) or time.monotonic() >= stream_at)):
                event = await (_next(job, stream_at - time.monotonic()) if body.stream else job.events.get())
                if isinstance(event, Ended):
                    return JSONResponse(answer.whole(*self._noted(event)))
                if isinstance(event, Again):
                    answer = Answer(loaded.model, is_chat, body.streams_usage, calls)
                elif event:
                    answer.feed(event)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        leave = BackgroundTask(self._abandon, job)  # a client may disconnect before the first piece
        pieces = self._pieces(job, answer, is_waiting=not isinstance(event, Started))
        return StreamingResponse(pieces, 200, headers, "text/event-stream", leave)

    async def _abandon(self, job: Job) -> None:
        self._engine.abandon(job)

    async def _pieces(self, job: Job, answer: Answer, is_waiting: bool) -> AsyncIterator[str]:
        """Yield the stream of an answer, which may still be ``is_waiting`` for its turn; it ends the job."""
        try:
            if is_waiting:
                yield PING
            for piece in answer.begin():
                yield framed(piece)
            sent_at = time.monotonic()
            while True:
                event = await _next(job, sent_at + PING_S - time.monotonic())
                if isinstance(event, Ended):
                    for piece in answer.end(*self._noted(event)):
                        yield framed(piece)
                    yield "data: [DONE]\n\n"
                    return
                if event:
                    answer.feed(event)
                    for piece in answer.more():
                        yield framed(piece)
                        sent_at = time.monotonic()
                if time.monotonic() - sent_at >= PING_S:
                    yield PING
                    sent_at = time.monotonic()
        except Refusal as refusal:
            yield framed(refusal.body)
        finally:
            self._engine.abandon(job)

    def _noted(self, ended: Ended) -> tuple[Finished, Any]:
        if ended.refusal:
            raise ended.refusal
        assert isinstance(ended.last, Finished)
        self._metrics.note(ended.last)
        return ended.last, ended.snapshot

    @asynccontextmanager
    async def _submitted(self, request: Request, command: Chat | Tokenize, can_wait: bool) -> AsyncIterator[Job]:
        """Submit a job; abandon it if the client disconnects during the block, or the block fails."""
        job = self._engine.submit(command, can_wait)
        disconnect = asyncio.create_task(_disconnected(request))
        disconnect.add_done_callback(lambda task: None if task.cancelled() else self._engine.abandon(job))
        try:
            yield job
        except BaseException:
            self._engine.abandon(job)
            raise
        finally:
            disconnect.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(job: Job, seconds: float) -> Any:
    """Return the next event, or None if none comes within ``seconds``."""
    try:
        return await asyncio.wait_for(job.events.get(), max(seconds, 0.01))
    except TimeoutError:
        return None


def framed(piece: dict[str, Any]) -> str:
    """Return an event of a stream, in ASCII, because many clients split lines at U+2028, U+2029 and U+0085."""
    return f"data: {json.dumps(piece)}\n\n"


async def parsed(request: Request, kind: type[B]) -> B:
    """Parse and validate the body of a request.

    Raises:
        Refusal: it is too long or invalid.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise invalid(f"The body is too long: at most {size(MAX_BODY_BYTES)} are accepted.", status=413)
    try:
        return kind.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise of_body(error) from None


def application(
    engine: Engine,
    defaults: Defaults,
    key: str = "",
    is_local: bool = True,
    origins: Sequence[str] = (),
) -> Starlette:
    """Return the server's application, which web pages of ``origins`` may use."""
    cors = Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    guard = Middleware(Guard, key=key, is_local=is_local)
    return Starlette(
        routes=Service(engine, defaults).routes(),
        middleware=[cors, guard] if origins else [guard],
        exception_handlers=dict.fromkeys((Refusal, HTTPException, ClientDisconnect, Exception), _refused),
    )


async def _refused(request: Request, error: Exception) -> Response:
    path = request.url.path[:100]
    match error:
        case Refusal():
            refusal = error
        case HTTPException(status_code=405):
            refusal = invalid(f"{path} does not accept {request.method}.", status=405)
        case HTTPException():
            message = f"There is no {path} here: chats are answered at /v1/chat/completions, texts at /v1/completions."
            refusal = Refusal(error.status_code, message, "not_found_error", code="not_found")
        case ClientDisconnect():
            refusal = unavailable("The client disconnected.")
        case _:
            refusal = Refusal(500, f"The server failed: {type(error).__name__}.", "server_error")
    return refusal.response()
