"""A tiny model's runner and cache, used as a session uses them; its tokens are characters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from support.tiny_runner import load_tiny, mode_of, prefill_logits, token_ids

from kvchat.engine.answer import SessionLock
from kvchat.engine.prefix_cache import PrefixCache
from kvchat.engine.prompt import Stored, common_prefix
from kvchat.engine.runner import ModelRunner
from kvchat.protocol.messages import Keeping, Noted, Resumed, Turn

TALE = "Once upon a time there was a cat that read every letter of the house. " * 4
OTHER = "Quite another text, of which nothing has been read so far at all. " * 3


class CharacterEncoder:
    """Replaces ``PromptEncoder``: one id per character."""

    def render(self, turns) -> str:
        return "".join(f"<{turn.content}" for turn in turns)

    def ids_of(self, text: str, stored: Stored) -> list[int]:
        kept, chars = stored.matched_prefix(text)
        return stored.ids[:kept] + [ord(character) for character in text[chars:]]


class Chat:
    """A runner and its cache, used as a session uses them."""

    def __init__(self, tmp_path, model=None, row="full", parked=2**30, saved=2**30) -> None:
        model = model or load_tiny("llama")
        self.runner = ModelRunner(model, mode_of(model, row))
        self.stored = Stored()
        self.keeping = Keeping(parked, saved, str(tmp_path / "kv"))
        metrics = SimpleNamespace(leave=lambda: None)
        self.loop = SimpleNamespace(stored=self.stored, encoder=CharacterEncoder(), lock=SessionLock(), metrics=metrics)
        self.cache = PrefixCache(self.runner, self.loop, self.keeping)

    def say(self, conversation: str, text: str) -> list:
        """Open a conversation and prefill what is not stored of ``text``; return the cache's events."""
        turns = (Turn("user", text),)
        events = list(self.cache.resume(conversation, turns))
        self.cache.interrupt()
        ids = self.loop.encoder.ids_of(self.loop.encoder.render(turns), self.stored)
        reused = min(common_prefix(self.stored.ids, ids), len(ids) - 1)
        if reused < self.runner.kv.total:
            self.stored.truncate(reused)
            self.runner.truncate(reused)
        self.logits = prefill_logits(self.runner, ids[reused:])
        self.stored.extend(ids[reused:])
        self.stored.mark_text(self.loop.encoder.render(turns))
        self.cache.save()
        return events

    def answer(self, tokens: int = 9) -> None:
        """Decode an answer of ``tokens`` tokens and save it."""
        self.cache.interrupt()
        answer = token_ids(tokens, seed=5)
        for token in answer:
            self.logits = self.runner.step(token)
            self.stored.extend([token])
        self.stored.mark_text(self.stored.text + "".join(map(chr, answer)))
        self.cache.save()
        if self.keeping.saved_bytes:
            self.written()

    def written(self) -> None:
        if thread := self.cache._writer._thread:
            thread.join()

    def restarted(self, tmp_path, **changes) -> Chat:
        self.written()  # on a busy machine it takes longer than ``close`` waits
        self.cache.close()
        return Chat(tmp_path, **{"model": self.runner.model, **changes})


def flip_byte(path: Path, at: int) -> None:
    """Damage the byte ``at`` of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def resumed_from(events) -> tuple[int, str]:
    (resumed,) = [event for event in events if isinstance(event, Resumed)]
    return resumed.tokens, resumed.where


def notes(events) -> list[str]:
    return [event.text for event in events if isinstance(event, Noted)]
