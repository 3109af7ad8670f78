"""The recall benchmark: full is always measured, summaries add up, and each mode has its own losses."""

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench import draft, recall
from kvchat.bench.frame import Frame, ModelChoice
from kvchat.bench.recall_tasks import CHAIN, TASKS, WITHOUT_DEPTH, case
from kvchat.bench.report import tables
from kvchat.bench.settings import Draft, Recall
from kvchat.cli.main import app
from kvchat.errors import UsageError

STREAMING = "streaming:budget=64,sink=4"
TOKEN_BYTES = 8 * 4 * 2 * 64 * 4  # of the bundled model: layers, KV heads, K and V, head size, float32


def test_full_recalls_what_streaming_forgets(tmp_path):
    out = tmp_path / "recall.json"
    words = "--task passkey --task name --length 300 --depth 0.2 --cases 1 --mode streaming:sink=4 --budget 64"
    arguments = ["bench", "recall", *words.split(), "--out", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "| streaming, sink=4, budget=64 | 0 of 1 (0 – 79 %) |" in ran.stdout
    result = json.loads(out.read_text())
    assert [(row["task"], row["variant"], row["right"], row["cases"]) for row in result["summary"]][:2] == [
        ("passkey", "full", 1, 1),
        ("passkey", "streaming:sink=4,budget=64", 0, 1),
    ]
    assert {row["depth"] for row in result["rows"] if row["task"] == "name"} == {0.0}


def test_facts_dropped_by_streaming_return_after_a_switch():
    result = recall.run(Recall((STREAMING,), tasks=("switches",), lengths=(300,), cases=1, inside=20))
    right = {(row["variant"], row["asked"]): row["right"] for row in result["summary"]}
    assert set(right) == {(variant, asked) for variant in ("full", STREAMING) for asked in ("full", STREAMING)}
    assert right["full", "full"] == right[STREAMING, "full"] == 1
    assert right["full", STREAMING] == right[STREAMING, STREAMING] == 0
    (table,) = tables(result)
    assert table.rows[1] == ("streaming, budget=64, sink=4", "1 of 1", "0 of 1", "1 of 2 (9 – 91 %)")


def test_a_question_can_come_inside_an_answer():
    result = recall.run(Recall((STREAMING,), ("passkey",), (300,), (0.2,), cases=1, inside=40))
    full, streaming = result["summary"]
    (prompt, _) = (row["prompt_tokens"] for row in result["rows"])
    assert result["settings"]["inside"] == 40
    assert (full["right"], streaming["right"]) == (1, 0)
    assert prompt + 15 < full["read_tokens"] < prompt + 50
    assert streaming["read_tokens"] <= 64 + 64


@pytest.mark.slow("three conversations of the bundled model")
def test_sync_recalls_at_half_the_memory_and_streaming_does_not():
    settings = Recall(("sync", "streaming:budget=512"), ("passkey",), (2000,), (0.3,), cases=1)
    rows = recall.run(settings, ModelChoice(device="cpu"))["summary"]
    assert [row["right"] for row in rows] == [1, 1, 0]
    stored = rows[0]["read_tokens"] * TOKEN_BYTES  # on a CPU full holds only what is stored
    assert rows[1]["kv_device_bytes"] < 0.54 * stored


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ("passkeys",)}, 'Did you mean "passkey"'),
        ({"depths": (1.5,)}, "depth 1.5"),
        ({"keys": 1}, "1 keys are not possible"),
    ],
)
def test_bad_input_is_rejected_before_loading(settings, message):
    with pytest.raises(UsageError, match=message):
        recall.run(Recall(("full",), **settings))


def test_the_help_names_every_task():
    named = CliRunner().invoke(app, ["bench", "recall", "--help"]).stdout
    assert {task for task in TASKS if task not in named} == set()


# ---- Cases of the recall benchmark: drawn by seed, with each answer at its depth


LENGTH = 600


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_determines_a_case_that_contains_its_answer(task, tokenizer):
    drawn = case(task, LENGTH, 0.5, 4, "0/1", tokenizer)
    assert drawn == case(task, LENGTH, 0.5, 4, "0/1", tokenizer)
    assert drawn != case(task, LENGTH, 0.5, 4, "0/2", tokenizer)
    text = " ".join(turn.content for turn in drawn.turns[:-1])
    assert text.count(drawn.answer) == 1
    assert drawn.answer not in drawn.turns[-1].content
    assert drawn.turns[-1].role == "user"
    assert 0.95 * LENGTH < len(tokenizer.encode(text)) < 1.35 * LENGTH


def test_texts_can_be_longer_than_the_book(tokenizer):
    assert len(tokenizer.encode(case("fact", 20_000, 1.0, 2, "0/1", tokenizer).turns[0].content)) > 20_000


@pytest.mark.parametrize("task", sorted(set(TASKS) - set(WITHOUT_DEPTH)))
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_fact_appears_at_its_depth(task, depth, tokenizer):
    drawn = case(task, LENGTH, depth, 4, "0/3", tokenizer)
    text = drawn.turns[0].content
    assert text.index(drawn.answer) / len(text) == pytest.approx(depth, abs=0.12)


def test_key_and_chain_texts_contain_their_statements(tokenizer):
    keys, chain = (case(task, LENGTH, 0.5, 4, "7", tokenizer) for task in ("keys", "chain"))
    assert keys.turns[0].content.count("The value of") == 4
    text = chain.turns[0].content
    assert text.count("Let ") == CHAIN
    assert text.index(chain.answer) < text.rindex("Let ")
    assert text[text.rindex("Let ") + 4 :].split()[0] in chain.turns[-1].content


def test_switch_cases_state_the_passkey_once_and_early(tokenizer):
    for number in range(12):
        drawn = case("switches", 3000, 0.0, 4, f"0/{number}", tokenizer)
        stated = [i for i, turn in enumerate(drawn.turns) if drawn.answer in turn.content]
        assert len(stated) == 1
        assert stated[0] < len(drawn.turns) - 5
        assert drawn.turns[-1].content == "What is the passkey?"
        assert 2900 < sum(len(tokenizer.encode(turn.content)) for turn in drawn.turns) < 3300


# ---- The draft benchmark: answers with and without drafts are equal, and rows count the forwards


CPU = ModelChoice(device="cpu", dtype="float32")


def test_rows_report_what_drafts_save():
    lines, settings = [], Draft(tasks=("quote", "story"), contexts=(300,), tokens=20, rounds=1)
    result = draft.run(settings, CPU, Frame(report=lines.append))
    assert [(row["context"], row["task"], row["temperature"], row["draft"]) for row in result["rows"]] == [
        (300, task, temperature, kind)
        for task in ("quote", "story")
        for temperature in (0.0, 0.8)
        for kind in ("lookup", "window", "auto")
    ]
    for row in result["rows"]:
        assert row["same"]
        assert 0 < row["forwards"] <= row["tokens"] == 20
        assert row["processor_gain"] > 0
        assert row["gain"] == pytest.approx(row["ms_without"] / row["ms"])
        if row["drafted"]:
            assert row["tokens_a_round"] >= 1
            assert row["accepted"] == pytest.approx((row["tokens"] - row["forwards"]) / row["drafted"])
        else:
            assert row["accepted"] is None
    assert any(row["drafted"] for row in result["rows"])
    json.dumps(result)
    assert len(tables(result)[0].rows) == 12


def test_a_context_of_zero_is_measured_without_a_book():
    settings = Draft(drafts=("lookup",), tasks=("list",), temperatures=(0.0,), contexts=(0, 64), tokens=8, rounds=1)
    assert [row["context"] for row in draft.run(settings, CPU)["rows"]] == [0, 64]


def test_unknown_tasks_are_rejected_before_loading():
    with pytest.raises(UsageError, match="sing"):
        draft.run(Draft(tasks=("sing",)), ModelChoice(model="there is none"))
