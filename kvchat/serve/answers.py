"""Turns the engine's events into response bodies, whole or streamed."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from kvchat import thoughts
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.protocol.messages import AnswerEvent, Finished, Resumed, Score, Started, Text

REASONS = {"eos": "stop", "stop": "stop", "stopped": "stop", "length": "length", "context": "length"}
CALLS, CONTENT = "tool_calls", "content"  # fields of a message, and of transformers' response template
Json = dict[str, Any]


class Calls:
    """Separates calls of ``tools`` from the text around them, using transformers' parser with the template ``form``.

    The parser gets one character at a time, so that a streamed answer has the same text and calls as a whole one. With
    ``once``, calls after the first are left out, as in vLLM, because the model decides how many it writes.
    """

    def __init__(self, form: str, tools: Sequence[Json], once: bool = False) -> None:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        fields = json.loads(form)
        # The thought has already been split off; the parser would drop a later one.
        fields["fields"] = {name: field for name, field in fields["fields"].items() if name in (CALLS, CONTENT)}
        template: Any = load_response_template(fields)
        self._parser: Any = ResponseParser(template, prefix="", tools=tools)
        self._close = template.fields[CALLS].close_re
        self._once, self._is_broken = once, False
        self._open = ""  # text of an incomplete call
        self.found = 0

    def feed(self, text: str, is_last: bool) -> Iterator[Json]:
        """Split the next ``text`` of an answer into fields of a message; a malformed call stays text."""
        content = ""
        for part in (*chain.from_iterable(map(self._feed_character, text)), *(self._finish() if is_last else ())):
            if CONTENT in part:
                content += part[CONTENT]
                continue
            if content:
                yield {CONTENT: content}
            content = ""
            yield part
        if content:
            yield {CONTENT: content}

    def _feed_character(self, character: str) -> Iterator[Json]:
        self._open += character
        yield from self._parsed(lambda: self._parser.feed(character))

    def _finish(self) -> Iterator[Json]:
        yield from self._parsed(lambda: self._parser.finalize()[1])

    def _parsed(self, parse: Callable[[], list[Json]]) -> Iterator[Json]:
        try:
            events = [] if self._is_broken else parse()
        except ValueError:  # not JSON: everything from here on is text
            events, self._is_broken = [], True
        for event in events:
            if event["type"] == "region_chunk" and event["field"] == CONTENT:
                self._open = self._open.removeprefix(event["text"])
                yield {CONTENT: event["text"]}
            elif event["type"] == "region_close" and event["field"] == CALLS:
                closed = self._close and self._close.search(self._open)
                if self._close and not closed:  # the call was cut off, so arguments may be missing
                    self._is_broken = True
                    break
                self._open = self._open[closed.end() :] if closed else ""
                calls = event["value"] if isinstance(event["value"], list) else [event["value"]]
                for call in calls:
                    yield from self._call(call.get("function"))
        if self._is_broken:
            content, self._open = self._open, ""
            yield {CONTENT: content}

    def _call(self, function: Any) -> Iterator[Json]:
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            yield {CONTENT: json.dumps(function, ensure_ascii=False)}
            return
        if self._once and self.found:
            return
        arguments = function.get("arguments", {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call = {"name": function["name"], "arguments": written}
        number, self.found = self.found, self.found + 1
        id = secrets.token_hex(5)[:9]  # templates of Mistral take no other length
        yield {CALLS: [{"index": number, "id": id, "type": "function", "function": call}]}


class Answer:
    """The response for one answer, built from its events; a chat's has separate fields for the thought and ``calls``.

    ``whole`` returns it in one piece; ``begin``, ``more`` and ``end`` yield it in pieces.
    """

    def __init__(self, model: str, is_chat: bool, streams_usage: bool = False, calls: Calls | None = None) -> None:
        self._is_chat = is_chat
        self._streams_usage = streams_usage
        self._calls = calls
        kind = "chat.completion" if is_chat else "text_completion"
        self._head: Json = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._text = self._end = ""
        self._tags: tuple[str, ...] = ()
        self._thought = self._said = ""  # the parts already sent
        self._scores: list[Score] = []  # not sent yet
        self._offset = 0  # characters before the next score's token
        self._resumed: Resumed | None = None

    def feed(self, event: AnswerEvent | Resumed) -> None:
        match event:
            case Started(thought=end, tags=tags):
                self._end, self._tags = end, tags
            case Text(text, scores=scores):
                self._text += text
                self._scores += scores
                if not self._end and (tag := thoughts.begun_with(self._text, self._tags)):
                    self._end = thoughts.end_of(tag)
            case Resumed():
                self._resumed = event

    def whole(self, finished: Finished, snapshot: Snapshot | None) -> Json:
        thought, said = self._split(finished.text, finished.reason)
        choice: Json = {"index": 0, "logprobs": self._logprobs()}
        if self._is_chat:
            more: Json = {"reasoning_content": thought} if thought else {}
            parts = [*self._parts(said, is_last=True)]
            text: str | None = "".join(part.get(CONTENT, "") for part in parts)
            if calls := [call for part in parts for call in part.get(CALLS, ())]:
                more[CALLS] = [{name: call[name] for name in call if name != "index"} for call in calls]
                text = text or None
            choice["message"] = {"role": "assistant", CONTENT: text, **more}
        else:
            choice["text"] = said
        choice["finish_reason"] = self._reason(finished)
        return {**self._head, "choices": [choice], "usage": usage(finished.stats), **self._figures(finished, snapshot)}

    def begin(self) -> Iterator[Json]:
        """Yield the first piece of a chat: the role."""
        if self._is_chat:
            yield self._piece({"role": "assistant", CONTENT: ""})

    def more(self) -> Iterator[Json]:
        """Yield the text since the last piece."""
        thought, said = self._split(self._text, None)
        if thought and not said:  # hold back characters that may begin the tag that ends it
            held = next((n for n in range(len(self._end) - 1, 0, -1) if thought.endswith(self._end[:n])), 0)
            thought = thought[: len(thought) - held].rstrip()
        yield from self._since(thought, said)

    def _parts(self, said: str, is_last: bool) -> Iterator[Json]:
        """Yield ``said`` as fields of a message, with calls separate from text."""
        if self._calls:
            yield from self._calls.feed(said, is_last)
        elif said:
            yield {CONTENT: said}

    def _reason(self, finished: Finished) -> str:
        reason = REASONS[finished.reason]
        return CALLS if self._calls and self._calls.found and reason == "stop" else reason

    def end(self, finished: Finished, snapshot: Snapshot | None) -> Iterator[Json]:
        """Yield the rest of the text, and the figures."""
        self._text = finished.text
        yield from self._since(*self._split(finished.text, finished.reason), is_last=True)
        last = self._piece({}, self._reason(finished))
        if self._streams_usage:  # timings are in the same piece, as in llama-server: Open WebUI adds up all pieces
            yield last
            last = {**self._chunk([]), "usage": usage(finished.stats)}
        yield {**last, **self._figures(finished, snapshot)}

    def _since(self, thought: str, said: str, is_last: bool = False) -> Iterator[Json]:
        if more := thought.removeprefix(self._thought):
            self._thought = thought
            yield self._piece({"reasoning_content": more})
        more, self._said = said.removeprefix(self._said), said
        if more or is_last:
            yield from map(self._piece, self._parts(more, is_last))

    def _piece(self, delta: Json, reason: str | None = None) -> Json:
        text = {"delta": delta} if self._is_chat else {"text": delta.get(CONTENT, "")}
        return self._chunk([{"index": 0, **text, "finish_reason": reason, "logprobs": self._logprobs()}])

    def _logprobs(self) -> Json | None:
        """Return the scores not sent yet, in the format of a chat or a text."""
        scores, self._scores = self._scores, []
        if not scores:
            return None
        if self._is_chat:
            return {
                "content": [
                    {**_scored(score.token, score.logprob), "top_logprobs": [_scored(*other) for other in score.top]}
                    for score in scores
                ],
                "refusal": None,
            }
        offsets = []
        for score in scores:
            offsets.append(self._offset)
            self._offset += len(score.token)
        return {
            "tokens": [score.token for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [dict(score.top) for score in scores],
            "text_offset": offsets,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, **({"usage": None} if self._streams_usage else {})}

    def _split(self, text: str, ending: str | None) -> tuple[str, str]:
        return thoughts.split(text, self._end, ending) if self._is_chat else ("", text)

    def _figures(self, finished: Finished, snapshot: Snapshot | None) -> Json:
        stats = finished.stats
        figures: Json = {
            "stored": stats.total_tokens,
            "read": stats.active_tokens,
            "read_share": stats.read_share,
            "coverage": stats.coverage,
            "lowest_coverage": stats.lowest_coverage,
            "recalled_bytes": stats.recalled_bytes,
            "kv_device_bytes": stats.kv_device_bytes,
            "kv_host_bytes": stats.kv_host_bytes,
            "resumed": {"tokens": self._resumed.tokens, "from": self._resumed.where} if self._resumed else None,
            "finish_reason": finished.reason,
        }
        if snapshot:
            current = {"mode": snapshot.mode, "params": snapshot.params, "reduced": snapshot.reduced_tokens}
            figures = {**current, **figures}
        return {"timings": timings(stats), "kvchat": figures}


def _scored(token: str, logprob: float) -> Json:
    """Return a token and its bytes, which are null if it contains a partial character."""
    return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else [*token.encode()]}


def usage(stats: Stats) -> Json:
    """Return token counts in OpenAI's format; the K/V of ``cached_tokens`` were reused."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
    }


def timings(stats: Stats) -> Json:
    """Return times in llama-server's format; decoding is timed from the second token on."""
    processed, prefill_rate = stats.prompt_tokens - stats.reused_tokens, stats.prefill_tokens_per_s
    generated, decode_rate = stats.generated_tokens, stats.decode_tokens_per_s
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": processed,
        "prompt_ms": 1000 * processed / prefill_rate if prefill_rate else 0.0,
        "prompt_per_second": prefill_rate,
        "predicted_n": generated,
        "predicted_ms": 1000 * max(generated - 1, 0) / decode_rate if decode_rate else 0.0,
        "predicted_per_second": decode_rate,
    }
