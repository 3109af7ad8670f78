"""Random keys, lines, clicks, pastes and sizes for the application in a pseudo terminal, reproducible by a seed."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.patience import PATIENCE_S, wait_until
from support.pty_run import PtyRun
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS

from kvchat.tui.actions import ACTIONS
from kvchat.tui.rebinding import keys_of

NAMED = {str(names[0].value): code for code, names in ANSI_SEQUENCES_KEYS.items() if isinstance(names, tuple)}
NAMED |= {"escape": "\x1b", "shift+f6": "\x1b[17;2~", "shift+f7": "\x1b[18;2~"}  # as xterm sends them
MOVES = ("escape", "tab", "shift+tab", "enter", "up", "down", "left", "right", "home", "end", "delete", "backspace")
OPENERS = ("f1", "f2", "f3", "f8", "f9", "shift+f7", "ctrl+o", "ctrl+p")
ENDING = ("ctrl+q", "ctrl+c")  # rarely pressed: they end the run
LINES = ("hello", "slow", "fail", "crash", "waver", "hold", "#  a | b\n", "/", "@", "@.", "//", "1", "über 日本 🧵")
ARGUMENTS = (
    *("", "", "", "1", "12", "none", "system", "full", "speculative budget=128", "spec sync", "streaming window=x"),
    *("temperature 0.3", "seed 7", "kvchat-light", "nonsense", "clear", "chat.json", "chat.md", "bundled"),
    *("org/model", "0.5", "budget 64", "-1", "9" * 30, "café"),
)
ACTION_KEYS = [keys for action in ACTIONS if (keys := keys_of(action, {}))]
COMMANDS = tuple(action.command for action in ACTIONS if action.command and action.id != "quit")
SIZES = ((80, 24), (120, 40), (200, 60), (40, 12), (30, 8), (100, 30), (161, 20), (250, 80))
SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;:?<>=]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")

SCREENS = {
    "chat": "Ask something",
    "panels": "this answer",
    "help": "kvchat help",
    "settings": "Find a setting",
    "conversations": "^Z restore",
    "models": "memory it needs",
    "compare": "write to files",
    "needle": "of the context",
    "details": "Tab next part",
    "palette": "Search for commands",
}
"""A text that is on this screen and on no other."""


@dataclass
class RandomKeys:
    """Types into ``command``, which is restarted when a key has ended it; ``folder`` is its working folder.

    ``keys`` counts inputs, ``runs`` starts; ``seen`` are the ``SCREENS`` that appeared; ``memory`` is the resident
    memory of the application in MiB after each burst.
    """

    command: Sequence[str]
    environ: dict[str, str]
    folder: Path
    seed: int
    keys: int = 0
    runs: int = 0
    seen: set[str] = field(default_factory=set)
    memory: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._mark = f"KVCHAT_TEST_RUN=run-{os.getpid()}-{self.seed}"
        name, _, value = self._mark.partition("=")
        self.environ = self.environ | {name: value, "EDITOR": "true", "VISUAL": "true", "TERM": "xterm-256color"}
        self._program: PtyRun | None = None
        self._tail = b""
        self._typed: deque[bytes] = deque(maxlen=400)  # a burst, and the check after it

    def press(self, bursts: int, until_s: float = 0.0) -> None:
        """Type ``bursts`` bursts, and more for ``until_s`` seconds; after each the prompt must accept input.

        Raises:
            AssertionError: the application failed or hangs; contains the end of its output.
        """
        begun = time.monotonic()
        try:
            while bursts > 0 or time.monotonic() - begun < until_s:
                bursts -= 1
                self._burst()
                self._check_responsive()
            self._program.type(b"\x11")
            self._check_exit()
        finally:
            if self._program is not None:
                self._program.close()
        wait_until(lambda: not self.left_over(), lambda: f"{self.left_over()} outlived the application")

    def left_over(self) -> list[int]:
        """The ids of the processes of this run that are alive."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:
                continue  # another's, or gone meanwhile
        return found

    # ---- typing ----------------------------------------------------------------------------------

    def _burst(self) -> None:
        for _ in range(self._random.randint(10, 60)):
            self._start_if_ended()
            self._type(self._any_input())
            self._read(self._random.choice((0.0, 0.0, 0.01, 0.05, 0.3)))

    def _any_input(self) -> bytes:
        draw = self._random.random()
        if draw < 0.30:
            return self._key(self._random.choice(MOVES))
        if draw < 0.45:
            return self._key(self._random.choice(self._random.choice(ACTION_KEYS)))
        if draw < 0.55:
            return self._key(self._random.choice(OPENERS))
        if draw < 0.70:
            return self._random.choice(LINES).encode() + self._random.choice((b"\r", b""))
        if draw < 0.85:
            argument = self._random.choice(ARGUMENTS)
            return f"/{self._random.choice(COMMANDS)} {argument}\r".encode()
        if draw < 0.92:
            self._read(0.05)  # a user clicks on what is drawn
            return self._click()
        if draw < 0.94:
            return b"\x1b[200~" + self._bytes(self._random.choice((3, 40, 4000))) + b"\x1b[201~"
        if draw < 0.95:
            return self._bytes(3).replace(b"\x03", b"").replace(b"\x11", b"")
        self._program.resize(*self._size())
        return b""

    def _bytes(self, number: int) -> bytes:
        """Random bytes without Ctrl+\\, which kills the foreground processes while an editor has the terminal."""
        return self._random.randbytes(number).replace(b"\x1c", b"")

    def _key(self, name: str) -> bytes:
        if name in ENDING and self._random.random() > 0.02:
            return b""
        return (name if len(name) == 1 else NAMED.get(name, "")).encode()

    def _click(self) -> bytes:
        button = self._random.choice((0, 0, 0, 2, 64, 65))
        at = f"{button};{self._random.randint(1, 120)};{self._random.randint(1, 40)}"
        return f"\x1b[<{at}M\x1b[<{at}m".encode()

    def _size(self) -> tuple[int, int]:
        any_size = self._random.randint(1, 220), self._random.randint(4, 70)
        tiny = self._random.randint(1, 12), self._random.randint(4, 40)  # a pane made tiny
        return self._random.choice((*SIZES, any_size, tiny))

    def _type(self, data: bytes) -> None:
        self.keys += 1
        self._typed.append(data)
        self._program.type(data)

    # ---- checks ----------------------------------------------------------------------------------

    def _check_responsive(self) -> None:
        """Close what is open and type a word, which must appear.

        Repeated until it does: on a busy machine a word may reach a screen that is just closing.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not self._accepts_a_word():
            assert time.monotonic() < deadline, f"it hangs: {self._shown()}"
        self._type(self._random.choice((b"\r", b"\x15", b"\x15")))
        self.memory.append(self._resident())

    def _accepts_a_word(self) -> bool:
        self._start_if_ended()
        self._resume_if_stopped()
        self._program.resize(120, 40)
        for _ in range(6):
            self._type(self._key("escape"))
            self._read(0.2)  # otherwise the next one would make it Alt+Esc
        if self._start_if_ended():
            return False
        mark = f"mark{self.keys}"
        self._type(mark.encode())
        for _ in range(20):
            self._read(0.1)
            if mark.encode() in self._tail:
                return True
        return False

    def _resume_if_stopped(self) -> None:
        """Ctrl+Z typed while an editor has the terminal stops the application, and there is no shell to resume it."""
        process = self._program.process
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("T"):
            process.send_signal(signal.SIGCONT)

    def _start_if_ended(self) -> bool:
        """Start the application unless it runs; return whether it was started."""
        if self._program is not None:
            if self._program.process.poll() is None:
                return False
            self._check_exit()
            self._program.close()
        self._program = PtyRun(self.command, self.environ, 120, 40, folder=self.folder)
        self.runs += 1
        self._tail = b""
        deadline = time.monotonic() + PATIENCE_S
        while b"F1 help" not in self._tail:
            assert self._program.process.poll() is None, f"it does not start: {self._shown()}"
            assert time.monotonic() < deadline, f"it does not start: {self._shown()}"
            self._read(0.1)
        return True

    def _check_exit(self) -> None:
        code = self._program.finish()
        self._scan()
        assert code == 0, f"it ended with {code}: {self._shown()}"

    def _read(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while True:
            self._program.read(max(until - time.monotonic(), 0.0))
            self._scan()
            if time.monotonic() >= until:
                return

    def _scan(self) -> None:
        """Look for screens in the output, and keep only its end."""
        self._tail = (self._tail + SEQUENCE.sub(b"", self._program.written))[-40_000:]
        self._program.written = b""
        self.seen |= {name for name, text in SCREENS.items() if text.encode() in self._tail}

    def _shown(self) -> str:
        typed = " ".join(map(repr, self._typed))
        return (
            f"seed {self.seed}, {self.keys} keys, the last ones {typed}; {self._tail[-6000:].decode(errors='replace')}"
        )

    def _resident(self) -> int:
        pages = int(Path(f"/proc/{self._program.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20
