"""Comparison modes against their references, in long answers that evict pages and tokens."""

import pytest
import torch
from support.kv_run import Run
from support.mode_rows import COMPARED
from support.toy_model import toy

from kvchat.config.modes import parse
from kvchat.errors import UsageError
from kvchat.kv.inspect import attended
from kvchat.kv.manager import take_checkpoint
from kvchat.kv.modes.comparison.cake import shared_out

OBSERVING = ("snapkv", "pyramidkv", "cake", "h2o")  # select by the queries at the end of a prompt


@pytest.mark.parametrize("row", COMPARED)
def test_read_sets_match_the_reference_over_a_long_answer(row):
    run = Run.of_row(row, toy(("softcap", "window", "sinks"), kv_heads=2, group=3, page=8, seed=5))
    run.prefill(90, chunk=37)
    run.step(95)
    run.check()
    assert not attended(run.kv.state, 2).all(), "some tokens are dropped"
    run.pin([9, 10, 40, 100, 101])
    run.prefill(11)
    run.step(10)
    run.truncate(150)
    run.step(12)
    run.check()


def test_the_window_of_non_retrieval_heads_grows_with_the_prompt():
    run = Run.of_row("razor", toy(("plain", "plain"), page=8)).begun(400, 10)
    run.check()
    assert run.kv.mode.report().stats["recent"] == 80


DROPPING = ("quest", "quest-behind-whole-layers", "arkvale", "shadowkv", "raas", "razor", "h2o")  # during an answer too


@pytest.mark.parametrize("row", DROPPING)
def test_steps_that_drop_tokens_are_not_exact(row):
    run = Run.of_row(row, toy(("plain", "plain", "plain"), page=8, kv_heads=1)).begun(20)
    for _ in range(90):
        run.step()
        assert not run.kv.step.exact or all(bool(attended(run.kv.state, layer).all()) for layer in range(3))


@pytest.mark.parametrize(("mode", "is_given"), [("arkvale", False), ("streaming", True)])
def test_budget_errors_name_only_parameters_of_the_mode(mode, is_given):
    with pytest.raises(UsageError, match="budget = 64") as refused:
        Run(toy(("plain", "plain")), mode, budget=64, **({"sink": 100} if is_given else {}))
    assert ("sink or window" in str(refused.value)) == is_given


def test_reported_whole_layers_are_limited_to_the_model():
    run = Run(toy(("plain", "plain", "plain"), page=8), "quest", budget=64, whole_layers=9)
    assert run.kv.mode.report().params["whole_layers"] == 2


# ---- the queries at the end of a prompt


def test_short_prompts_select_by_the_queries_they_have():
    run = Run(toy(("plain", "plain"), page=8), "snapkv", budget=64)
    run.store_only(120)
    assert run.kv.mode.report().stats == {"observed": 1, "dropped": 56}
    run.step(3)
    run.prefill(5)
    assert run.kv.mode.report().stats == {"observed": 5, "dropped": 64}
    run.step(3)
    run.check()


def test_prompt_queries_survive_checkpoints_and_failed_prompts():
    run = Run(toy(("plain", "plain"), page=8), "snapkv", budget=64).begun(120)
    kv = run.kv
    span, rows = kv.state.prompt.span, kv.state.prompt.rows.clone()
    checkpoint = take_checkpoint(kv.state, 100)
    kv.truncate(100)
    assert kv.state.prompt.span == range(88, 100)
    assert torch.equal(kv.state.prompt.of(0)[1], rows[0, :, :12])
    before = kv.state.prompt.rows.clone()
    kv.begin_prefill(40)
    kv.attention(0, *run.toy.qkv(0, list(range(40)), 100), run.toy.specs[0])
    kv.rollback_prefill()
    kv.state.prompt.commit(100, 4)  # a forward that verifies drafts records no queries
    assert kv.state.prompt.span == range(88, 100)
    assert torch.equal(kv.state.prompt.rows, before)
    kv.restore(checkpoint)
    assert kv.state.prompt.span == span
    assert torch.equal(kv.state.prompt.rows, rows)
    run.step_alone()
    assert kv.state.prompt.span == span, "a decoded token records no query"


@pytest.mark.parametrize("mode", OBSERVING[:3])
def test_a_partly_retracted_answer_keeps_the_prompts_selection(mode):
    """Its last token is processed again, as part of a prompt."""
    run = Run(toy(("plain", "plain"), page=8), mode, budget=64).begun(100, 60)
    before = run.kv.mode.report()
    run.truncate(149)
    run.prefill(1)
    assert run.kv.mode.report() == before
    run.step(3)
    run.check()


# ---- budgets


@pytest.mark.parametrize("name", ["tau1", "tau2"])
def test_layers_share_a_budget_at_the_lowest_taus(name):
    cake = Run(toy(("plain", "plain"), page=8), "cake", budget=64, **{name: 0.1}).kv.mode
    for layer, sharpness in enumerate((1e-6, 1.5e-6)):
        cake.scores(layer, torch.full((64, 2, 32, 600), 1 / 600) + sharpness * torch.linspace(-1, 1, 32)[:, None])
    assert all(cake.preferences)
    assert sum(cake.rooms(600)) == 64
    with pytest.raises(UsageError):
        parse("cake", {name: 0.01})


@pytest.mark.parametrize(
    ("preferences", "most", "parts"),
    [
        ([1.0, 1.0, 2.0], 100, [25, 25, 50]),
        ([1.0, 0.0, 9.0], 60, [25, 15, 60]),
        ([0.0, 0.0, 0.0], 100, [34, 33, 33]),
        ([5.0, 1.0, 1.0], 20, [20, 20, 20]),
    ],
)
def test_layers_share_a_budget_by_preference_up_to_a_limit(preferences, most, parts):
    assert shared_out(100, preferences, most) == parts
