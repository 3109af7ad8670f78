"""An engine without a model: speaks the protocol on stdin and stdout, scripted by the prompt.

``crash`` exits with code 3, ``fail`` and ``oom`` fail, ``slow`` answers with 100 words a second until it is stopped,
``prose`` the same in paragraphs, ``hold`` answers one word and waits for a command, ``waver`` retracts some words,
``call`` calls a tool; any other prompt gets ``ANSWER``. A switch to budget 64 is refused.
``FAKE_LOAD=crash`` crashes while loading, ``refuse`` finds no model, ``wait`` loads until stdin closes; ``FAKE_GPU``
adds a GPU and ``FAKE_REPEAT=100`` stores every prompt a hundred times; ``FAKE_WORDS`` ends ``slow`` after that many
words; ``FAKE_BADGES`` are its badges, separated by ``|``; the time of each word is written to the file ``FAKE_LEDGER``.
"""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator

from kvchat.protocol import figures, messages, wire
from kvchat.protocol.figures import Agreement, Gpu, Planned, Run, Snapshot, Stats
from kvchat.protocol.messages import (
    Chat,
    Command,
    Compare,
    Compared,
    Comparing,
    Details,
    Finished,
    HideNeedle,
    KeepPages,
    Load,
    Loaded,
    Loading,
    NeedleHidden,
    Noted,
    Peek,
    Peeked,
    Plan,
    Prefilled,
    Rebuild,
    Rebuilt,
    RecallBin,
    Recovered,
    Started,
    Stop,
    Switch,
    Switched,
    SwitchRefused,
    Text,
    Turn,
    Watch,
    Withdrawn,
)

ANSWER = """Section 3 sets out the **payment terms**:

1. invoices are due within *30 days*
2. late payment costs `1.5 %` a month

```python
def interest(amount, months):
    return amount * 1.015 ** months - amount
```

| month | interest |
|-------|---------:|
| 1     |    15.00 |
| 2     |    30.23 |

That is all there is to it.
"""
CALL = 'I look. <tool_call> {"name": "weather", "arguments": {"city": "Paris"}} </tool_call>'
CALLS = json.dumps({
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
})  # fmt: skip
WORDS = ("the", "window", "moves", "and", "older", "pages", "rest", "on", "the", "host")
PARAGRAPH = 50  # words
READ = str.maketrans("SWDRHFX", "9999000")
MODES = ("full", "freeze", "streaming", "sync", "speculative")
BUDGETED = {"budget": 512, "sink": 16, "window": 64}


class FakeEngine:
    """Tokens are words; ``total`` is the number of stored words."""

    def __init__(self) -> None:
        self.commands: queue.Queue[Command | None] = queue.Queue()
        self.mode, self.params = "full", {}
        self.given = {}
        self.total = 0
        self.stored: list[str] = []
        self.speed = 58.2
        self.recalled = 0
        self.is_watched = False

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while (command := self.commands.get()) is not None:
            if isinstance(command, Load):
                self.load(command)
            elif isinstance(command, Chat):
                self.chat(command)
            elif isinstance(command, Compare):
                self.compare(command)
            elif isinstance(command, HideNeedle):
                send(NeedleHidden((Turn("user", "Who said all?"),), "BY F", 24))
            else:
                self.handle(command)

    def _listen(self) -> None:
        while (body := wire.read(sys.stdin.buffer)) is not None:
            self.commands.put(wire.decode_command(body))
        self.commands.put(None)

    def load(self, command: Load) -> None:
        self.mode, self.params = command.mode, {}
        self.given = command.given
        for params in command.given.values():
            self.params |= params
        send(Loading("starting torch"))
        send(Loading("reading the weights"))
        if os.environ.get("FAKE_LOAD") == "crash":
            die(5)
        if os.environ.get("FAKE_LOAD") == "refuse":
            send(messages.Failed("There is no such model.", kind="ModelError", fatal=True))
            return
        if os.environ.get("FAKE_LOAD") == "wait":
            while self.commands.get() is not None:
                pass
            sys.exit(0)
        described = "kvchat-pocket", "llama", 43_000_000, "cpu", "float32", 16384, 8, 4, 32, 16384
        send(Loaded(*described, self.mode, self.params, calls=CALLS))
        send(self.snapshot())

    def chat(self, command: Chat) -> None:
        prompt = command.turns[-1].content
        words = " ".join(turn.content for turn in command.turns).split()
        send(Started(len(words), min(self.total, len(words))))
        if prompt == "crash":
            sys.stderr.write("RuntimeError: the fake engine was told to crash\n")
            die(3)
        if prompt == "waver":
            self.waver()
            return
        if prompt == "fail":
            send(
                messages.Failed(
                    "The prompt is too long.", f"It has {len(words)} tokens.", "Shorten it.", "DoesNotFitError"
                )
            )
            return
        if prompt == "oom":
            send(messages.Failed("Memory ran out while decoding.", "9 GiB of 8.", "It is kept.", "OutOfMemoryError"))
            return
        self.stored = words * (int(os.environ.get("FAKE_REPEAT", "1")))
        self.total = len(self.stored)
        self.answer(prompt, len(words))

    def compare(self, command: Compare) -> None:
        """All answers begin with the same two words; ``hold`` waits for a stop in the second variant."""
        send(Started(12, 11))
        runs = []
        for index, variant in enumerate(command.variants):
            said = ("All ", "said ", f"by {variant.mode} ", "here.")
            send(Comparing(index, said[0], 1))
            if command.turns[-1].content == "hold" and index:
                while not isinstance(self.commands.get(), Stop):
                    pass
                break
            stats = Stats(12, 11, 4, 16, read_share=0.5, decode_tokens_per_s=50.0)
            agreement = Agreement(2, 3, 0.75, 0.05, 0.9) if index else None
            runs.append(Run(variant.mode, variant.params, said, "eos", stats, agreement))
        send(Compared(tuple(runs), 12))

    def waver(self) -> None:
        send(Text("It begins well | and then it goes wrong", 8))
        send(Recovered("RR", "entropy", 3.4, 40))
        send(Withdrawn(len(" and then it goes wrong"), 5))
        send(Text(" and ends well.", 3))
        send(Finished("eos", "It begins well | and ends well.", Stats(3, 0, 6, 20)))

    def answer(self, prompt: str, prompt_tokens: int) -> None:
        begun, said, reason, before = time.monotonic(), [], "eos", self.mode
        for piece in pieces(prompt):
            said.append(piece)
            self.stored.append(piece.strip())
            self.total += 1
            send(Text(piece, 1))
            log_word(piece)
            if len(said) % 8 == 0:
                self.recalled += 4096 * (self.mode == "speculative")
                send(self.snapshot())
            if not self.between_tokens(prompt):
                reason = "stopped"
                break
        seconds = max(time.monotonic() - begun, 1e-6)
        stats = Stats(
            prompt_tokens, 0, len(said), self.total, self.active(), self.active() / self.total, 0.41, 900.0,
            len(said) / seconds, 2**20, 2**22, self.recalled, 0.94 if self.recalled else None, 3,
            switches=({"from": before},) if before != self.mode else (),
        )  # fmt: skip
        send(self.snapshot())
        self.send_details()
        send(Finished(reason, "".join(said), stats))

    def between_tokens(self, prompt: str) -> bool:
        """Handle the commands that came meanwhile; False after ``Stop``."""
        wait = {"slow": 0.01, "prose": 0.01, "hold": 3600.0}.get(prompt, 0.0)
        try:
            command = self.commands.get(timeout=wait) if wait else self.commands.get_nowait()
        except queue.Empty:
            return True
        if command is None:
            sys.exit(0)
        return not isinstance(command, Stop) and (self.handle(command) or self.between_tokens(prompt))

    def handle(self, command: Command) -> None:
        if isinstance(command, Switch):
            self.switch(command)
        elif isinstance(command, KeepPages):
            send(Noted(f"Pages are kept in {command.host_dtype} from now on."))
        elif isinstance(command, Rebuild):
            send(Prefilled(12, 12))
            send(Rebuilt(12, 0.25))
        elif isinstance(command, Watch):
            self.is_watched = command.details
            self.send_details()
        elif isinstance(command, Peek):
            send(Peeked(command.start, command.end, " ".join(self.stored[command.start : command.end])))
        elif isinstance(command, messages.Tokenize):
            words = " ".join(turn.content for turn in command.turns).split()
            send(messages.Tokenized(tuple(range(len(words)))))
        elif isinstance(command, Plan):
            self.plan(command)

    def plan(self, command: Plan) -> None:
        """Take a while; send nothing if stdin was closed meanwhile."""
        time.sleep(0.2)
        if None in self.commands.queue:
            sys.exit(0)
        send(Planned(command.load.model, None, "It has no weights."))

    def switch(self, command: Switch) -> None:
        mode = command.mode or self.mode
        if command.params.get("budget") == 64:
            send(SwitchRefused(self.mode, "Budget 64 is smaller than sink 16 plus window 64 plus one page of 32."))
            return
        from kvchat.config import modes  # half of an engine's startup time, and most never need it

        before, self.mode = self.mode, mode
        kept = {} if mode == "full" else {**BUDGETED, **self.params}
        self.params = {**kept, **command.params}
        modes.remember(self.given, mode, command.params)
        moved, reduced = 3 * 2**20 if mode == "full" else 0, 120 if before == "streaming" else 0
        send(Switched(before, mode, self.params, self.total, moved, 0.01, reduced, self.given))
        send(self.snapshot())
        self.send_details()

    def send_details(self) -> None:
        """Eight layers of four heads: the first layer reads everything, in the others later heads read more."""
        if not self.is_watched:
            return
        active, layers = round(self.active()), range(8)
        read = tuple(
            tuple(self.total if not layer else active * (head + 1) // 4 for head in range(4)) for layer in layers
        )
        recall = tuple(RecallBin(n, 0.3 * n, 0.1 * n) for n in (0, 0, 4, 90, 160, 2, 0, 0, 0, 0))
        gpu = (11_200_000_000, 300_000_000) if os.environ.get("FAKE_GPU") else (None, None)
        send(Details(self.total, read, read, recall if self.mode == "speculative" else (), *gpu))

    def active(self) -> float:
        return float(min(self.total, self.params.get("budget", self.total)))

    def snapshot(self) -> Snapshot:
        speculative = self.mode == "speculative"
        return Snapshot(
            self.mode, self.params, self.active(), self.total, 16384, 2**20, 2**22, 86 * 2**20, 2**29, None, None,
            Gpu("NVIDIA H200", 6 * 2**30, 140 * 2**30, None, 45, 61, None) if os.environ.get("FAKE_GPU") else None,
            self.speed + self.total % 7 if self.total else None, 0.41 if self.total else None,
            4096.0 if speculative else 0.0, self.recalled, 0.94 if speculative else None, 3 if speculative else 0,
            0.8 if speculative else None, 1.8 if speculative else None, ribbon=ribbon(self.total, self.mode),
            attended=ribbon(self.total, self.mode).translate(READ),
            prices=tuple(figures.Price(m, 3 * 2**20, 2**22, 0.0042) for m in MODES if m != self.mode),
            extras={"pages a step": 1.5, "heads corrected": 3} if speculative else {},
            badges=tuple(filter(None, os.environ.get("FAKE_BADGES", "").split("|"))),
        )  # fmt: skip


def ribbon(total: int, mode: str) -> str:
    """A plausible ribbon: sinks, a window, and between them states that fit the mode."""
    cells = min(-(-total // 32), figures.MAX_RIBBON_CELLS)
    if mode == "full":
        return "D" * cells
    middle = "X" if mode == "streaming" else "H"
    states = ["S"] + [("D" if i % 9 == 4 else "R" if i % 17 == 7 else middle) for i in range(1, cells)]
    if mode == "streaming":
        states = ["S"] + ["X"] * (cells - 1)
    return "".join(states[: max(cells - 3, 1)] + ["W"] * min(3, max(cells - 1, 0)))[:cells]


def pieces(prompt: str) -> Iterator[str]:
    """The answer's tokens."""
    if prompt in ("slow", "hold", "prose"):
        ends = {PARAGRAPH - 1: "\n\n"} if prompt == "prose" else {}
        yield from (
            f"{WORDS[i % 10]}{ends.get(i % PARAGRAPH, ' ')}" for i in range(int(os.environ.get("FAKE_WORDS", 10_000)))
        )
    else:
        yield from re.findall(r"\s*\S+", CALL if prompt == "call" else ANSWER)


def send(event: messages.Event) -> None:
    sys.stdout.buffer.write(wire.encode(event))
    sys.stdout.buffer.flush()


def log_word(piece: str) -> None:
    """Append the time and the number of characters to the ledger."""
    if ledger := os.environ.get("FAKE_LEDGER"):
        with open(ledger, "a") as file:
            file.write(f"{time.time()} {len(piece)}\n")


def die(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    FakeEngine().serve()
