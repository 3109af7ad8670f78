#!/usr/bin/env python3
"""Measure the screen with a long conversation: .ci/long_chat.py --out FILE.json [--messages N --tokens N --rounds N].

The real application goes on with a conversation of its database, over an engine that has no model and whose tokens
are words. A time ends when the terminal was sent what was waited for; beside it stands what the application's process
computed in it, which other programs do not lengthen. Linux only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from timed_screen import Taken, TimedScreen

from kvchat.bench import timing
from kvchat.bench.frame import Cell, Frame, Result, Row
from kvchat.bench.timing import fingerprint
from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import ConversationStore
from kvchat.protocol.figures import Stats

LETTERS = [chr(code) for code in range(0x100, 0x164)]  # none is in the conversation
LAST, RARE = "halcyon", "lighthouse"  # the last word said, and one of a few messages
PAUSE_S = 0.05  # between two keys
QUIET_S = 2.0  # for which the share of other programs is measured
PAGE_UP, ESCAPE, CLEAR = b"\x1b[5~", b"\x1b", b"\x15"


@dataclass(frozen=True)
class Settings:
    """What is measured: so many ``keys`` at a time, what takes longer in ``rounds`` or a multiple of them."""

    messages: int = 500
    tokens: int = 100_000
    rounds: int = 5
    keys: int = len(LETTERS)
    sizes: tuple[str, ...] = ("80x24", "120x40", "200x60")


def measure(settings: Settings, file: Path) -> Result:
    """Measure at every size; the result, kept in ``file``."""
    environment = fingerprint(torch.device("cpu")) | {"textual": version("textual")}
    what = "ms until the terminal shows it, over an engine without a model"
    head = {"experiment": "long-chat", "what": what, "settings": asdict(settings), "methods": {}, "model": {}}
    cells = [{"size": size} for size in settings.sizes]
    frame = Frame(file, lambda text: print(text, file=sys.stderr), command=".ci/long_chat.py")
    return frame.measure({**head, "environment": environment}, cells, lambda cell: measure_size(settings, cell), line)


def line(row: Row) -> str:
    """A row for a person who waits."""
    return f"{row['size']} {row['action']}: {row['p50']:.0f} ms, {row['computed']:.0f} of them computed"


def measure_size(settings: Settings, cell: Cell) -> list[Row]:
    """A row for each thing done at one size."""
    width, height = map(int, cell["size"].split("x"))
    others = _others()
    with tempfile.TemporaryDirectory() as name:
        store(Path(name), settings)
        opened = []
        for _ in range(settings.rounds):
            screen = TimedScreen(Path(name), width, height)
            try:
                opened.append(screen.opened(LAST))
                done = {} if len(opened) < settings.rounds else do_all(screen, settings, width, height)
                peak = screen.peak_bytes()
            finally:
                screen.close()
    shared = {"others": others, "peak_bytes": peak}
    return [row(action, taken) | shared for action, taken in {"opened": opened, **done}.items()]


def do_all(screen: TimedScreen, settings: Settings, width: int, height: int) -> dict[str, list[Taken]]:
    """What is done in an open conversation, by its name."""
    rounds, letters = settings.rounds, LETTERS[: settings.keys]
    done = {"a key": echoes(screen, letters)}
    screen.type(CLEAR)
    done["a page up"] = [screen.complete(PAGE_UP) for _ in range(4 * rounds)]
    done["/find"] = list(searches(screen, rounds))
    done["another width"] = [screen.complete(size=(width - 1 - at % 2, height)) for at in range(2 * rounds)]
    screen.type(b"prose\r", until="older pages")
    done["a key during an answer"] = echoes(screen, letters)
    return done


def echoes(screen: TimedScreen, letters: Sequence[str]) -> list[Taken]:
    """Type letters one after the other."""
    taken = []
    for letter in letters:
        taken.append(screen.echo(letter))
        screen.rest(PAUSE_S)
    return taken


def searches(screen: TimedScreen, rounds: int) -> Iterator[Taken]:
    """Search the conversations for a word."""
    for _ in range(rounds):
        screen.type(f"/find {RARE}".encode())
        yield screen.complete(b"\r")
        screen.type(ESCAPE)


def row(action: str, taken: Sequence[Taken]) -> Row:
    """The figures of a thing that was done several times."""
    passed, computed = (sorted(each) for each in zip(*taken, strict=True))
    return {
        "action": action,
        "times": len(taken),
        "p50": statistics.median(passed),
        "p95": passed[-(-95 * len(passed) // 100) - 1],
        "longest": passed[-1],
        "computed": statistics.median(computed),
        "computed_p95": computed[-(-95 * len(computed) // 100) - 1],
    }


def store(folder: Path, settings: Settings) -> None:
    """Write the conversation into the database; its answers have every kind of block that Markdown draws."""
    chance, said = random.Random(0), Conversation()
    words = settings.tokens // settings.messages
    for number in range(settings.messages // 2):
        said.ask(prose(chance, words // 5))
        text = answer(chance, 2 * words - words // 5, number)
        if number == settings.messages // 2 - 1:
            text += f" {LAST}"
        begun, ended = 2 * words * number + words // 5, 2 * words * (number + 1)
        said.answer(text, "eos", f"{ended - begun} tok · 41 tok/s", Stats(begun, 0, ended - begun, ended))
    store = ConversationStore(folder / "chats.db")
    if (changes := said.changes()) is not None:
        store.save(changes)
    store.close()


WORDS = ("the", "window", "moves", "and", "older", "pages", "rest", "on", "a", "host", "until", "they", "are", "chosen")


def prose(chance: random.Random, words: int) -> str:
    """So many words."""
    return " ".join(chance.choice(WORDS) for _ in range(words))


def answer(chance: random.Random, words: int, number: int) -> str:
    """About so many words; every tenth has a table, every fifth code, every third a list, and the rest is prose."""
    parts, part = [f"## {prose(chance, 4)}"], words // 5
    if number % 3 == 0:
        parts.append("\n".join(f"- **{prose(chance, 2)}** {prose(chance, part // 4)}" for _ in range(4)))
    if number % 5 == 0:
        parts.append("```python\n" + "\n".join(f"    {prose(chance, 5)}" for _ in range(part // 5)) + "\n```")
    if number % 10 == 0:
        parts.append("| a | b |\n|---|---|\n" + "\n".join(f"| {prose(chance, 3)} | 1.5 |" for _ in range(8)))
    if number % 50 == 7:
        parts.append(f"From the {RARE} it is seen.")
    while (left := words - len(" ".join(parts).split())) > 0:
        parts.append(prose(chance, min(left, part)))
    return "\n\n".join(parts)


def _others() -> float | None:
    before = timing.sample_processors()
    time.sleep(QUIET_S)
    return next(iter(timing.share_of_others(before, timing.sample_processors())), None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    for name in ("messages", "tokens", "rounds", "keys"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name))
    parser.add_argument("--sizes", nargs="+", default=Settings.sizes)
    given = parser.parse_args()
    measure(Settings(given.messages, given.tokens, given.rounds, given.keys, tuple(given.sizes)), given.out)
