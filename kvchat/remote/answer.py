"""One answer of a server: turns the frames of its stream into events, and its counts into the receipt."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvchat import thoughts
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Event, Finished, Prefilled, Sampling, Started, Text, Turn, parse_args
from kvchat.remote.servers import KVCHAT, LLAMA, SGLANG, TRANSFORMERS, VLLM, whole

THOUGHT = "<think>"
RECENT = 32  # frames over which the speed is measured
TIMED_S = 0.1  # minimum duration for measuring a speed, because frames may arrive together
OPENAI_FIELDS = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
REPETITION_PENALTY = {LLAMA: "repeat_penalty"}  # other programs call it repetition_penalty
TAKING_VARIABLES = (LLAMA, VLLM, SGLANG, TRANSFORMERS, KVCHAT)
CONTINUING = (VLLM, SGLANG)  # continue an answer only on request; llama-server always does


def request(
    kind: str, model: str, turns: Sequence[Turn], sampling: Sampling, template_args: Sequence[str]
) -> dict[str, Any]:
    """Return the openai library's arguments for an answer to the last turn, or its continuation.

    Sampling values equal to kvchat's defaults are left to the server.
    """
    extra: dict[str, Any] = {}
    arguments: dict[str, Any] = {
        "model": model,
        "messages": [{"role": turn.role, "content": _content(turn, turn is turns[-1])} for turn in turns],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sampling.max_new_tokens,
    }
    changed = {name: value for name, value in vars(sampling).items() if value != getattr(Sampling(), name)}
    arguments |= {name: changed[name] for name in OPENAI_FIELDS if name in changed}
    arguments |= {"stop": list(sampling.stop)} if sampling.stop else {}
    extra |= {name: changed[name] for name in ("top_k", "min_p") if name in changed}
    if "repetition_penalty" in changed:
        extra[REPETITION_PENALTY.get(kind, "repetition_penalty")] = sampling.repetition_penalty
    if kind == LLAMA:
        extra |= {"return_progress": True, "timings_per_token": True}
    if kind == VLLM:
        arguments["stream_options"]["continuous_usage_stats"] = True
    if kind in CONTINUING and turns[-1].role == "assistant":
        extra |= {"continue_final_message": True, "add_generation_prompt": False}
    if template_args and kind in TAKING_VARIABLES:
        extra["chat_template_kwargs"] = parse_args(template_args)
    return arguments | ({"extra_body": extra} if extra else {})


def _content(turn: Turn, is_last: bool) -> str:
    """Return a message without its thought, which templates drop too, unless the thought is to be continued."""
    if turn.role != "assistant":
        return turn.content
    said = thoughts.split(turn.content, turn.thought)[1]
    return said or turn.content if is_last else said


def open_thought(turn: Turn) -> str:
    """Return the tag that ends the thought inside which a message ends, or ""."""
    begun = thoughts.begun_with(turn.content)
    end = turn.thought or (thoughts.end_of(begun) if begun else "")
    return end if turn.role == "assistant" and end not in turn.content else ""


class Answer:
    """An answer as it arrives; ``within`` comes from ``open_thought``, ``clock`` is in seconds."""

    def __init__(self, sampling: Sampling, within: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._sampling, self._clock = sampling, clock
        self._began, self._first, self._last = clock(), 0.0, 0.0
        self._stamps: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._pieces: list[str] = []
        self._within = within
        self.is_started = self._is_thinking = self._is_counted = False
        self._timings: Mapping[str, Any] = {}
        self.finish_reason = ""
        self.prompt_tokens = self.reused_tokens = self.tokens = 0

    @property
    def total(self) -> int:
        """Tokens of prompt and answer; 0 until the server reports the prompt's."""
        return self.prompt_tokens + self.tokens if self.prompt_tokens else 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None before that."""
        return self._first - self._began if self._first else None

    @property
    def recent_tokens_per_s(self) -> float | None:
        """Tokens per second over the last frames; None if there are too few."""
        (begun, before), (now, tokens) = (self._stamps[0], self._stamps[-1]) if self._stamps else ((0.0, 0), (0.0, 0))
        return (tokens - before) / (now - begun) if now - begun >= TIMED_S else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return _rate(self._timings.get("prompt_per_second"))

    def take(self, frame: Any) -> Iterator[Event]:
        """Yield the events of one frame.

        Raises:
            AttributeError, TypeError, ValueError, KeyError: its form is invalid.
        """
        extra = frame.model_extra or {}
        yield from self._count(frame.usage, extra.get("timings"), extra.get("prompt_progress"))
        for choice in (frame.choices or ())[:1]:
            more = choice.delta.model_extra or {} if choice.delta else {}
            thought = more.get("reasoning_content") or more.get("reasoning") or ""
            yield from self._text(thought, (choice.delta.content if choice.delta else None) or "")
            self.finish_reason = choice.finish_reason or self.finish_reason

    def _count(self, usage: Any, timings: Any, progress: Any) -> Iterator[Event]:
        if timings:
            self._timings = timings
            if (cached := timings.get("cache_n")) is not None:  # otherwise the prompt's length is unknown
                self.reused_tokens = whole(cached)
                self.prompt_tokens = self.reused_tokens + whole(timings.get("prompt_n"))
            if (predicted := timings.get("predicted_n")) is not None:
                self._note_tokens(whole(predicted))
        if usage:
            details = usage.prompt_tokens_details
            self.prompt_tokens = whole(usage.prompt_tokens)
            self.reused_tokens = whole(details.cached_tokens) if details else self.reused_tokens
            self._note_tokens(whole(usage.completion_tokens))
        if progress:
            total, cached, done = (whole(progress.get(name)) for name in ("total", "cache", "processed"))
            self.prompt_tokens, self.reused_tokens = total, cached
            yield from self._start()
            yield Prefilled(max(done - cached, 0), max(total - cached, 0))
        yield from self._start()

    def _note_tokens(self, tokens: int) -> None:
        """Use the server's count; without it each frame counts as one token, which is nearly always right."""
        self.tokens, self._is_counted = max(tokens, self.tokens), True

    def _start(self) -> Iterator[Event]:
        if not self.is_started:
            self.is_started = True
            yield Started(self.prompt_tokens, min(self.reused_tokens, self.prompt_tokens))

    def _text(self, thought: str, said: str) -> Iterator[Event]:
        piece = ""
        if thought:
            piece += thought if self._is_thinking or self._within else f"{THOUGHT}\n{thought}"
            self._is_thinking = True
        if said:
            piece += self._end_of_thought() + said
        if not piece:
            return
        self._last = self._clock()
        self._first = self._first or self._last
        self.tokens += not self._is_counted
        self._stamps.append((self._last, self.tokens))
        self._pieces.append(piece)
        yield Text(piece, 1)

    def _end_of_thought(self) -> str:
        was_thinking, self._is_thinking = self._is_thinking, False
        end, self._within = self._within or thoughts.end_of(THOUGHT), ""
        return f"\n{end}\n\n" if was_thinking else ""

    def finish(self, is_stopped: bool) -> Iterator[Event]:
        if self._is_thinking and not is_stopped and (end := self._end_of_thought()):
            self._pieces.append(end)
            yield Text(end, 0)
        reason = "stopped" if is_stopped else "eos"
        if not is_stopped and self.finish_reason == "length":
            reason = "context" if self.tokens < self._sampling.max_new_tokens else "length"
        yield Finished(reason, "".join(self._pieces), self._stats())

    def _stats(self) -> Stats:
        seconds = self._last - self._first
        by_clock = (self.tokens - 1) / seconds if seconds >= TIMED_S and self.tokens > 1 else None
        drafted = whole(self._timings.get("draft_n"))
        accepted = f"{whole(self._timings.get('draft_n_accepted')):,} of {drafted:,}"
        return Stats(
            prompt_tokens=self.prompt_tokens,
            reused_tokens=min(self.reused_tokens, self.prompt_tokens),
            generated_tokens=self.tokens,
            total_tokens=self.total,
            ttft_s=self.ttft_s,
            prefill_tokens_per_s=self.prompt_tokens_per_s,
            decode_tokens_per_s=_rate(self._timings.get("predicted_per_second")) or by_clock,
            extras={"drafts accepted": accepted} if drafted else {},
        )


def _rate(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None
