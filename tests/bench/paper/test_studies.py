"""The papers' studies: each runs to the end at small sizes and lists published figures next to measured ones."""

import json
from dataclasses import replace

import pytest
import torch
from support import tiny_models
from support.grids import WHOLE
from typer.testing import CliRunner

from kvchat.bench.frame import ModelChoice, parsed
from kvchat.bench.paper import asr_kf_egr, comparison, lazy_pruning
from kvchat.bench.paper.freekv import AblatedParameters
from kvchat.bench.paper.studies import STUDIES, chosen
from kvchat.bench.report import tables
from kvchat.bench.walk import Walk
from kvchat.cli.main import app
from kvchat.config.modes import registered
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.models.load import wrap

SIZES = {
    "asr-kf-egr": (["tokens=60"], ["table-1", "table-3"]),
    "freekv": (
        ["tokens=8", "context=300", "forced=3", "budget=192"],
        [part for part in STUDIES["freekv"][0].parts if part != "comparison"],
    ),
    "synckv": (
        [*("tokens=8", "context=300", "forced=3", "budget=132"), *("longest=400", "lengths=1", "depths=2", "cases=1")],
        ["figure-2a", "table-3", "figure-4"],
    ),
    "lazy-pruning": (["cap=40", "long=48", "short=12", "trials=1"], ["table-1", "table-2"]),
}
EXPLANATION_TOKENS = 80


@pytest.fixture(scope="module")
def results(bundled):
    """Each study, run once at small sizes; the explanation's length is patched because it is not a setting.

    Only the needle study uses the bundled model; the others use a tiny random one with its tokenizer.
    """
    tiny = tiny_models.fresh("llama", vocab_size=bundled.vocab, max_position_embeddings=bundled.context)
    small = wrap(tiny, bundled.tokenizer, "small")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asr_kf_egr, "EXPLANATION_TOKENS", EXPLANATION_TOKENS)
        patched.setattr(lazy_pruning, "WARM_UP", 2)
        studies = {name: chosen(name, sizes) for name, (sizes, _) in SIZES.items()}
        found = {}
        for name, (study, settings) in studies.items():
            patched.setattr(ModelChoice, "load", lambda *_, model=bundled if name == "synckv" else small: model)
            found[name] = study.run(settings, only=SIZES[name][1])
        return found


def measured(result, part):
    return {row["row"]: row["measured"] for row in result["summary"] if row["part"] == part}


@pytest.mark.parametrize("name", SIZES)
def test_every_part_has_a_table_with_published_figures(results, name):
    result = results[name]
    assert not [row for row in result["rows"] if "refused" in row]
    assert json.loads(json.dumps(result)) == result
    found = tables(result)
    assert len(found) == len(SIZES[name][1] or STUDIES[name][0].parts)
    assert any("published" in head for table in found for head in table.heads)


def test_paper_freeze_keeps_fewer_tokens_active_than_full(results):
    rows = measured(results["asr-kf-egr"], "table-1")
    full, paper = rows["full"], rows["freeze:profile=paper,K=32,k=2"]
    assert (full["total tokens"], full["active at the end"], full["compression"]) == (74, 74, 0)
    assert paper["active at the end"] < 70
    published = {row["row"]: row["published"] for row in results["asr-kf-egr"]["summary"] if row["part"] == "table-1"}
    assert published["freeze:profile=paper,K=32,k=2"]["active at the end"] == 170


def test_prefill_times_appear_next_to_published_ones(results):
    rows = measured(results["synckv"], "table-3")
    assert all(row["prefill, s"] > 0 for row in rows.values())
    published = [row["published"]["prefill, s"] for row in results["synckv"]["summary"] if row["part"] == "table-3"]
    assert published == [2.45, 2.19, 2.43, 2.63, 2.45, 2.52, 2.51]


def test_a_higher_tau_corrects_more_heads(results):
    shares = [row["head-steps corrected"] for row in measured(results["freekv"], "corrections").values()]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    similar = measured(results["freekv"], "figure-3a")["mean C of each head"]
    assert -1 <= similar["lowest head"] <= similar["mean"] <= 1
    assert similar["heads above 0.9"] <= similar["heads above 0.84"]


def test_overlaps_and_needle_scores_are_fractions(results):
    assert all(0 < row["overlap"] <= 1 for row in measured(results["synckv"], "figure-2a").values())
    needles = measured(results["synckv"], "figure-4")
    assert needles["full"] == {"score": 1, "lowest cell": 1}
    assert {row["score"] for row in needles.values()} <= {0, 0.5, 1}


def test_explanations_have_the_published_length_and_are_compared(results):
    assert asr_kf_egr.EXPLANATION_TOKENS == 269
    rows = measured(results["asr-kf-egr"], "table-3")
    assert {row["total tokens"] for row in rows.values()} == {EXPLANATION_TOKENS}
    assert rows["full"]["tokens as full's"] == len(results["asr-kf-egr"]["summary"][-1]["ids"])
    assert 0 <= rows["freeze:profile=paper,K=32,k=2"]["tokens as full's"] <= rows["full"]["tokens as full's"]


@pytest.mark.slow("each mode answers, decodes and is timed; the long form runs all of them")
def test_one_table_compares_all_modes_with_full_and_speculative(bundled, monkeypatch):
    monkeypatch.setattr(ModelChoice, "load", lambda self, report: bundled)
    monkeypatch.setattr(comparison, "DEPTHS", (0.5,))
    monkeypatch.setattr(comparison, "ROUNDS", 1)
    sizes = ["context=300", "cases=1", "passages=2", "compared=4"]
    study, settings = chosen("freekv", sizes, modes=() if WHOLE else ("streaming", "quest"), budgets=(128,))
    result = study.run(settings, only=["comparison"])
    rows = measured(result, "comparison")
    assert rows.keys() == set(comparison.variants(settings))
    every = comparison.variants(replace(settings, modes=()))
    assert {variant.partition(":")[0] for variant in every} == set(registered())
    assert [variant for variant, row in rows.items() if "refused" in row] == []
    assert {row["questions"] for row in rows.values()} == {1}
    full, speculative, window = rows["full"], rows["speculative:budget=128"], rows["streaming:budget=128"]
    assert (full["KL"], full["same top token"], full["share read"]) == pytest.approx((0, 1, 1), abs=1e-5)
    assert full["mass covered"] == pytest.approx(1, abs=1e-3)
    assert window["share read"] < speculative["share read"] + 0.2 < 0.9
    assert window["KL"] > speculative["KL"] > 0
    assert window["KL: p against speculative"] == 0.5, "in both passages farther from full"
    assert all(row[name] > 0 for row in rows.values() for name in ("ms a token", "processor ms a token"))
    assert (full["facts: p against full"], speculative["KL: p against speculative"]) == (None, None)
    assert 0 < window["facts: p against full"] <= 1
    (table,) = tables(result)
    assert len(table.rows) == len(rows)
    assert len(every) == len(registered()) + 1, "plus speculative with the paper's profile"


def test_perplexities_match_within_the_cap_and_differ_beyond_it(results):
    short, long = (measured(results["lazy-pruning"], part) for part in ("table-2", "table-1"))
    perplexities = [row["PPL"] for row in short.values()]
    assert perplexities == pytest.approx([perplexities[0]] * 3, rel=1e-4)
    assert len({round(row["PPL"], 3) for row in long.values()}) > 1
    assert short["StreamingLLM"]["speedup"] > 0


def test_every_variant_warms_up_before_the_trials(bundled, monkeypatch):
    study, settings = chosen("lazy-pruning", ["cap=40", "long=48", "trials=2"])
    lengths, figures = [], dict.fromkeys(("ttft", "seconds", "kv", "tpot", "perplexity", "peak"), 1.0)
    monkeypatch.setattr(ModelChoice, "load", lambda self, report: bundled)
    monkeypatch.setattr(lazy_pruning, "_decoded", lambda lab, ids, params: lengths.append(len(ids)) or figures)
    study.run(settings, only=["table-1"])
    assert lengths == 3 * [lazy_pruning.PROMPT + lazy_pruning.WARM_UP] + 2 * 3 * [lazy_pruning.PROMPT + 48]


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
        (["synckv", "--mode", "quest"], "does not compare modes"),
        (["freekv", "--mode", "qest"], 'Did you mean "quest"'),
        (["freekv", "--set", "modes=3"], 'no size "modes"'),
        (["freekv", "--part", "figure-3"], 'has no part "figure-3"'),
    ],
)
def test_bad_input_is_rejected_before_measuring(arguments, message):
    ran = CliRunner().invoke(app, ["bench", "paper", *arguments])
    assert isinstance(ran.exception, UsageError | DoesNotFitError)
    assert message in str(ran.exception)


# ---- FreeKV's ablation: queries from the layer below


PROMPT = [token % 251 for token in range(7, 807)]


def attended(walk, parameters):
    """Masks of the tokens read by three decoded tokens."""
    walk.begin(PROMPT, parameters)
    found = []
    for token in (9, 40, 77):
        walk.step(token)
        found.append(torch.stack([walk.attended(layer) for layer in range(walk.model.layers)]))
    return torch.cat(found, -1)


def test_an_ablation_without_changes_equals_speculative_mode(tiny_shape):
    walk = Walk(tiny_shape)
    budget = {"budget": 192, "tau": 0.8}
    plain = attended(walk, parsed("speculative:budget=192,tau=0.8"))
    assert torch.equal(attended(walk, AblatedParameters(**budget)), plain)
    assert not torch.equal(attended(walk, AblatedParameters(**budget, source="layer below")), plain)


def test_queries_come_from_the_layer_below_at_the_same_step(tiny_shape, monkeypatch):
    """Every layer but the first retrieves with the query of the layer below."""
    from kvchat.kv.modes.freekv import FreeKV

    queries, begin = [], FreeKV.attention_begin
    monkeypatch.setattr(
        FreeKV,
        "attention_begin",
        lambda self, layer, query, key: queries.append(query.clone()) or begin(self, layer, query, key),
    )
    walk = Walk(tiny_shape)
    walk.begin(PROMPT, AblatedParameters(budget=192, tau=2, source="layer below"))
    queries.clear()
    walk.step(9)
    own = list(walk.queries)
    assert torch.allclose(queries[0].float(), own[0])
    assert all(torch.allclose(used.float(), below) for used, below in zip(queries[1:], own, strict=False))
