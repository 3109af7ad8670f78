"""A session with a server's model, which the engine process and ``kvchat ask`` use instead of a local session.

The server stores the K/V and decides which are read. Each answer sends the whole conversation; the server may have a
prefix of it in its cache. The connection runs in an event loop on its own thread, so that a stop can close it in any
state.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import httpx2
import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from kvchat.errors import INSTEAD, ContextFullError, EngineError, KvchatError, ModelError, UsageError
from kvchat.protocol.figures import Price, ServerFigures, Snapshot
from kvchat.protocol.messages import Details, Event, Load, Loaded, Noted, Sampling, Turn, Variant, parse_args
from kvchat.remote import servers
from kvchat.remote.answer import TAKING_VARIABLES, Answer, open_thought, request
from kvchat.remote.metrics import MetricsReader
from kvchat.remote.servers import Address, NotReadyError, Server
from kvchat.units import count

T = TypeVar("T")
MODE = "server"  # in place of a mode's name
POLL_S, READY_POLL_S, SAMPLE_S, CLOSE_S = 0.05, 0.5, 0.9, 1.0
STALE_S, FIRST_S = 3.0, 0.3  # if figures are older than the first, wait up to the second for new ones
CONNECT_S = 5.0
SILENCE_S = 3600.0  # a CPU may process a long prompt for half an hour without sending anything
TOO_LONG = "exceed_context_size_error"  # llama-server's and kvchat's
GARBAGE = (AttributeError, TypeError, ValueError, KeyError, RecursionError)
OVER: Final = object()
# Normal reasons to end; TGI, Together and others use the last four. Others are a filter, a tool call or a shutdown.
USUAL = ("stop", "length", "eos", "eos_token", "stop_sequence", "end")
NO_KEY = "none"  # because the openai library requires one
OF_OPENAI = ("OpenAI-Organization", "OpenAI-Project")  # the library sets them from variables meant for OpenAI
DECIDES = "The server decides how K/V are stored and read."


def open_session(load: Load, progress: Callable[[str], None] = lambda stage: None) -> RemoteSession:
    """Find the server and the model that ``load`` names; wait while the server loads its model.

    Raises:
        UsageError: it requires a key, or a setting needs a local model; ModelError: it has no such model; EngineError:
            nothing answers.
    """
    address = servers.parse(load.model)
    if load.chat_template:
        raise UsageError(
            "The server uses its own chat template.",
            f"Given: {load.chat_template}.",
            "/template KEY=VALUE sets its variables; to replace it, start llama-server with --chat-template.",
        )
    loop = Loop()
    try:
        http = servers.client(address)
        while True:
            progress(f"asking {address.root}")
            try:
                return RemoteSession(loop.run(servers.recognize(address, http)), load, loop, http)
            except NotReadyError as error:
                progress(f"waiting: {error.detail or error.title}")
                time.sleep(READY_POLL_S)
    except BaseException:
        loop.close()
        raise


class Loop:
    """An event loop on its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # needed if waiting was interrupted

    def begin(self, work: Coroutine[Any, Any, None], patience_s: float = 0.0) -> Callable[[], object]:
        """Start ``work`` and wait up to ``patience_s`` for its end; return a function that cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        with suppress(TimeoutError):
            future.result(patience_s)
        return future.cancel

    def close(self) -> None:
        """Cancel all work and end the thread."""
        if self._thread.is_alive():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
        if not self._loop.is_running():
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class RemoteSession:
    """Answers like ``kvchat.engine.session.Session``; methods that need a local model raise UsageError.

    Any thread may call ``cancel``.
    """

    withdrawable = 0
    token_ids: tuple[int, ...] = ()

    def __init__(self, server: Server, load: Load, loop: Loop, http: httpx2.AsyncClient) -> None:
        """
        Raises:
            ModelError: the server does not have the model that its address names.
        """
        self._server, self._address, self._loop, self._http = server, server.address, loop, http
        self._model = server.choose()
        parse_args(load.template_args)
        self._takes_variables = server.kind in TAKING_VARIABLES
        self._template_args = load.template_args
        self._openai = AsyncOpenAI(
            base_url=self._address.base,
            api_key=servers.key_of(self._address) or NO_KEY,
            http_client=http,
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
            default_headers=dict.fromkeys(OF_OPENAI, openai.Omit()),  # type: ignore[arg-type]  # removes them
        )
        self._reader = MetricsReader(server.kind, self._address, http)
        self._figures = ServerFigures(server.kind, self._address.place)
        self._sampled = float("-inf")
        self._answer = Answer(Sampling())
        self._frames: SimpleQueue[Any] = SimpleQueue()
        self._is_canceled = False

    # ---- talking

    def answer(
        self,
        turns: Sequence[Turn],
        sampling: Sampling,
        between: Callable[[int], None] | None = None,
        conversation: str | None = "",
        variant: Variant | None = None,
        template_args: Sequence[str] | None = None,
        json_schema: str = "",
        top_logprobs: int | None = None,
        must_call: Sequence[str] = (),
    ) -> Iterator[Event]:
        """Answer the last turn, or continue it: ``Started``, ``Prefilled``*, ``Text``*, then one ``Finished``.

        ``between`` is called between two frames and while waiting for one, with the number of tokens so far. A
        ``variant``, a ``json_schema``, ``must_call`` and ``top_logprobs`` need a local model.

        Raises:
            ContextFullError: the conversation is longer than the server's context; ModelError: the model is gone;
                UsageError: the key is rejected, or an argument needs a local model; EngineError: the server cannot be
                reached, disconnects or fails.
        """
        if variant or json_schema or must_call or top_logprobs is not None:
            raise self.refuse()
        if template_args is not None:
            self.set_template_args(template_args)
        self._is_canceled, self._frames = False, SimpleQueue()
        arguments = request(self._server.kind, self._model.id, turns, sampling, self._template_args)
        self._answer = Answer(sampling, open_thought(turns[-1]))
        return self._events(arguments, between or (lambda tokens: None))

    def _events(self, arguments: dict[str, Any], between: Callable[[int], None]) -> Iterator[Event]:
        frames, answer = self._frames, self._answer
        end = self._loop.begin(self._read(arguments, frames))
        try:
            while not self._is_canceled:
                try:
                    frame = frames.get(timeout=POLL_S)
                except Empty:
                    between(answer.tokens)
                    continue
                if frame is OVER or (answer.finish_reason and isinstance(frame, Exception)):
                    break  # the text is complete, even if the connection broke before the counts
                if isinstance(frame, Exception):
                    raise explained(frame, self._address, self._model.id, answer.is_started)
                try:
                    yield from answer.take(frame)
                except GARBAGE as error:
                    raise explained(error, self._address, self._model.id, answer.is_started) from error
                between(answer.tokens)
        finally:
            end()
        if not self._is_canceled and not answer.finish_reason:
            reason = "Its stream ended without a finish_reason."
            raise EngineError(f"{self._address.place} did not say that the answer is complete.", reason, RESUMED)
        if answer.finish_reason not in ("", *USUAL):
            yield Noted(f'The server ended the answer early: "{answer.finish_reason}".')
        yield from answer.finish(self._is_canceled)

    async def _read(self, arguments: dict[str, Any], frames: SimpleQueue[Any]) -> None:
        """Put the frames of an answer into ``frames``, then ``OVER`` or the error."""
        try:
            async with asyncio.timeout(SILENCE_S):  # otherwise the library retries twice after each silence
                stream = await self._openai.chat.completions.create(**arguments)
            async with stream:
                reply = stream.response
                # Some servers never stream, and some stream frames under this name.
                is_json = reply.headers.get("content-type", "").startswith("application/json")
                if is_json and (await reply.aread()).lstrip().startswith(b"{"):
                    frames.put(_whole(reply))
                async for frame in stream:
                    if not frame.choices:
                        _raise_error_in(frame.model_extra, reply)
                    frames.put(frame)
            frames.put(OVER)
        except Exception as error:  # noqa: BLE001  # raised again by ``_events``
            frames.put(error)

    def cancel(self) -> None:
        """End the answer and close its connection; without an answer do nothing."""
        self._is_canceled = True
        self._frames.put(OVER)  # wakes ``_events``

    def resume(self, conversation: str, turns: Sequence[Turn]) -> Iterator[Event]:
        """Do nothing: the server finds K/V by the conversation's beginning."""
        self._answer = Answer(Sampling())
        return iter(())

    def forget(self, conversation: str) -> None:
        """Do nothing: the server decides which K/V it keeps."""

    def set_template_args(self, args: Sequence[str]) -> str:
        """Set the variables of the server's chat template, ``KEY=VALUE``; return a message about it.

        Raises:
            UsageError: one is malformed, or the server accepts none.
        """
        parse_args(args)
        if args and not self._takes_variables:
            raise UsageError(f"{self._server.kind} accepts no chat template variables.", hint=INSTEAD)
        self._template_args = tuple(args)
        return f"From the next question on, the server's template gets: {', '.join(args) or 'nothing'}."

    # ---- methods that need a local model

    def refuse(self) -> UsageError:
        """Return the error of methods that need a local model."""
        return UsageError(DECIDES, self._server.offers, INSTEAD)

    def switch(self, *_: Any, **__: Any) -> Any:
        """
        Raises:
            UsageError: always.
        """
        raise self.refuse()

    keep_pages = rebuild = compare = hide_needle = text = switch

    # ---- information

    @property
    def info(self) -> Loaded:
        model, server = self._model, self._server
        others = len(server.models) - 1
        notes = [f"{server.kind} at {self._address.place}. {DECIDES} {server.offers}".rstrip()]
        if others > 0:
            notes.append(f"It has {count(others, 'more model')}: /model in a chat, or #NAME after the address.")
        if self._template_args and not self._takes_variables:
            unsent = ", ".join(self._template_args)
            notes.append(f"{server.kind} accepts no chat template variables: {unsent} is not sent.")
        return Loaded(
            model=model.id,
            architecture=server.kind,
            parameters=model.parameters,
            device=f"{server.kind} at {self._address.place}",
            dtype="",
            context=model.context,
            layers=0,
            kv_heads=0,
            page=0,
            kv_bytes_per_token=0,
            mode=MODE,
            params={},
            notes=tuple(notes),
            weights=model.weights,
            template_variables=model.template_variables,
            server=server.kind,
            offers=server.offers,
            takes_variables=self._takes_variables,
        )

    def snapshot(self) -> Snapshot:
        """Return the last answer's figures, and the server's own as last read by ``details``."""
        answer = self._answer
        total = answer.total
        figures = replace(
            self._figures,
            prompt_tokens=answer.prompt_tokens or None,
            reused_tokens=answer.reused_tokens if answer.prompt_tokens else None,
            prompt_tokens_per_s=answer.prompt_tokens_per_s,
        )
        return Snapshot(
            MODE,
            {},
            active=total,
            total=total,
            context=self._model.context,
            kv_device_bytes=0,
            kv_host_bytes=0,
            tokens_per_s=answer.recent_tokens_per_s,
            ttft_s=answer.ttft_s,
            server=figures,
        )

    def details(self) -> Details:
        """Return only the total; also read the server's figures for the next snapshot, once a second."""

        async def sample() -> None:
            self._figures = await self._reader.read()

        if (age := time.monotonic() - self._sampled) >= SAMPLE_S:
            self._sampled = time.monotonic()
            self._loop.begin(sample(), FIRST_S if age > STALE_S else 0.0)
        return Details(self._answer.total)

    def prices(self) -> tuple[Price, ...]:
        return ()

    def close(self) -> None:
        """Close the connection."""
        with suppress(TimeoutError):
            self._loop.run(asyncio.wait_for(self._http.aclose(), CLOSE_S))
        self._loop.close()


def _whole(reply: Any) -> ChatCompletionChunk:
    """Return the only frame of an answer that a server sends in one piece.

    Raises:
        openai.APIError: it is an error.
        ValueError, TypeError, KeyError, AttributeError: it is not an answer.
    """
    answer = reply.json()
    _raise_error_in(answer, reply)
    choices = [{**choice, "delta": choice["message"]} for choice in answer["choices"]]
    return ChatCompletionChunk.construct(**answer | {"choices": choices})


def _raise_error_in(body: Any, reply: Any) -> None:
    """Raise ``openai.APIError`` if ``body`` is an error. LM Studio sends errors with the status of an answer."""
    if servers.words_of(body):
        raise openai.APIError("", reply.request, body=body)


def explained(error: Exception, address: Address, model: str, has_begun: bool) -> KvchatError:
    """Return the error for a failure before or, if ``has_begun``, during the answer, with the server's message."""
    match error:
        case openai.APIStatusError():
            return _refused(error, address, model)
        case TimeoutError() | openai.APITimeoutError(__cause__=httpx2.ReadTimeout()):
            return EngineError(f"{address.place} has sent nothing for {SILENCE_S / 60:.0f} minutes.", hint=AGAIN)
        case openai.APIConnectionError() if not has_begun:
            return servers.unreachable(address, error.__cause__ if isinstance(error.__cause__, Exception) else error)
        case openai.APIError() if error.body:
            return EngineError(f"{address.place} ended the answer early.", servers.words_of(error.body), AGAIN)
        case openai.APIError() | httpx2.HTTPError():
            return broken_off(address, f"{str(error.__cause__ or error) or type(error).__name__}.")
    return EngineError(
        f"{address.place} sent an invalid answer.",
        f"{type(error).__name__}: {error}"[: servers.MAX_SAID],
        "Is it an OpenAI-compatible chat server?",
    )


RESUMED = "In a chat, /continue resumes the answer."
AGAIN = "Ask again when the server is back; in a chat, /continue resumes the interrupted answer."


def broken_off(address: Address, reason: str) -> EngineError:
    """Return the error for a connection that broke before the answer was complete."""
    return EngineError(f"The connection to {address.place} broke in the middle of the answer.", reason, AGAIN)


def _refused(error: openai.APIStatusError, address: Address, model: str) -> KvchatError:
    said = servers.words_of(error.body) or servers.said(error.response)
    body = error.body if isinstance(error.body, dict) else {}
    match error.status_code:
        case 401 | 403:
            return servers.key_refused(address, said)
        case 404:
            return ModelError(f"{address.place} has no {model}.", said, "/model lists its models.")
        case 400 | 413 | 422 if body.get("type") == TOO_LONG or "context length" in said:
            counts = [f"{body[name]:,} {what}" for name, what in COUNTS.items() if isinstance(body.get(name), int)]
            return ContextFullError(
                "The conversation is longer than the server's context.",
                " ".join(filter(None, (said, ", ".join(counts) and f"({', '.join(counts)})"))),
                "Shorten the question, start another conversation, or start the server with a larger context.",
            )
        case 429 | 503:
            return EngineError(f"{address.place} is busy.", said, "Ask again in a moment.")
    hint = "The server's log may say more."
    return EngineError(f"{address.place} refused the question: HTTP {error.status_code}.", said, hint)


COUNTS = {"n_prompt_tokens": "tokens asked", "n_ctx": "at most"}
