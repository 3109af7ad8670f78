"""A data set is answered by every variant and cut to the context; texts are measured by agreement."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from kvchat.bench import data_sets
from kvchat.bench.data_sets import LONGBENCH, aime, longbench, ruler
from kvchat.bench.frame import Frame, ModelChoice, parsed
from kvchat.bench.report import tables
from kvchat.bench.settings import Data
from kvchat.bench.walk import Walk
from kvchat.cli.main import app
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

STREAMING = "streaming:budget=64,sink=4"


@pytest.fixture(scope="module")
def model():
    return load_model(Load("bundled", "cpu"), lambda stage: None)


@pytest.fixture
def folder(tmp_path, model, monkeypatch):
    """Two tasks of RULER; a needle that every model finds in a prompt that ends with it."""
    monkeypatch.setattr(ModelChoice, "load", lambda self, report: model)
    rows = {
        "niah_1": ("The passkey is 48123. The passkey is", ["48123"]),
        "qa_1": ("Who came? " * 40, ["nobody at all"]),
    }
    for task, (text, outputs) in rows.items():
        (tmp_path / "set" / task).mkdir(parents=True)
        line = json.dumps({"input": text, "outputs": outputs}) + "\n"
        (tmp_path / "set" / task / "validation.jsonl").write_text(line * 2)
    return tmp_path / "set"


def test_every_variant_answers_every_row_and_tasks_have_a_mean(folder, tmp_path):
    settings = Data((STREAMING,), name="ruler", folder=str(folder), rows=1, tokens=8)
    result = data_sets.run(settings, frame=Frame(tmp_path / "kept.json"))
    assert json.loads(json.dumps(result)) == result
    places = [(row["task"], row["place"], row["variant"]) for row in result["rows"]]
    assert places[:2] == [("niah_1", "niah_1/validation.jsonl:1", variant) for variant in ("full", STREAMING)]
    scores = {(row["task"], row["variant"]): row["score"] for row in result["summary"]}
    assert scores["qa_1", "full"] == 0
    assert scores["mean", "full"] == scores["niah_1", "full"] / 2
    assert [row["cases"] for row in result["summary"]] == [1, 1, 1, 1, 2, 2]
    (table,) = tables(result)
    assert table.rows[0][:2] == ("niah_1", "full")
    assert json.loads((tmp_path / "kept.json").read_text()) == result


def test_samples_differ_and_the_best_of_them_counts_beside_the_mean(folder):
    settings = Data(("full",), name="ruler", folder=str(folder), rows=1, samples=3, tokens=6)
    result = data_sets.run(settings)
    mine = [row for row in result["rows"] if row["task"] == "qa_1"]
    assert [row["sample"] for row in mine] == [0, 1, 2]
    assert len({row["text"] for row in mine}) > 1
    needle = result["summary"][0]
    assert needle["best_of_samples"] >= needle["score"]
    assert needle["cases"] == 1


def test_a_prompt_beyond_the_context_is_cut_in_its_middle(folder, model, monkeypatch):
    short = dataclasses.replace(model, context=120)
    monkeypatch.setattr(ModelChoice, "load", lambda self, report: short)
    settings = Data(("full",), name="ruler", folder=str(folder), rows=1, tokens=6)
    whole, cut = data_sets.run(settings)["rows"]
    assert (whole["cut"], cut["prompt_tokens"] <= 114) == (0, True)
    assert cut["cut"] > 0


def test_of_texts_the_agreement_is_measured_from_their_beginning(tmp_path, model, monkeypatch):
    monkeypatch.setattr(ModelChoice, "load", lambda self, report: model)
    (tmp_path / "mine.txt").write_text("The sea was calm, and the ship went on. " * 20, "utf-8")
    result = data_sets.run(Data(("full", "sync"), name="pg19", folder=str(tmp_path), rows=1, tokens=40))
    assert result["experiment"] == "agreement"
    assert [(row["text"], row["variant"]) for row in result["rows"]] == [("mine", "full"), ("mine", "sync")]
    full, sync = result["summary"]
    assert full["decoded"] == 40
    assert full["read_mean"] == pytest.approx(data_sets.PROMPT + 41 / 2)
    assert full["perplexity"] == pytest.approx(sync["perplexity_full"], rel=1e-4)


def test_bad_input_is_refused_before_a_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(ModelChoice, "load", lambda self, report: pytest.fail("loaded"))
    file = folder / "qa_1" / "validation.jsonl"
    file.write_text(file.read_text() + "{}\n")
    for arguments, message in (
        (["ruler", "--folder", str(folder)], "validation.jsonl, line 3"),
        (["rules", "--folder", str(folder)], 'Did you mean "ruler"'),
        (["pg19", "--folder", str(folder / "gone")], "There is no folder"),
    ):
        ran = CliRunner().invoke(app, ["bench", "data", *arguments])
        assert isinstance(ran.exception, UsageError)
        assert message in str(ran.exception)


# ---- A walk: a prompt that is stored is not read again, and what was read, covered and asked is seen


PROMPT = [token % 251 for token in range(7, 407)]
FULL = parsed("full")


@pytest.fixture
def walk(tiny_shape):
    return Walk(tiny_shape)


def test_a_stored_prompt_is_read_once_and_gives_the_same_logits(walk, monkeypatch):
    read, prefill = [], walk.runner.prefill
    monkeypatch.setattr(walk.runner, "prefill", lambda ids: read.append(len(ids)) or prefill(ids))
    first = walk.begin(PROMPT, parsed("streaming:budget=64,sink=4"))
    after = walk.step(9)
    assert torch.allclose(walk.begin(PROMPT, FULL), first, atol=1e-4)
    exact = walk.step(9)
    assert not torch.allclose(exact, after, atol=1e-4)
    walk.begin(PROMPT[:-1], FULL)
    assert read == [400, 1, 399]
    assert torch.allclose(walk.step(PROMPT[-1]), first, atol=1e-4)


def test_full_reads_and_covers_everything_and_streaming_its_window(walk):
    walk.begin(PROMPT, FULL)
    walk.step(9)
    assert walk.tokens_read() == walk.total == len(PROMPT) + 1
    assert torch.allclose(walk.covered(), torch.ones(4, 2))
    assert torch.allclose(walk.weights(1).sum(-1), torch.ones(2, 2))
    walk.begin(PROMPT, parsed("streaming:budget=64,sink=4"))
    walk.step(9)
    assert 64 <= walk.tokens_read() <= 64 + 64 + 1
    assert float(walk.covered().max()) < 0.6


def test_sync_is_calibrated_on_the_prompt_or_refused(walk):
    walk.begin(PROMPT, parsed("sync:budget=132"))
    walk.step(9)
    assert walk.tokens_read() < walk.total
    with pytest.raises(UsageError, match="100 tokens are too few to calibrate"):
        Walk(walk.model).begin(PROMPT[:100], parsed("sync:budget=132"))


def test_a_text_beyond_the_context_is_refused(walk):
    with pytest.raises(DoesNotFitError, match=r"4,400 tokens are needed; .* reads 4,096"):
        walk.begin(PROMPT, FULL, 4000)
    walk.begin(PROMPT, parsed("streaming:budget=64,sink=4"), 4000)
    assert walk.total == len(PROMPT), "a mode that goes beyond the context is not refused"


# ---- Rows of made-up data sets in their published formats become questions with prompts and scores


def written(file, *rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(**changed):
    common = {"input": "Who?", "context": "Anne came. {input}", "answers": ["Anne", "Anne Elliot"], "all_classes": None}
    return common | changed


def test_longbench_scores_by_the_best_reference_and_the_tasks_own_metric(tmp_path):
    written(tmp_path / "qasper.jsonl", row(), row())
    written(tmp_path / "trec.jsonl", row(answers=["Sport"], all_classes=["Sport", "Food"]))
    written(tmp_path / "lcc_e.jsonl", row(answers=["return x"]))
    items = list(longbench(tmp_path))
    assert [(item.task, item.place, item.chat, item.tokens) for item in items] == [
        ("lcc", "lcc_e.jsonl:1", False, 64),
        ("qasper", "qasper.jsonl:1", True, 128),
        ("qasper", "qasper.jsonl:2", True, 128),
        ("trec", "trec.jsonl:1", False, 64),
    ]
    code, question, _, few_shot = items
    assert question.prompt.startswith("Anne came. {input}\n"), "what stands in the text is not filled in"
    assert "Question: Who?" in question.prompt
    assert question.score("Anne Elliot") == 1
    assert few_shot.score("Sport\nFood") == 1, "only the first line counts"
    assert code.score("return x\nmore") == 1


def test_the_published_prompts_are_used_where_the_folder_has_them(tmp_path):
    written(tmp_path / "data" / "qasper.jsonl", row())
    written(tmp_path / "config" / "dataset2prompt.json", {"qasper": "Read: {context} Q: {input} A:"})
    (item,) = longbench(tmp_path)
    assert item.prompt == "Read: Anne came. {input} Q: Who? A:"
    written(tmp_path / "config" / "dataset2prompt.json", ["no"])
    with pytest.raises(UsageError, match="does not have a prompt for each task"):
        list(longbench(tmp_path))


def test_every_task_of_longbench_makes_a_prompt_with_its_context():
    assert all("{context}" in kind.prompt for kind, _ in LONGBENCH.values())


def test_ruler_takes_the_task_from_the_folder_and_the_input_as_it_is(tmp_path):
    written(
        tmp_path / "niah_multikey_1" / "validation.jsonl", {"input": "Needle?", "outputs": ["12", "34"], "length": 9}
    )
    written(tmp_path / "qa_1.jsonl", {"input": "Who?", "outputs": ["Anne", "Emma"], "answer_prefix": " Answer:"})
    needle, question = ruler(tmp_path)
    assert (needle.task, needle.prompt, needle.tokens, needle.chat) == ("niah_multikey_1", "Needle?", 128, False)
    assert needle.score("12") == 0.5
    assert (question.prompt, question.tokens, question.score("emma")) == ("Who? Answer:", 32, 1)


def test_aime_compares_integers(tmp_path):
    written(tmp_path / "aime.jsonl", {"Problem": "1+{1}?", "Answer": 33}, {"problem": "x?", "answer": "033"})
    items = list(aime(tmp_path))
    assert items[0].prompt.startswith("1+{1}?\n")
    assert "\\boxed{}" in items[0].prompt
    assert [item.score("\\boxed{033}") for item in items] == [1, 1]


@pytest.mark.parametrize(
    ("name", "fields", "read", "message"),
    [
        ("vcsum.jsonl", row(), longbench, r"vcsum\.jsonl is not a LongBench task that can be scored"),
        ("qasper.jsonl", row(answers=[]), longbench, r"qasper\.jsonl, line 1.*'answers'"),
        ("trec.jsonl", row(), longbench, r"trec\.jsonl, line 1.*'all_classes'"),
        ("math.jsonl", row(), ruler, "not a RULER task"),
        ("vt.jsonl", row(), ruler, r"vt\.jsonl, line 1.*'outputs'"),
        ("a.jsonl", {"problem": "x", "answer": "1/2"}, aime, r"a\.jsonl, line 1.*not an integer from 0 to 999"),
    ],
)
def test_bad_rows_are_refused(tmp_path, name, fields, read, message):
    written(tmp_path / name, fields)
    with pytest.raises(UsageError, match=message):
        list(read(tmp_path))
