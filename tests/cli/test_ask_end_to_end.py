"""``kvchat ask`` with the bundled model, in this process; ``test_main_environment`` starts one as a person does."""

from __future__ import annotations

import json

import pytest
from support.command_line import Run

pytestmark = pytest.mark.slow("the bundled model is loaded")
GREEDY = ("--temperature", "0")


def test_a_question_is_answered_and_nothing_else_is_printed(run: Run) -> None:
    plain = run("ask", "What is the capital of France?", *GREEDY)
    assert (plain.code, plain.err) == (0, "")
    as_json = run("ask", "--json", *GREEDY, stdin=b"What is the capital of France?\n")
    assert (as_json.code, as_json.err) == (0, "")
    result = json.loads(as_json.out)
    assert plain.out == result["text"] + "\n"
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
