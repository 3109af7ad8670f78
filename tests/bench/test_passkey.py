"""The passkey benchmark: its conversations, and that variants do not influence each other."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench import passkey
from kvchat.bench.frame import Frame
from kvchat.bench.passkey import Settings
from kvchat.cli.main import app
from kvchat.errors import UsageError
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

TOKEN_BYTES = 8 * 4 * 2 * 64 * 4  # of the bundled model: layers, KV heads, K and V, size of a head, float32


@pytest.fixture(scope="module")
def tokenizer():
    return load_model(Load("bundled", "cpu"), lambda stage: None).tokenizer


def test_the_same_seed_gives_the_same_conversations(tokenizer):
    one, again = (list(passkey.cases(3, 4, 400, tokenizer)) for _ in range(2))
    assert one == again
    assert len({case.answer for case in one}) == 4
    assert list(passkey.cases(4, 4, 400, tokenizer)) != one
    assert list(passkey.cases(3, 2, 400, tokenizer)) == one[:2]


def test_the_fact_is_told_once_in_an_earlier_turn_and_asked_for_at_the_end(tokenizer):
    for case in passkey.cases(0, 12, 3000, tokenizer):
        told = [i for i, turn in enumerate(case.turns) if case.answer in turn.content]
        assert len(told) == 1
        assert told[0] < len(case.turns) - 5
        assert case.turns[-1].content == "What is the passkey?"
        assert 2900 < sum(len(tokenizer.encode(turn.content)) for turn in case.turns) < 3300


def test_the_result_is_plain_data_with_a_row_for_each_variant():
    variants = ("full", "streaming:budget=64,sink=4", "sync:budget=132")
    lines: list[str] = []
    result = passkey.run(Settings(variants, cases=1, tokens=300), frame=Frame(report=lines.append))
    assert json.loads(json.dumps(result)) == result
    assert tuple(row["variant"] for row in result["summary"]) == variants
    full, streaming, sync = result["summary"]
    assert (full["right"], full["cases"], full["read_tokens"]) == (1, 1, pytest.approx(465, abs=15))
    assert streaming["read_tokens"] < sync["read_tokens"] < full["read_tokens"]
    assert lines[-1].startswith("[3/3] sync")


def test_the_command_prints_one_json_object():
    ran = CliRunner().invoke(app, ["bench", "passkey", "--cases", "1", "--tokens", "100", "--mode", "full", "--json"])
    assert ran.exit_code == 0
    assert json.loads(ran.stdout)["rows"][0]["variant"] == "full"
    assert "[1/1] full" in ran.stderr


def test_an_unknown_mode_is_refused():
    with pytest.raises(UsageError, match='no KV mode "fulll"'):
        passkey.run(Settings(("fulll",), cases=1, tokens=100))


@pytest.mark.slow("six conversations of the bundled model")
def test_sync_recalls_at_half_the_memory_and_streaming_does_not():
    rows = passkey.run(Settings(("full", "sync", "streaming:budget=512"), cases=2, tokens=2000))["summary"]
    assert [row["right"] for row in rows] == [2, 2, 0]
    stored = rows[0]["read_tokens"] * TOKEN_BYTES  # on a CPU full holds nothing beside what is stored
    assert rows[1]["kv_device_bytes"] < 0.54 * stored


def test_a_question_may_come_inside_an_answer_whose_steps_count():
    modes = ("full", "streaming:budget=64,sink=4")
    result = passkey.run(Settings(modes, cases=1, tokens=300, inside=100))
    full, streaming = result["summary"]
    assert result["settings"]["inside"] == 100
    assert (full["right"], streaming["right"]) == (1, 0)
    assert full["prompt_tokens"] + 40 < full["read_tokens"] < full["prompt_tokens"] + 120
    assert streaming["read_tokens"] <= 64 + 64
