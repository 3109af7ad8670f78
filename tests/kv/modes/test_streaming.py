"""Streaming mode against the paper: vectors and sawtooth, sinks at large offsets and in half precision, refusals."""

from itertools import pairwise

import pytest
import torch
from support.kv_run import Run
from support.kv_steps import use_gpu_path
from support.toy_model import toy

from kvchat.config.modes import parse
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.modes import build, streaming
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.moving_base import MovingBase
from kvchat.kv.modes.streaming import pruned_length
from kvchat.kv.rope import rotate

C = 2048
# L, R, sigma, delta, L*: the paper's example, the branches of Algorithm 1 and their consequences.
VECTORS = [
    (2090, 32, 16, 32, 2058),
    (2079, 32, 16, 32, 2079),
    (2080, 32, 16, 32, 2048),
    (2080, 32, 16, 8, 2064),
    (4000, 32, 16, 32, 2064),
    (2090, 32, 16, 0, 2048),
    (2064, 16, 32, 8, 2056),
    (2048, 1, 0, 0, 2048),
    (2049, 1, 0, 0, 2048),
    (9999, 0, 16, 32, 9999),
]


@pytest.mark.parametrize(("length", "r", "sigma", "delta", "expected"), VECTORS)
def test_pruned_lengths_match_the_papers_vectors(length, r, sigma, delta, expected):
    assert pruned_length(length, C, r, sigma, delta) == expected


def lengths_of(run: Run, steps: int) -> list[int]:
    """Tokens that each of the next steps reads, the new one included."""
    lengths = []
    for _ in range(steps):
        run.step()
        lengths.append(int(attended(run.kv.state, 0)[0].sum()))
    return lengths


@pytest.mark.parametrize(
    ("params", "peak", "valley"),
    [
        ({"R": 16, "sigma": 32, "delta": 8}, 80, 73),  # staged: from C + R down by 8
        ({"R": 16, "sigma": 4, "delta": 8}, 80, 69),  # sigma wins: down to C + 4
        ({"R": 16, "sigma": 32, "delta": 0}, 80, 65),  # hard: down to C
        ({"R": 16, "sigma": 32, "delta": 16}, 80, 65),  # delta >= R: no slack
        ({"R": 1, "sigma": 0, "delta": 0}, 65, 65),  # plain StreamingLLM
        ({"R": 4, "sigma": 10, "delta": 1}, 68, 68),  # every step drops one from C + R
    ],
)
def test_cache_lengths_follow_a_sawtooth(params, peak, valley):
    run = Run(toy(("plain",), kv_heads=1, group=1, page=8), "streaming", budget=64, sink=4, **params).begun(60)
    first = lengths_of(run, 100)
    assert first[: peak - 60] == list(range(61, peak + 1))
    steady = lengths_of(run, 60)
    assert (max(steady), min(steady)) == (peak, valley)
    assert {b - a for a, b in pairwise(steady)} <= {1, valley - peak}


def test_long_chunks_are_pruned_immediately():
    run = Run(toy(("plain",), kv_heads=1, group=1), "streaming", budget=64, sink=4, R=16, sigma=8, delta=4).begun(500)
    assert run.kv.mode.num_cached() == 64 + 8
    assert lengths_of(run, 10)[:9] == [*range(73, 81), 73]


def sinks(run):
    """The first layer's keys of the 4 sinks, and their float64 values at the compacted cache's positions."""
    (slots,) = run.kv.state.slots
    return slots.keys(0)[:, :4], run.toy.qkv(0, [0, 1, 2, 3], min(run.reference.kept[4:]) - 4)[1]


@pytest.mark.parametrize("interleaved", [False, True])
def test_sinks_are_rotated_to_just_before_the_window(interleaved):
    model = toy(("plain", "unrotated"), kv_heads=2, group=1, interleaved=interleaved)
    run = Run(model, "streaming", budget=64, sink=4, R=8, sigma=4, delta=2).begun(300, 150)
    torch.testing.assert_close(*sinks(run), atol=5e-6, rtol=0)
    assert torch.equal(run.kv.state.slots[0].keys(1)[:, :4], run.keys[1][:, :4])


def test_only_steps_that_drop_tokens_rotate_sinks(monkeypatch):
    """On a GPU too, without reading back: the host knows which steps these are."""
    run = Run(toy(("plain", "plain")), "streaming", budget=64, R=16, sigma=32, delta=8)
    use_gpu_path(run.kv)
    run.prefill(70)
    rotated = []

    def recording(*args):
        rotated.append(run.kv.total)
        return rotate(*args)

    monkeypatch.setattr(streaming, "rotate", recording)
    dropped = []
    for _ in range(40):
        before, total = run.kv.mode.num_cached(), run.kv.total
        run.step()
        if run.kv.mode.num_cached() < before + 1:
            dropped.append(total)
    assert rotated == dropped
    assert len(dropped) > 2


def test_bfloat16_sinks_are_rounded_once():
    model = toy(("plain",), dtype=torch.bfloat16)
    run = Run(model, "streaming", budget=64, sink=4, R=1, sigma=0, delta=0).begun(80, 120)
    kept, exact = sinks(run)
    assert float((kept - exact).abs().max()) < 0.05


def test_rotation_stays_exact_at_position_20000(monkeypatch):
    """The reference rotates in float64 from content, so a float32 angle or a cumulative rotation would show here."""
    monkeypatch.setattr("support.toy_model.CONTEXT", 32768)
    model = toy(("plain", "plain"), kv_heads=1, group=1, ids=20100)
    run = Run(model, "streaming", budget=64, sink=4, R=16, sigma=8, delta=4)
    run.store_only(20000)
    run.step(60)
    run.check()


def test_defaults_and_sinks_for_a_system_prompt():
    geometry, traits = toy().geometry, ModelTraits(8192, (None,) * 3)

    def resolved(system_tokens, **params):
        mode = build(parse("streaming", params), geometry, traits, system_tokens)
        return KVManager(geometry, torch.device("cpu"), mode).mode.report().params

    assert resolved(0).items() >= {"budget": 256, "sink": 4, "window": 252, "R": 64, "sigma": 64, "delta": 16}.items()
    assert resolved(40)["sink"] == 40
    assert resolved(500)["sink"] == 64
    assert resolved(500, sink=7)["sink"] == 7
    assert resolved(0, window=100)["budget"] == 104


def test_non_core_tokens_add_capacity_beyond_the_window():
    geometry, traits = toy().geometry, ModelTraits(8192, (None,) * 3)
    modes = [
        build(parse("streaming", params), geometry, traits)
        for params in ({"window": 60, "sink": 4, "B": 32}, {"budget": 96, "sink": 4, "B": 32})
    ]
    assert [(mode.capacity, mode.window) for mode in modes] == [(96, 92)] * 2, "C = S + W + B; L* - S recents are kept"
    kept = [KVManager(geometry, torch.device("cpu"), mode).mode.report().params["window"] for mode in modes]
    assert kept == [60, 60]
    with pytest.raises(UsageError, match=r"budget = 96.*4 \+ 60 \+ 16 = 80"):
        build(parse("streaming", {"budget": 96, "window": 60, "sink": 4, "B": 16}), geometry, traits)


def test_impossible_parameters_are_rejected():
    geometry = toy().geometry
    with pytest.raises(UsageError, match="sink \\+ window"):
        build(parse("streaming", {"budget": 64, "sink": 64}), geometry, ModelTraits(8192, (None,) * 3))
    with pytest.raises(UsageError, match=r"budget = 512.*4 \+ 100 = 104"):
        build(parse("streaming", {"budget": 512, "window": 100}), geometry, ModelTraits(8192, (None,) * 3))
    with pytest.raises(DoesNotFitError, match="change with the length"):
        build(parse("streaming", {}), geometry, ModelTraits(8192, (None,) * 3, "They change with the length."))


# ---- Positions beyond the context: bases move by half of it, and prompts are split where a base begins


CONTEXT, CHUNK = 100, 30


@pytest.fixture
def moving():
    return MovingBase(CONTEXT, (None,), CHUNK)


def test_positions_stay_in_the_context_and_bases_move_by_half(moving):
    positions = torch.arange(1000)
    bases = moving.bases(positions)
    rotated = positions - bases
    assert int(rotated.max()) == CONTEXT - 1
    assert (rotated[CONTEXT:] >= CONTEXT // 2).all()
    assert [int(position) for position in positions[1:] if bases[position] != bases[position - 1]] == [
        *range(CONTEXT, 1000, CONTEXT // 2)
    ]
    assert [position for position in range(1, 1000) if moving.begins_base(position)] == [*range(CONTEXT, 1000, 50)]
    assert [moving.base_of(position) for position in (0, 99, 100, 149, 150)] == [0, 0, 50, 50, 100]


def test_prompts_are_split_where_a_base_begins(moving):
    total, ends = 20, []
    while total < 400:
        chunk = moving.prompt_tokens(total)
        assert len(set(moving.bases(torch.arange(total, total + chunk)).tolist())) == 1
        assert moving.limits_prompt(total + chunk) == (total >= CONTEXT)
        total += chunk
        ends.append(total)
    assert ends[:5] == [100, 130, 150, 180, 200]
