"""Rows of made-up data sets in their published formats become questions with prompts and scores."""

from __future__ import annotations

import json

import pytest

from kvchat.bench.data_sets import LONGBENCH, aime, longbench, ruler
from kvchat.errors import UsageError


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
