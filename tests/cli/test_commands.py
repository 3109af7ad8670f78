"""The first word: a command, a slip in one, or a question that opens the chat."""

from __future__ import annotations

import pytest
from support.command_line import Run
from support.hostile import forbidden_in, hostile

from kvchat.cli import chat
from kvchat.tui import app
from kvchat.tui.state import AppConfig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[AppConfig]:
    started: list[AppConfig] = []
    monkeypatch.setattr(app, "run", lambda config: started.append(config) or 0)
    monkeypatch.setattr(chat, "prefers_lines", lambda: False)
    return started


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["hello there"], "hello there"),
        (["hello"], "hello"),
        (["list models"], "list models"),
        (["chat", "ask"], "ask"),
        (["-m", "there", "hello"], "hello"),
        (["hello", "-m", "there"], "hello"),
        (["Schön?"], "Schön?"),
        ([], ""),
    ],
)
def test_a_question_in_place_of_a_command_opens_the_chat(
    run: Run, started: list[AppConfig], arguments: list[str], asked: str
) -> None:
    assert run(*arguments) == (0, "", "")
    assert started[0].prompt == asked
    assert started[0].load.model == ("there" if "-m" in arguments else "bundled")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("aks", "ask"), ("bnech", "bench"), ("cmopare", "compare"), ("help", "--help"), ("version", "--version")],
)
def test_a_slip_in_a_command_is_no_question(run: Run, started: list[AppConfig], word: str, meant: str) -> None:
    outcome = run(word)
    assert outcome.code == 2
    assert f'There is no command "{word}". Did you mean {meant}? As a question: kvchat chat "{word}"' in outcome.err
    assert not started


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["bench", "recall", "--length", "3"], '--length "3" is refused. It must be at least 16.'),
        (["bench", "recall", "--depth", "x"], '--depth "x" is refused. It must be a number.'),
        (["bench", "decode", "--rounds", "1.5"], '--rounds "1.5" is refused. It must be a whole number.'),
        (["calibrate", "--coverage", "3"], '--coverage "3" is refused. It must be at most 1.'),
        (["plan", "--context", "x"], '--context "x" is refused. It must be a whole number.'),
    ],
)
def test_an_option_is_refused_in_kvchats_words(run: Run, arguments: list[str], refused: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert outcome.err == f"kvchat: {refused} `-h` describes the options.\n"


def test_bytes_that_are_not_utf8_are_refused(run: Run, started: list[AppConfig]) -> None:
    assert run("Sch\udcf6n ist das").err.startswith("kvchat: The prompt is not UTF-8. Byte 3 is 0xf6.")


@pytest.mark.parametrize(
    "line",
    [
        "--TYPED",
        "--mode TYPED",
        "chat --TYPED",
        "chat --mode TYPED",
        "ask --seed TYPED",
        "ask hello TYPED",
        "calibrate --text TYPED",
        "completion TYPED",
        "config TYPED",
        "bench --TYPED",
        "chats list --TYPED",
    ],
)
def test_what_was_typed_is_harmless_in_every_refusal(run: Run, line: str) -> None:
    typed = hostile("typed").replace("\x00", "")  # no argument of a program holds NUL
    outcome = run(*(word.replace("TYPED", typed) for word in line.split()))
    assert outcome.code == 2
    assert not forbidden_in(outcome.err.encode())
    assert "typed" in outcome.err
