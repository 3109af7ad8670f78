"""``kvchat bench data``: its options arrive."""

from __future__ import annotations

from support.bench_command import asked

from kvchat.bench import data_sets
from kvchat.bench.frame import ModelChoice
from kvchat.bench.settings import Data

OPTIONS = "--mode full --rows 5 --tokens 9 -m there --device cpu --dtype float16 --quantize int8"
CHOICE = ModelChoice("there", "cpu", "float16", "int8")


def test_questions_are_those_of_the_data_set(monkeypatch, tmp_path):
    line = f"data ruler --folder {tmp_path} --samples 3 --seed 7 {OPTIONS}"
    settings, choice = asked(monkeypatch, line, data_sets)
    assert settings == Data(("full",), name="ruler", folder=str(tmp_path), rows=5, samples=3, tokens=9, seed=7)
    assert choice == CHOICE
