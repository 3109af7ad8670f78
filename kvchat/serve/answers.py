"""Events of the engine as the bodies that clients read, whole or in pieces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from kvchat import thoughts
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.protocol.messages import AnswerEvent, Finished, Resumed, Started, Text

REASONS = {"eos": "stop", "stop": "stop", "stopped": "stop", "length": "length", "context": "length"}
Json = dict[str, Any]


class Answer:
    """One answer while it comes. A thought before it is told apart from what is said, in a chat."""

    def __init__(self, model: str, is_chat: bool, streams_usage: bool = False) -> None:
        self._is_chat = is_chat
        self._streams_usage = streams_usage
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
        self._resumed: Resumed | None = None

    def feed(self, event: AnswerEvent | Resumed) -> None:
        """Take an event in."""
        match event:
            case Started(thought=end, tags=tags):
                self._end, self._tags = end, tags
            case Text(text):
                self._text += text
                if not self._end and (tag := thoughts.begun_with(self._text, self._tags)):
                    self._end = thoughts.end_of(tag)
            case Resumed():
                self._resumed = event

    # ---- in one piece

    def whole(self, finished: Finished, snapshot: Snapshot | None) -> Json:
        """The body of an answer that is over."""
        reason = REASONS[finished.reason]
        thought, said = self._split(finished.text, finished.reason)
        choice: Json = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self._is_chat:
            told = {"reasoning_content": thought} if thought else {}
            choice["message"] = {"role": "assistant", "content": said, **told}
        else:
            choice["text"] = said
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

    def end(self, finished: Finished, snapshot: Snapshot | None) -> Iterator[Json]:
        """The rest, and the figures."""
        self._text = finished.text
        yield from self._since(*self._split(finished.text, finished.reason))
        yield {**self._piece({}, REASONS[finished.reason]), **self._figures(finished, snapshot)}
        if self._streams_usage:
            yield {**self._chunk([]), "usage": usage(finished.stats)}

    def _since(self, thought: str, said: str) -> Iterator[Json]:
        if more := thought.removeprefix(self._thought):
            self._thought = thought
            yield self._piece({"reasoning_content": more})
        if more := said.removeprefix(self._said):
            self._said = said
            yield self._piece({"content": more})

    def _piece(self, delta: Json, reason: str | None = None) -> Json:
        told = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._chunk([{"index": 0, **told, "finish_reason": reason, "logprobs": None}])

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, **({"usage": None} if self._streams_usage else {})}

    # ---- inside

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
