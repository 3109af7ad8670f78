"""The studies of the papers: each runs to the end in small sizes, with the published figures beside its own."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench.frame import ModelChoice
from kvchat.bench.paper import asr_kf_egr, lazy_pruning
from kvchat.bench.paper.studies import STUDIES, chosen
from kvchat.bench.paper.study import Lab, forced
from kvchat.bench.plots import paper as draw
from kvchat.bench.report import tables
from kvchat.bench.walk import Walk
from kvchat.cli.main import app
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

SIZES = {
    "asr-kf-egr": (["tokens=60"], ["table-1", "table-3"]),
    "freekv": (["tokens=8", "context=300", "forced=3", "budget=192"], []),
    "synckv": (
        [*("tokens=8", "context=300", "forced=3", "budget=132"), *("longest=400", "lengths=1", "depths=2", "cases=1")],
        ["figure-2a", "figure-2b", "figure-2c", "table-3", "figure-4"],
    ),
    "lazy-pruning": (["cap=40", "long=48", "short=12", "trials=1"], ["table-1", "table-2"]),
}
EXPLANATION_TOKENS = 80


@pytest.fixture(scope="module")
def model():
    return load_model(Load("bundled", "cpu"), lambda stage: None)


@pytest.fixture(scope="module")
def results(model):
    """Each study measured once, in its small sizes; the length of the explanation is no setting but the paper's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ModelChoice, "load", lambda self, report: model)
        patched.setattr(asr_kf_egr, "EXPLANATION_TOKENS", EXPLANATION_TOKENS)
        made = {name: chosen(name, sizes) for name, (sizes, _) in SIZES.items()}
        return {name: study.run(settings, only=SIZES[name][1]) for name, (study, settings) in made.items()}


def measured(result, part):
    return {row["row"]: row["measured"] for row in result["summary"] if row["part"] == part}


@pytest.mark.parametrize("name", SIZES)
def test_tables_and_pictures_of_every_part(results, name, tmp_path):
    result = results[name]
    assert not [row for row in result["rows"] if "refused" in row]
    assert json.loads(json.dumps(result)) == result
    made = tables(result)
    assert len(made) == len(SIZES[name][1] or STUDIES[name][0].parts)
    assert any("published" in head for table in made for head in table.heads)
    draw(result, tmp_path / "figures.svg")
    assert "Figure" in (tmp_path / "figures.svg").read_text() or name == "lazy-pruning"


def test_the_papers_freezing_keeps_less_active_than_full(results):
    rows = measured(results["asr-kf-egr"], "table-1")
    full, paper = rows["full"], rows["freeze:profile=paper,K=32,k=2"]
    assert (full["total tokens"], full["active at the end"], full["compression"]) == (74, 74, 0)
    assert paper["active at the end"] < 70
    published = {row["row"]: row["published"] for row in results["asr-kf-egr"]["summary"] if row["part"] == "table-1"}
    assert published["freeze:profile=paper,K=32,k=2"]["active at the end"] == 170


def test_tau_is_taken_from_what_the_text_scores_where_the_published_one_flags_nothing(model):
    lab = Lab(Walk(model), asr_kf_egr.Settings(context=300, forced=40, tokens=90))
    shares, taus = zip(*asr_kf_egr._thresholds(lab), strict=True)
    assert shares[0] == "tau that flags 10%"
    assert list(taus) == sorted(taus)
    assert taus[0] > asr_kf_egr.THRESHOLD, "which flags nothing"
    decoded, asked = forced(lab), asr_kf_egr._open_prompt(lab)
    active = [
        asr_kf_egr._sensitive(lab, "", asr_kf_egr._by_threshold(tau), decoded, asked)["measured"]
        for tau in (asr_kf_egr.THRESHOLD, taus[-1])
    ]
    assert [row["KL"] > 0 for row in active] == [False, True]
    assert active[1]["active, mean"] < active[0]["active, mean"]


def test_a_prompt_is_timed_where_it_was_read_before(results):
    rows = measured(results["synckv"], "table-3")
    assert all(row["prefill, s"] > 0 for row in rows.values())
    published = [row["published"]["prefill, s"] for row in results["synckv"]["summary"] if row["part"] == "table-3"]
    assert published == [2.45, 2.19, 2.43, 2.63, 2.45, 2.52, 2.51]


def test_more_heads_are_corrected_the_higher_tau_is(results):
    shares = [row["head-steps corrected"] for row in measured(results["freekv"], "corrections").values()]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    (similar,) = (row["matrix"] for row in results["freekv"]["summary"] if row["part"] == "figure-3a")
    assert (len(similar), len(similar[0])) == (8, 8)


def test_nothing_attends_to_what_comes_later(results):
    (drawn,) = (row for row in results["freekv"]["summary"] if row["part"] == "figure-3b")
    first, last = drawn["matrix"][0], drawn["matrix"][-1]
    assert max(first) > 0 == first[-1]
    assert last[-1] > 0
    assert max(max(line) for line in drawn["matrix"]) == 1
    assert 0 < drawn["measured"]["on the last 64"] <= 1


def test_overlaps_are_shares_and_a_step_overlaps_itself_wholly(results):
    (locality,) = (row for row in results["synckv"]["summary"] if row["part"] == "figure-2b")
    assert [line[step] for step, line in enumerate(locality["matrix"])] == [1] * 8
    assert 0 < locality["measured"]["lowest pair"] <= locality["measured"]["adjacent steps"] <= 1
    assert all(0 < row["overlap"] <= 1 for row in measured(results["synckv"], "figure-2a").values())


def test_the_papers_explanation_has_the_published_length_and_the_texts_are_compared(results):
    assert asr_kf_egr.EXPLANATION_TOKENS == 269
    rows = measured(results["asr-kf-egr"], "table-3")
    assert {row["total tokens"] for row in rows.values()} == {EXPLANATION_TOKENS}
    assert rows["full"]["tokens as full's"] == len(results["asr-kf-egr"]["summary"][-1]["ids"])
    assert 0 <= rows["freeze:profile=paper,K=32,k=2"]["tokens as full's"] <= rows["full"]["tokens as full's"]


def test_needles_are_shares_by_depth_and_length_and_drawn_apart(results, tmp_path):
    found = {row["row"]: row for row in results["synckv"]["summary"] if row["part"] == "figure-4"}
    assert found["full"]["matrix"] == [[1], [1]]
    assert found["full"]["axes"] == {"columns": ["400"], "lines": ["0", "1"]}
    assert {row["measured"]["score"] for row in found.values()} <= {0, 0.5, 1}
    draw(results["synckv"], tmp_path / "figures.svg")
    drawn = (tmp_path / "figures.svg").read_text()
    assert all(f"by depth and length: {label}" in drawn for label in found)


def test_pages_are_chosen_otherwise_by_each_ablation(results):
    pooled, sources = (measured(results["freekv"], part) for part in ("pooling", "query-source"))
    assert list(pooled) == ["MeanS", "MaxS", "MeanQK", "MaxQK"]
    assert len({row["KL"] for row in sources.values()}) > 1


def test_within_the_cap_every_way_reads_everything(results):
    short, long = (measured(results["lazy-pruning"], part) for part in ("table-2", "table-1"))
    perplexities = [row["PPL"] for row in short.values()]
    assert perplexities == pytest.approx([perplexities[0]] * 3, rel=1e-4)
    assert len({round(row["PPL"], 3) for row in long.values()}) > 1
    assert short["StreamingLLM"]["speedup"] > 0


def test_a_short_warm_up_of_every_way_comes_before_the_trials(model, monkeypatch):
    study, settings = chosen("lazy-pruning", ["cap=40", "long=48", "trials=2"])
    read, decoded = [], lazy_pruning._decoded
    monkeypatch.setattr(ModelChoice, "load", lambda self, report: model)
    monkeypatch.setattr(lazy_pruning, "_decoded", lambda lab, ids, p: (read.append(len(ids)), decoded(lab, ids, p))[1])
    study.run(settings, only=["table-1"])
    assert read == 3 * [lazy_pruning.PROMPT + lazy_pruning.WARM_UP] + 2 * 3 * [lazy_pruning.PROMPT + 48]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["freekw"], 'Did you mean "freekv"'),
        (["freekv", "--set", "token=3"], 'Did you mean "tokens"'),
        (["freekv", "--set", "tokens=0"], "whole number of 1 to 12 digits"),
        (["freekv", "--set", f"tokens={'9' * 5000}"], "whole number of 1 to 12 digits"),
        (["freekv", "--set", "tokens=1.5"], "whole number of 1 to 12 digits"),
        (["synckv", "--set", "context=99999999"], "context = 99,999,999 does not fit the model. bundled reads"),
        (["lazy-pruning", "--set", "cap=4"], "cap=4"),
        (["freekv", "--part", "figure-3"], 'has no part "figure-3"'),
        (["freekv", "--part", "accuracy", "--plot", "x.svg"], "have no picture"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments, message):
    ran = CliRunner().invoke(app, ["bench", "paper", *arguments])
    assert isinstance(ran.exception, UsageError | DoesNotFitError)
    assert message in str(ran.exception)
