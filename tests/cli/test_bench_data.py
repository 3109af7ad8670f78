"""``kvchat bench data``: questions are answered, texts have a perplexity."""

from __future__ import annotations

from support.bench_command import asked

from kvchat.bench import data_sets, perplexity
from kvchat.bench.frame import ModelChoice

OPTIONS = "--mode full --rows 5 --tokens 9 -m there --device cpu --dtype float16 --quantize int8"
CHOICE = ModelChoice("there", "cpu", "float16", "int8")


def test_questions_are_those_of_the_data_set(monkeypatch, tmp_path):
    line = f"data ruler --folder {tmp_path} --samples 3 --seed 7 {OPTIONS}"
    settings, choice = asked(monkeypatch, line, data_sets)
    assert settings == data_sets.Settings("ruler", str(tmp_path), ("full",), rows=5, samples=3, tokens=9, seed=7)
    assert choice == CHOICE


def test_of_texts_the_files_are_passages(monkeypatch, tmp_path):
    (tmp_path / "book.txt").write_text("one two")
    settings, choice = asked(monkeypatch, f"data pg19 --folder {tmp_path} {OPTIONS}", perplexity)
    assert settings == perplexity.Settings(("full",), 9, 5, (str(tmp_path / "book.txt"),))
    assert choice == CHOICE
