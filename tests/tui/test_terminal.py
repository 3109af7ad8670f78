"""The application in a real terminal: tmux, a fake engine, real keys, real signals."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from support import start_app
from support.environment import environ
from support.hostile import fill, forbidden_in, hostile, names_in
from support.patience import PATIENCE_S
from support.pty_run import PtyRun

from kvchat.protocol.figures import ServerFigures
from kvchat.protocol.messages import Event
from kvchat.tui.terminal import InputDecoder

pytestmark = [pytest.mark.terminal, pytest.mark.skipif(not shutil.which("ps"), reason="no ps")]

HOSTILE_ENGINE = start_app.FAKE_ENGINE.with_name("hostile_engine.py")


class Terminal:
    """A tmux server with one pane that runs a command: reads its screen, types keys."""

    def __init__(self, socket: Path, command: list[str]) -> None:
        self.socket = socket
        line = f"unset COLUMNS LINES; {shlex.join(command)}; echo left with $?; cat"
        self("-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "40", line)

    def __call__(self, *arguments: str, stdin: bytes | None = None) -> str:
        tmux = ["tmux", "-S", str(self.socket), *arguments]
        return subprocess.run(tmux, check=True, capture_output=True, input=stdin).stdout.decode()

    def screen(self) -> str:
        return self("capture-pane", "-p")

    def type(self, text: str, *keys: str) -> None:
        self("send-keys", "-l", text)
        for key in keys:
            self("send-keys", key)

    def key(self, *keys: str) -> None:
        self("send-keys", *keys)

    def paste(self, data: bytes) -> None:
        """Paste as a terminal does; by default, newer versions of tmux spell out control characters."""
        literally = ["-S"] if "S]" in self("list-commands", "paste-buffer") else []
        self("load-buffer", "-", stdin=data)
        self("paste-buffer", "-p", "-r", *literally)

    def resize(self, width: int, height: int) -> None:
        self("resize-window", "-x", str(width), "-y", str(height))

    def until(self, condition: Callable[[str], object]) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(screen := self.screen()):
            assert time.monotonic() < deadline, f"timed out; the screen is\n{screen}"
            time.sleep(0.05)
        return screen

    def sees(self, text: str) -> str:
        return self.until(lambda screen: text in screen)


@pytest.fixture
def terminal(tmp_path):
    terminal = Terminal(tmp_path / "tmux", start_app.command(tmp_path))
    yield terminal
    subprocess.run(["tmux", "-S", str(terminal.socket), "kill-server"], check=False, capture_output=True)


def engines(folder: Path) -> list[int]:
    """Process ids of the fake engines whose parent was started with this folder."""
    lines = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    rows = [line.split(None, 2) for line in lines[1:]]
    apps = {pid for pid, _, arguments in rows if f" {folder} " in arguments}
    return [int(pid) for pid, parent, arguments in rows if parent in apps and f" {folder} " not in arguments]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_whole_session_works_in_a_terminal(terminal, tmp_path):
    terminal.sees("● ready")
    terminal.type("hello there", "Enter")
    terminal.until(lambda screen: "That is all there is to it." in screen and "first token 0.41 s · full" in screen)

    terminal.type("slow", "Enter")
    terminal.sees("◉ answering")
    terminal.key("F6")
    terminal.sees("FREEZE")
    terminal.type("/mode speculative", "Enter")
    terminal.sees("SPECULATIVE")
    terminal.key("Escape")
    terminal.until(lambda screen: "full → speculative" in screen and "stopped" in screen)

    terminal.type("a draft")
    terminal.resize(80, 24)
    terminal.until(lambda screen: "F1 help" in screen.splitlines()[23] and "a draft" in screen)
    terminal.resize(30, 8)
    terminal.sees("needs 40x12")
    terminal.resize(120, 40)
    terminal.until(lambda screen: "context used" in screen and "a draft" in screen)

    first = engines(tmp_path)
    assert len(first) == 1
    os.kill(first[0], signal.SIGKILL)
    terminal.sees("The engine stopped: killed by SIGKILL.")
    terminal.sees("● ready")
    terminal.type(" and more", "Enter")
    terminal.sees("❯ a draft and more")
    terminal.until(lambda screen: "● ready" in screen and "speculative ·" in screen)

    second = engines(tmp_path)
    assert len(second) == 1
    assert second != first
    terminal.key("C-q")
    terminal.sees("left with 0")
    assert not any(alive(pid) for pid in first + second)


# ---- Input


def test_invalid_utf8_and_huge_pastes_do_not_crash(terminal):
    terminal.sees("● ready")
    terminal.key("-H", "9b")
    terminal.type("typed")
    terminal.sees("\ufffdtyped")
    terminal.paste("Grüße".encode("latin-1"))
    terminal.sees("\ufffdtypedGr\ufffd\ufffde")
    terminal.key("Enter")
    terminal.sees("That is all there is to it.")
    terminal.paste(b"fifteen letters\n" * 312_500)
    terminal.sees("[pasted 4.8 MiB, 312,501 lines]")
    terminal.key("C-q")
    terminal.sees("left with 0")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_a_paste_decodes_the_same_in_any_chunk_size(size):
    sent = b"a\x1b[A\x1b[200~one\x1b[2J\x1b[201~b\xff\x1b\x1b[200~\x1b\xc3\xbc\x1b[20\x1b[201~\x1b[C"
    decoder = InputDecoder()
    text = "".join(decoder.decode(sent[i : i + size]) for i in range(0, len(sent), size))
    assert text == "a\x1b[A\x1b[200~one␛[2J\x1b[201~b\ufffd\x1b\x1b[200~␛ü␛[20\x1b[201~\x1b[C"


PASTED = ("one\rtwo\rthree\rfour", "one\ntwo\n\nfour\n", "def f():\r\treturn 1\r", "über\r日本\r", "/mode x\rtext\r")
TYPED = ("hello\r", "hello", "hello\r\r", "\r\r", "/mode full\r/set\r", "te\x7f\rhe", "one\r\x1b[Atwo")


@pytest.mark.parametrize("sent", [*PASTED, *TYPED])
def test_several_lines_in_one_read_are_a_paste(sent):
    assert InputDecoder().decode(sent.encode()) == (f"\x1b[200~{sent}\x1b[201~" if sent in PASTED else sent)


def test_an_unbracketed_paste_continues_except_for_enter():
    now = [0.0]
    decoder = InputDecoder(lambda: now[0])
    assert decoder.decode(b"one\rtwo\rth") == "\x1b[200~one\rtwo\rth\x1b[201~"
    now[0] += 0.001
    assert decoder.decode(b"ree\r") == "\x1b[200~ree\r\x1b[201~"
    assert decoder.decode(b"\r") == "\r"
    decoder.decode(b"one\rtwo\r")
    now[0] += 0.1
    assert decoder.decode(b"next\r") == "next\r"


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (b"\x1bhello\r", "\x1b[27uhello\r"),
        ("\x1b\x1bäß".encode(), "\x1b\x1b[27uäß"),
        (b"a\x1bhi\x1bhi", "a\x1b[27uhi\x1b[27uhi"),
        (b"\x1b", "\x1b"),
        (b"\x1bh", "\x1bh"),
        (b"\x1bh\x1bh\x1b\r", "\x1bh\x1bh\x1b\r"),
        (b"\x1b[A\x1bOP\x1b[<0;1;2M\x1b]0;x\x1b\\", "\x1b[A\x1bOP\x1b[<0;1;2M\x1b]0;x\x1b\\"),
    ],
)
def test_escape_before_several_letters_is_the_escape_key(sent, read):
    assert InputDecoder().decode(sent) == read


# ---- Output

# Every text of every event must appear, except what the application knows itself or has no room for.
NOT_DRAWN = {
    *(
        "Failed.kind",
        "Finished.reason",
        "Turn.role",
        "Turn.thought",
        "Resumed.conversation",
        "Snapshot.ribbon",
        "Snapshot.attended",
    ),
    *("Loaded.architecture", "Loaded.dtype", "Loaded.fast", "Price.mode", "Price.refusal"),
    "Loaded.model",  # only its last part is drawn
    "Loaded.auto",  # Snapshot.auto is drawn
    "Text.text",  # the final text replaces it at once; ``ANSWER_TEXTS`` are streamed
    *("Loaded.calls", "Score.token", "Score.top", "Turn.more", "MemoryPlan.elsewhere.of", "Snapshot.other_gpus.of"),
    *("Loaded.template_variables", "Started.tags", "Started.thought"),
    *("Snapshot.extras.key", "Recovered.signal"),  # below the visible part of this screen
    *("MemoryPlan.by_default", "MemoryPlan.floor_ms.of", "Proposal.quantize", "StoredNeed.mode", "Run.reason"),
    *(f"{cls}.params.{of}" for cls in ("Loaded", "ModeNeed", "Run", "Snapshot", "Switched") for of in ("key", "value")),
    *(f"Stats.{name}.{of}" for name in ("extras", "switches") for of in ("key", "value")),
    *("Snapshot.extras.value", "Switched.given.of", "Switched.given.key", "Switched.given.value"),
}
SERVER_FIELDS = {"Loaded.server", "Loaded.offers", *names_in(repr(fill(ServerFigures)))}
EVENT_FIELDS = {name for cls in get_args(Event) for name in names_in(repr(fill(cls)))} - SERVER_FIELDS
CUT = {"ServerFigures.missing"}  # only its beginning is visible
ANSWER_TEXTS = ("prose", "heading", "fence", "cell", "link", "tail", "withdrawn", "question", "log")
STEPS = {  # what is typed, and a text that appears then
    "\x1b[200~" + hostile("question") + "\x1b[201~\r": "Failed.hint",
    "\t\t\t": "Peeked.text",  # to the ribbon
    "everything\r": "«answered»",
    "/mode\r/set\r/plan\r": "«Planned.refusal»",
    "\x1b/needle\r": "«Run.refusal»",
    "\x1b/details\r": "Layer 0, KV head 0 read",
    "\x1bcrash\r": "log",
    "\x1b[18~": "«Gpu.name»",  # F7: all figures
}


@contextmanager
def app_with_hostile_engine(tmp_path: Path, **more: str) -> Iterator[PtyRun]:
    """The ready application; afterwards it quits, and must have sent no forbidden bytes to the terminal."""
    run = PtyRun(start_app.command(tmp_path, HOSTILE_ENGINE), environ(TERM="xterm-256color", **more))
    try:
        run.until("«Loaded.notes»")
        yield run
        run.type(b"\x11")
        assert run.finish() == 0
    finally:
        run.close()
    assert not forbidden_in(run.written)


def test_no_event_sends_control_sequences_to_the_terminal(tmp_path):
    assert EVENT_FIELDS >= NOT_DRAWN
    with app_with_hostile_engine(tmp_path) as run:
        for keys, name in STEPS.items():
            run.type(keys.encode())
            run.until(name)
        for name in (*ANSWER_TEXTS, *sorted(EVENT_FIELDS - NOT_DRAWN)):
            run.until(f"«{name}»")
    assert "[bold]markup[/]" in run.written.decode()


def test_no_server_sends_control_sequences_to_the_terminal(tmp_path):
    with app_with_hostile_engine(tmp_path, SERVED="1") as run:
        run.type(b"\x1b[18~")  # F7: all figures
        run.until("«ServerFigures.kind»")
        run.type(b"\x1b[17~")  # F6: the server decides
        for name in sorted(SERVER_FIELDS - CUT):
            run.until(f"«{name}»")


def test_typed_ahead_text_enter_and_escape_keep_their_order(tmp_path):
    run = PtyRun(start_app.command(tmp_path), environ(TERM="xterm-256color"))
    try:
        run.until(start_app.READY)
        run.type(b"Hello\r")
        time.sleep(0.05)  # otherwise both would be one paste
        run.type(b"world")
        run.until("That is all there is to it.")
        run.type(b"\r")
        run.until("read 100 % of 118")  # answered, so what follows is not queued
        run.type(b"slow\r\x1b")
        run.until("stopped")
        run.type(b"\x11")
        assert run.finish() == 0
    finally:
        run.close()
    assert (tmp_path / "history").read_text().splitlines()[-3:] == ['"Hello"', '"world"', '"slow"']
