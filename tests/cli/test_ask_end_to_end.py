"""``kvchat ask`` and the engine's process with the bundled model.

In a process of its own, as a person starts it, where the process itself matters: what else it prints, signals, its
ends. What an answer holds is asked in this process, which has imported torch and transformers already.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import Run
from support.patience import PATIENCE_S
from support.streams import read_event

from kvchat.protocol import wire
from kvchat.protocol.messages import Chat, Finished, Load, Sampling, Switch, Switched, Turn

pytestmark = pytest.mark.slow("each is a process that loads torch and the bundled model")
GREEDY = ("--temperature", "0")


def ask(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "TERM": "dumb"}
    command = [sys.executable, "-m", "kvchat", "ask", *args]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=600, env=env)


def test_a_question_is_answered_and_nothing_else_is_printed(run: Run) -> None:
    plain = ask("What is the capital of France?", *GREEDY)
    assert (plain.returncode, plain.stderr) == (0, b"")
    as_json = run("ask", "--json", *GREEDY, stdin=b"What is the capital of France?\n")
    assert (as_json.code, as_json.err) == (0, "")
    result = json.loads(as_json.out)
    assert plain.stdout.decode() == result["text"] + "\n"
    assert (result["mode"], result["finish_reason"]) == ("full", "eos")
    assert len(result["token_ids"]) == result["stats"]["generated_tokens"] > 0


def test_the_same_seed_gives_the_same_text_and_switches_are_counted(run: Run) -> None:
    flags = ("Tell me a story.", "--json", "--seed", "3", "--max-new-tokens", "24")
    switches = ("--switch-at", "8:speculative,budget=128", "--switch-at", "16:streaming")
    one, two = (json.loads(run("ask", *flags, *switches).out) for _ in range(2))
    assert one["text"] == two["text"]
    assert [(s["at"], s["mode"]) for s in one["stats"]["switches"]] == [(8, "speculative"), (16, "streaming")]


@pytest.mark.parametrize(
    ("args", "stdin", "code", "said"),
    [
        (["hi", "-m", "/no/such/model"], b"", 2, "/no/such/model"),
        (["hi", "--mode", "streaming", "--param", "sink=64", "--param", "window=64", "--budget", "64"], b"", 2, "64"),
        ([], b"word " * 200_000, 3, "context"),
    ],
    ids=["no such model", "budget below sinks and window", "1 MB paste"],
)
def test_what_cannot_be_done_is_said_in_one_line(run: Run, args: list[str], stdin: bytes, code: int, said: str) -> None:
    result = run("ask", *args, stdin=stdin)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("kvchat: ")
    assert said in result.err
    assert result.err.count("\n") == 1


def test_ctrl_c_keeps_what_is_there() -> None:
    command = [sys.executable, "-m", "kvchat", "ask", "Count to a thousand.", "--max-new-tokens", "4000", "--stop", "~"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stderr
        assert child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE_S) == 130
        assert child.stdout.read().endswith(b"\n")
        assert child.stderr.read() == b""


def test_the_engines_process_answers_switches_and_leaves(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "kvchat.engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as child,
    ):
        assert child.stdin
        assert child.stdout
        chat = Chat((Turn("user", "Hello!"),), Sampling(temperature=0, max_new_tokens=8))
        commands = (Load(), chat, Switch("speculative", {"budget": 256}), chat)
        child.stdin.write(b"".join(map(wire.encode, commands)))
        child.stdin.flush()
        events: list[wire.Message | None] = []
        while sum(isinstance(e, Finished) for e in events) < 2:
            events.append(read_event(child.stdout))
            assert events[-1] is not None, (tmp_path / "log").read_text()
        first, second = (e for e in events if isinstance(e, Finished))
        assert first.text == second.text
        assert [(e.before, e.mode) for e in events if isinstance(e, Switched)] == [("full", "speculative")]
        child.stdin.close()
        assert child.wait(PATIENCE_S) in (0, 1)  # 1 where a busy machine did not let it end within worker.GRACE_S
    assert (tmp_path / "log").read_text() == ""
