"""Comparisons as a table, in words and as files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.message import lacks

from kvchat.conversations import comparison
from kvchat.conversations.comparison import COLUMNS, Comparison, first_difference, rows, verdicts
from kvchat.errors import UsageError
from kvchat.protocol.figures import Agreement, Run, Stats
from kvchat.protocol.messages import Sampling, Variant

STATS = Stats(decode_tokens_per_s=41.25, read_share=0.125, recalled_bytes=3 * 2**20, recall_hit_rate=0.9)
VARIANTS = (Variant("full"), Variant("speculative", {"budget": 256}), Variant("sync"), Variant("freeze"))
RUNS = (
    Run("full", {}, ("A", " b"), "eos", Stats(read_share=1.0)),
    Run("speculative", {"budget": 256}, ("A", " c"), "eos", STATS, Agreement(1, 1000, 0.875, 0.04, 1.5)),
    Run("sync", {"budget": None}, ("A", " b"), "eos", Stats(read_share=1.0), Agreement(None, 9, 1.0, None, None)),
    Run("freeze", {}, refusal="It does not fit."),
)
DONE = Comparison("What?", "bundled", Sampling(seed=3), 1234, VARIANTS, RUNS)


def test_the_table_has_a_dash_where_nothing_can_be_measured():
    assert rows(DONE) == [
        ("full", "n/a", "100 %", "0 B", "–", "–", "–", "–"),
        ("speculative budget=256", "41.2", "12 %", "3.0 MiB", "90 %", "1", "88 %", "0.040"),
        ("sync", "n/a", "100 %", "0 B", "–", "all", "100 %", "n/a"),
        ("freeze", "refused", "–", "–", "–", "–", "–", "–"),
    ]
    assert all(len(row) == len(COLUMNS) for row in rows(DONE))


def test_the_verdict_says_where_each_leaves_the_first_and_how_far_it_is():
    speculative, sync, freeze = verdicts(DONE)
    assert not lacks(speculative, "speculative budget=256", "token 2", "88 % of 1,000", "KL 0.040", "1.500")
    assert not lacks(sync, "sync draws the same tokens as full", "a smaller budget")
    assert "It does not fit." in freeze
    assert first_difference(RUNS) == 1
    assert first_difference(RUNS[:1]) is None


def test_a_mode_without_a_budget_is_given_no_advice_on_a_smaller_one():
    full = Run("full", {"resident": 128}, ("A", " b"), "eos", Stats(read_share=1.0), Agreement(None, 9, 1.0, 0.0, 0.0))
    again = replace(DONE, variants=(Variant("full"), Variant("full", {"resident": 128})), runs=(RUNS[0], full))
    assert verdicts(again)[0].endswith("at most).")


def test_files_hold_every_figure_and_none_is_replaced(tmp_path):
    comparison.write(DONE, tmp_path / "one.md")
    text = (tmp_path / "one.md").read_text()
    assert "| speculative budget=256 | 41.2 |" in text
    assert "1,234 tokens of prompt" in text
    comparison.write(DONE, tmp_path / "one.json")
    data = json.loads((tmp_path / "one.json").read_text())
    assert (data["format"], data["version"]) == ("kvchat-comparison", 1)
    assert data["runs"][1]["agreement"]["kl_max"] == 1.5
    for name in ("one.md", "one.txt"):
        with pytest.raises(UsageError):
            comparison.write(DONE, tmp_path / name)
