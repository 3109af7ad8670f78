"""Events of the engine as the bodies that clients read, whole or in pieces."""

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
CALLED, SAID = "tool_calls", "content"  # fields of a message, and of transformers' form
Json = dict[str, Any]


class Calls:
    """Tells calls of ``tools`` from what is said beside them, by transformers' parser and its ``form`` for them.

    It is fed one character after the other, so that an answer in pieces says and calls what the whole does.
    """

    def __init__(self, form: str, tools: Sequence[Json]) -> None:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        written = json.loads(form)
        # Thoughts were told apart already: a later one would be left out.
        written["fields"] = {name: field for name, field in written["fields"].items() if name in (CALLED, SAID)}
        template: Any = load_response_template(written)
        self._parser: Any = ResponseParser(template, prefix="", tools=tools)
        self._close = template.fields[CALLED].close_re
        self._is_broken = False
        self._within = ""  # a call that has begun
        self.found = 0

    def feed(self, text: str, is_last: bool) -> Iterator[Json]:
        """What more of an answer says and calls, as fields of a message; a call that is none is said."""
        said = ""
        for part in (*chain.from_iterable(map(self._fed, text)), *(self._ended() if is_last else ())):
            if SAID in part:
                said += part[SAID]
                continue
            if said:
                yield {SAID: said}
            said = ""
            yield part
        if said:
            yield {SAID: said}

    def _fed(self, character: str) -> Iterator[Json]:
        self._within += character
        yield from self._told(lambda: self._parser.feed(character))

    def _ended(self) -> Iterator[Json]:
        yield from self._told(lambda: self._parser.finalize()[1])

    def _told(self, parse: Callable[[], list[Json]]) -> Iterator[Json]:
        try:
            events = [] if self._is_broken else parse()
        except ValueError:  # no JSON: the text is all there is of it
            events, self._is_broken = [], True
        for event in events:
            if event["type"] == "region_chunk" and event["field"] == SAID:
                self._within = self._within.removeprefix(event["text"])
                yield {SAID: event["text"]}
            elif event["type"] == "region_close" and event["field"] == CALLED:
                ended = self._close and self._close.search(self._within)
                if self._close and not ended:  # cut off: arguments may be missing
                    self._is_broken = True
                    break
                self._within = self._within[ended.end() :] if ended else ""
                yield from self._called(event["value"].get("function"))
        if self._is_broken:
            said, self._within = self._within, ""
            yield {SAID: said}

    def _called(self, function: Any) -> Iterator[Json]:
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            yield {SAID: json.dumps(function, ensure_ascii=False)}
            return
        arguments = function.get("arguments", {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call = {"name": function["name"], "arguments": written}
        number, self.found = self.found, self.found + 1
        yield {CALLED: [{"index": number, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call}]}


class Answer:
    """One answer while it comes. In a chat thought and ``calls`` are told apart from what is said."""

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
        self._thought = self._said = ""  # as far as they were told
        self._scores: list[Score] = []  # that were not told
        self._offset = 0  # of the next of them in the text
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

    # ---- in one piece

    def whole(self, finished: Finished, snapshot: Snapshot | None) -> Json:
        thought, said = self._split(finished.text, finished.reason)
        choice: Json = {"index": 0, "logprobs": self._logprobs()}
        if self._is_chat:
            told: Json = {"reasoning_content": thought} if thought else {}
            parts = [*self._parts(said, is_last=True)]
            text: str | None = "".join(part.get(SAID, "") for part in parts)
            if calls := [call for part in parts for call in part.get(CALLED, ())]:
                told[CALLED] = [{name: call[name] for name in call if name != "index"} for call in calls]
                text = text or None
            choice["message"] = {"role": "assistant", SAID: text, **told}
        else:
            choice["text"] = said
        choice["finish_reason"] = self._reason(finished)
        return {**self._head, "choices": [choice], "usage": usage(finished.stats), **self._figures(finished, snapshot)}

    # ---- in pieces

    def begin(self) -> Iterator[Json]:
        """The first piece: who speaks."""
        if self._is_chat:
            yield self._piece({"role": "assistant", "content": ""})

    def more(self) -> Iterator[Json]:
        """What came since the last piece."""
        thought, said = self._split(self._text, None)
        if thought and not said:  # the tag that ends it may have begun
            held = next((n for n in range(len(self._end) - 1, 0, -1) if thought.endswith(self._end[:n])), 0)
            thought = thought[: len(thought) - held].rstrip()
        yield from self._since(thought, said)

    def _parts(self, said: str, is_last: bool) -> Iterator[Json]:
        """What is said as fields of a message, without the calls in it."""
        if self._calls:
            yield from self._calls.feed(said, is_last)
        elif said:
            yield {SAID: said}

    def _reason(self, finished: Finished) -> str:
        reason = REASONS[finished.reason]
        return CALLED if self._calls and self._calls.found and reason == "stop" else reason

    def end(self, finished: Finished, snapshot: Snapshot | None) -> Iterator[Json]:
        """The rest, and the figures."""
        self._text = finished.text
        yield from self._since(*self._split(finished.text, finished.reason), is_last=True)
        last = self._piece({}, self._reason(finished))
        if self._streams_usage:  # times stand beside it, as llama-server's: Open WebUI adds up what comes in two pieces
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
        told = {"delta": delta} if self._is_chat else {"text": delta.get(SAID, "")}
        return self._chunk([{"index": 0, **told, "finish_reason": reason, "logprobs": self._logprobs()}])

    def _logprobs(self) -> Json | None:
        """The scores that were not told yet, in the form of a chat or a text."""
        scores, self._scores = self._scores, []
        if not scores:
            return None
        if self._is_chat:
            return {
                "content": [
                    {**_scored(one.token, one.logprob), "top_logprobs": [_scored(*two) for two in one.top]}
                    for one in scores
                ],
                "refusal": None,
            }
        offsets = []
        for one in scores:
            offsets.append(self._offset)
            self._offset += len(one.token)
        return {
            "tokens": [one.token for one in scores],
            "token_logprobs": [one.logprob for one in scores],
            "top_logprobs": [dict(one.top) for one in scores],
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
            in_force = {"mode": snapshot.mode, "params": snapshot.params, "reduced": snapshot.reduced_tokens}
            figures = {**in_force, **figures}
        return {"timings": timings(stats), "kvchat": figures}


def _scored(token: str, logprob: float) -> Json:
    """A token; of a part of a character no bytes are told."""
    return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else [*token.encode()]}


def usage(stats: Stats) -> Json:
    """Tokens as OpenAI counts them; ``cached_tokens`` were stored and not read again."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
    }


def timings(stats: Stats) -> Json:
    """Times as llama-server tells them; those of the answer begin with its second token."""
    read, rate = stats.prompt_tokens - stats.reused_tokens, stats.prefill_tokens_per_s
    drawn, speed = stats.generated_tokens, stats.decode_tokens_per_s
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": read,
        "prompt_ms": 1000 * read / rate if rate else 0.0,
        "prompt_per_second": rate,
        "predicted_n": drawn,
        "predicted_ms": 1000 * max(drawn - 1, 0) / speed if speed else 0.0,
        "predicted_per_second": speed,
    }
