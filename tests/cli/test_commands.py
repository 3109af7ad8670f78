"""The first word: a command, a slip in one, or a question that opens the chat."""

from __future__ import annotations

import pytest
from support.command_line import Run
from support.hostile import forbidden_in, hostile
from support.message import lacks

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
    assert not lacks(outcome.err, f'"{word}"', f" {meant}?", f'kvchat chat "{word}"')
    assert not started


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["bench", "recall", "--length", "3"], ('--length "3"', "16")),
        (["bench", "recall", "--depth", "x"], ('--depth "x"', "number")),
        (["bench", "decode", "--rounds", "1.5"], ('--rounds "1.5"', "whole")),
        (["calibrate", "--coverage", "3"], ('--coverage "3"', "1")),
        (["plan", "--context", "x"], ('--context "x"', "whole")),
    ],
)
def test_an_option_is_refused_in_a_line(run: Run, arguments: list[str], facts: tuple[str, ...]) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert outcome.err.startswith("kvchat: ")
    assert outcome.err.count("\n") == 1
    assert not lacks(outcome.err, *facts, "`-h`")


def test_bytes_that_are_not_utf8_are_refused(run: Run, started: list[AppConfig]) -> None:
    assert not lacks(run("Sch\udcf6n ist das").err, "UTF-8", "Byte 3", "0xf6")


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
