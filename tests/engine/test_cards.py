"""The time for a token on a card by its data sheet: the sums, and how far they were from measurements."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvchat.bench
from kvchat.config.modes import FullParameters
from kvchat.engine import cards
from kvchat.engine.plan import Observed, any_heads
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.auto import Machine, Setup
from kvchat.kv.geometry import GROWTH_HEADROOM, Geometry
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.full import STAGED_BYTES, STAGED_SHARE
from kvchat.protocol.messages import Load

RESULT = json.loads((Path(kvchat.bench.__file__).parent / "results" / "gpu-decode-32k.json").read_text())


def llama_8b() -> Observed:
    g = Geometry(32, 32, 8, 128, 128, torch.bfloat16, headroom=GROWTH_HEADROOM["cuda"])
    return Observed(None, None, g, ModelTraits(131_072, (None,) * 32, calibration=any_heads(g, "llama")))


def h200(device_free: int = 100 * 2**30) -> Machine:
    rates = RESULT["roofline"]["read"] * 1e9, RESULT["roofline"]["to_device"] * 1e9
    return Machine(*rates, round(RESULT["floor_ms"] / 1000 * rates[0]), device_free, cards.HOST_FREE)


def test_measured_ratios_match_the_committed_measurement():
    given = {mode: {"budget": 2080} for mode in ("streaming", "speculative", "sync")}
    given["speculative"]["rest"] = "none"  # the only choice when it was measured
    computed = cards.computed_ms(Load("an 8B", given=given), h200(), llama_8b(), [32_768])
    for way, expected in cards.MEASURED.items():
        rows = [row for row in RESULT["summary"] if row["variant"] == way]
        measured = next((row["ms"] for row in rows if row.get("change_rate") == 0.25), rows[0]["ms"])
        assert measured / computed[way][32_768] == pytest.approx(expected, abs=0.006), way


def test_8_bit_pages_halve_what_full_reads_over_the_link():
    found = cards.computed_ms(Load("an 8B"), h200(4 * 2**30), llama_8b(), [4096, 65_536])
    assert found["full"][65_536] is None
    assert found["full"][4096] == pytest.approx(RESULT["floor_ms"] + 4096 * 131_072 / h200().read * 1000, rel=0.1)
    exact, quantized = (found[f"full from RAM{pages}"][65_536] for pages in ("", " with 8-bit pages"))
    assert 0.5 < quantized / exact < 0.6
    assert found["streaming"][65_536] < found["speculative"][65_536] < exact


def test_default_budget_costs_as_much_as_a_given_one():
    """The index and first layer that speculative keeps on a card do not cross the link."""
    default, given = (
        cards.computed_ms(Load("an 8B", given=given), h200(), llama_8b(), [131_072])["speculative"][131_072]
        for given in ({}, {"speculative": {"budget": 2048}})
    )
    assert default == pytest.approx(given, rel=1e-6)


@pytest.mark.parametrize(
    ("link", "weights_s", "gains"),
    [(22e9, 0.0096, {0.7: 2.3, 0.85: 3.6, 0.95: 6.4}), (3.5e9, 0.013, {0.7: 2.9, 0.85: 5.2})],
)
def test_gain_of_drafts_over_a_link_matches_the_formula(link, weights_s, gains):
    """About an 8B in 4 bits on a card of 500 GB/s, all but 2,048 tokens in RAM."""
    tokens = 32_768
    machine = Machine(500e9, link, int(weights_s * 500e9), 2**40, cards.HOST_FREE)
    load = Load("an 8B", given={"full": {"resident": 2048}})
    found = cards.computed_ms(load, machine, llama_8b(), [tokens])
    over_link, on_device = (tokens - 2048) * 131_072 / link, weights_s + 2048 * 131_072 / 500e9
    for accepted, gain in gains.items():
        setup = Setup(FullParameters(), False, on_device + over_link, True, link_seconds=over_link)
        mine = setup.seconds / cards.seconds_with_drafts(setup, weights_s, accepted)
        assert mine == pytest.approx(gain, rel=0.1), accepted
    over_link -= min(on_device, min(STAGED_BYTES, 2048 * 131_072 * STAGED_SHARE * 32) / link)
    setup = Setup(FullParameters(), False, on_device + over_link, True, link_seconds=over_link)
    assert found["full from RAM"][tokens] == pytest.approx(1000 * setup.seconds, rel=0.01)
    drafted = found[f"full from RAM{cards.DRAFTED}"][tokens]
    assert drafted == pytest.approx(1000 * cards.seconds_with_drafts(setup, weights_s), rel=0.02)


def test_tokens_over_a_link_have_rows_with_and_without_the_cpu():
    load, tokens = Load("an 8B", given={"full": {"resident": 2048}}), 32_768
    laptop = Machine(256e9, 13e9, 5 * 2**30, 2**40, cards.HOST_FREE)
    alone, both = (cards.computed_ms(load, replace(laptop, cpu=cpu), llama_8b(), [tokens]) for cpu in (0.0, 31e9))
    name = "full from RAM"
    assert f"{name}{cards.ON_LINK}" not in alone
    assert both[f"{name}{cards.ON_LINK}"] == alone[name]
    assert both[name][tokens] < 0.6 * alone[name][tokens]
    drafted = f"{name}{cards.DRAFTED}"
    assert both[drafted] == alone[drafted]  # verifications use the link alone


def test_costs_cover_weights_that_fit_and_valid_contexts():
    exact, *smaller = cards.card_costs(Load("bundled"), "rtx 4060 LAPTOP", cards.CONTEXTS, print)
    assert (exact.card, exact.dtype, exact.quantize) == ("RTX 4060 laptop", "bfloat16", "none")
    assert set(exact.computed_ms["full"]) == {8192}, "its context is 16,384"
    assert exact.floor_ms == pytest.approx(1000 * exact.weights / (cards.REACHED * 256e9), rel=0.2)
    assert {costs.quantize for costs in smaller} == {"int8", "int4", "nf4"}


def test_unknown_and_too_small_cards_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="RTX 3061"):
        cards.card_costs(Load("bundled"), "RTX 3061", cards.CONTEXTS, print)
    monkeypatch.setitem(cards.CARDS, "small", cards.Card(0.02, 100, 10, (8, 6), 50))
    with pytest.raises(DoesNotFitError):
        cards.card_costs(Load("bundled"), "small", cards.CONTEXTS, print)
