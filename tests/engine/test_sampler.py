import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvchat.engine.sampler import Sampler, read
from kvchat.errors import EngineError, UsageError
from kvchat.protocol.messages import TEMPERATURE, Sampling

VOCAB = 512


def logits(seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def reference(sampling: Sampling, scores: Tensor, ids: list[int]) -> Tensor:
    """The distribution [vocab] after transformers' own processors."""
    steps = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty) if sampling.repetition_penalty != 1 else None,
        TemperatureLogitsWarper(TEMPERATURE if sampling.temperature is None else sampling.temperature),
        TopKLogitsWarper(sampling.top_k) if sampling.top_k else None,
        TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1 else None,
        MinPLogitsWarper(sampling.min_p) if sampling.min_p else None,
    ]
    batch = scores[None].clone()
    for step in steps:
        batch = step(torch.tensor([ids]), batch) if step else batch
    return batch[0].softmax(0)


def distribution(sampler: Sampler, scores: Tensor) -> Tensor:
    """The distribution [vocab] that a sampler draws from."""
    drawn = []
    sampler._draw = lambda weights, tokens: drawn.append((weights, tokens)) or torch.tensor(0)
    sampler(scores)
    [(weights, tokens)] = drawn
    full = torch.zeros(VOCAB)
    full[torch.arange(VOCAB) if tokens is None else tokens] = weights
    return full / full.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.3),
        Sampling(top_k=20),
        Sampling(top_k=10_000),
        Sampling(top_p=0.9),
        Sampling(top_p=0.05),
        Sampling(top_p=0.4),
        Sampling(top_p=0.999, temperature=2.0),
        Sampling(min_p=0.1),
        Sampling(repetition_penalty=1.3, temperature=1.0),
        Sampling(repetition_penalty=0.8),
        Sampling(top_k=50, top_p=0.8, min_p=0.05, repetition_penalty=1.2, temperature=0.9),
        Sampling(top_p=0.95, min_p=0.02, temperature=1.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
def test_distribution_matches_transformers(sampling, spread):
    seen = list(range(0, VOCAB, 3))
    for seed in range(5):
        scores = logits(seed, spread)
        sampler = Sampler(sampling, VOCAB, "cpu")
        sampler.see(seen)
        made, wanted = distribution(sampler, scores), reference(sampling, scores, seen)
        assert torch.equal(made > 0, wanted > 0)
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-7)


def test_models_own_temperature_is_the_default():
    scores, own = logits(0), Sampler(Sampling(), VOCAB, "cpu", Sampling(temperature=0.3))
    torch.testing.assert_close(distribution(own, scores), reference(Sampling(temperature=0.3), scores, []))
    assert Sampler(Sampling(), VOCAB, "cpu", Sampling(temperature=0.0)).greedy
    assert not Sampler(Sampling(temperature=1.0), VOCAB, "cpu", Sampling(temperature=0.0)).greedy


def test_tokens_are_drawn_by_probability():
    sampling = Sampling(temperature=1.0, top_k=5, top_p=0.95, seed=1)
    sampler, scores, n = Sampler(sampling, VOCAB, "cpu"), logits(0, 1.5), 4000
    counts = torch.bincount(torch.stack([sampler(scores) for _ in range(n)]), minlength=VOCAB) / n
    wanted = reference(sampling, scores, [])
    assert (counts[wanted == 0] == 0).all()
    assert (counts - wanted).abs().max() < 5 * math.sqrt(0.25 / n)


def test_tokens_of_zero_weight_are_never_drawn(monkeypatch):
    for bits in (0, 2**31 - 1):
        monkeypatch.setattr(Tensor, "random_", lambda self, bits=bits, **_options: self.fill_(bits))
        assert read(Sampler(Sampling(min_p=0.9), VOCAB, "cpu")(torch.arange(VOCAB) * 1.0)) == VOCAB - 1


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.8), Sampling(temperature=0.8, top_p=0.9)], ids=str)
def test_similar_logits_usually_draw_the_same_token(sampling):
    """As often as possible for two parties that know one of the distributions each and share random numbers."""
    samplers = [Sampler(replace(sampling, seed=5), VOCAB, "cpu") for _ in range(2)]
    same, bound, draws = 0, 0.0, 2000
    for number in range(draws):
        scores = logits(number, 2.0)
        both = scores, scores + 0.3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(number))
        same += len({read(sampler(one)) for sampler, one in zip(samplers, both, strict=True)}) == 1
        one, other = (reference(sampling, each, []) for each in both)
        apart = float((one - other).abs().sum()) / 2
        bound += (1 - apart) / (1 + apart)
    assert 0.4 < bound / draws < 0.9
    assert same / draws > bound / draws - 4 * math.sqrt(0.25 / draws)


def test_greedy_takes_the_largest_logit_after_the_penalty():
    scores = torch.zeros(VOCAB)
    scores[7], scores[9] = 2.0, 1.9
    assert read(Sampler(Sampling(temperature=0), VOCAB, "cpu")(scores)) == 7
    sampler = Sampler(Sampling(temperature=0, repetition_penalty=1.5), VOCAB, "cpu")
    assert [read(sampler(scores)) for _ in range(3)] == [7, 9, 7]  # a drawn token is penalized from then on


def test_presence_and_frequency_penalties_ignore_the_prompt():
    scores = torch.full((VOCAB,), -9.0)
    scores[7], scores[9] = 2.0, 0.9
    present = Sampler(Sampling(temperature=0, presence_penalty=1.0), VOCAB, "cpu")
    often = Sampler(Sampling(temperature=0, frequency_penalty=0.5), VOCAB, "cpu")
    for sampler in (present, often):
        sampler.see([7] * 10)
    assert [read(present(scores)) for _ in range(5)] == [7] * 5  # 2 - 1 is more than 0.9, however often
    assert [read(often(scores)) for _ in range(5)] == [7, 7, 7, 9, 7]  # 2.0 1.5 1.0, then 0.5 and 0.4
    before = often.state()
    after = [read(often(scores)) for _ in range(4)]
    often.set_state(before)
    assert [read(often(scores)) for _ in range(4)] == after
    liked = Sampler(Sampling(temperature=0, presence_penalty=-2.0), VOCAB, "cpu")
    liked(scores.index_fill(0, torch.tensor([9]), 3.0))
    assert read(liked(scores)) == 9


def test_token_is_a_scalar_on_the_device():
    token = Sampler(Sampling(), VOCAB, "cpu")(logits(0))
    assert (token.shape, token.dtype) == (torch.Size([]), torch.int64)


def draw(sampler: Sampler) -> list[int]:
    return [read(sampler(logits(i))) for i in range(20)]


def test_same_seed_gives_the_same_tokens():
    make = lambda seed: Sampler(Sampling(temperature=1.5, seed=seed), VOCAB, "cpu")  # noqa: E731
    assert draw(make(3)) == draw(make(3))
    assert draw(make(3)) != draw(make(4))
    assert draw(make(None)) != draw(make(None))


def test_rewound_sampler_repeats_and_a_forked_one_does_not():
    sampler = Sampler(Sampling(temperature=1.5, seed=3, repetition_penalty=1.1), VOCAB, "cpu")
    draw(sampler)
    state = sampler.state()
    first = draw(sampler)
    sampler.set_state(state)
    assert draw(sampler) == first
    tries = [first]
    for _ in range(2):
        sampler.set_state(state)
        sampler.fork()
        tries.append(draw(sampler))
    assert tries[0] != tries[1] != tries[2] != tries[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0), Sampling(), Sampling(top_p=0.5), Sampling(top_k=3, min_p=0.5, repetition_penalty=2.0)],
    ids=str,
)
def test_non_finite_logits_raise_when_the_token_is_read(sampling, bad):
    scores = logits(0)
    scores[5] = bad
    token = Sampler(sampling, VOCAB, "cpu")(scores)
    with pytest.raises(EngineError, match="no finite logits"):
        read(token)
    with pytest.raises(EngineError):
        read(Sampler(sampling, VOCAB, "cpu")(torch.full((VOCAB,), -math.inf)))


def test_tokens_ruled_out_by_the_model_are_never_drawn():
    scores = torch.full((VOCAB,), -math.inf)
    scores[100:103] = 0
    for sampling in (Sampling(temperature=0), Sampling(top_p=0.9), Sampling(top_k=400)):
        sampler = Sampler(sampling, VOCAB, "cpu")
        assert {read(sampler(scores)) for _ in range(50)} <= {100, 101, 102}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("stop", ("a", "")),
    ],
)
def test_setting_out_of_range_is_refused_by_name_and_value(name, value):
    with pytest.raises(UsageError, match=name) as caught:
        Sampler(Sampling(**{name: value}), VOCAB, "cpu")
    assert name == "stop" or repr(value) in str(caught.value)


def test_range_limits_are_allowed():
    edges = Sampling(temperature=0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=0.5, max_new_tokens=1, seed=0)
    assert Sampler(edges, VOCAB, "cpu").sampling == edges


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=100, top_p=1e-6),
        Sampling(temperature=1e-5, repetition_penalty=0.01),
        Sampling(temperature=100, repetition_penalty=100, min_p=1 - 1e-16),
        Sampling(top_k=2**70, seed=2**63 - 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_tokens_are_drawn_at_the_range_limits(sampling, spread):
    sampler = Sampler(sampling, VOCAB, "cpu")
    sampler.see([1, 2])
    assert 0 <= read(sampler(logits(0, spread))) < VOCAB


@pytest.mark.cuda
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0), Sampling(top_p=0.9), Sampling(top_k=9, min_p=0.1, repetition_penalty=1.1)],
    ids=str,
)
def test_sampling_does_not_wait_for_the_gpu(sampling):
    sampler, scores = Sampler(sampling, VOCAB, "cuda"), logits(0).cuda()
    sampler(scores)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it does not see every wait
            torch.cuda.set_sync_debug_mode("error")
        token = sampler(scores)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 <= read(token) < VOCAB


def test_advised_settings_apply_entirely_or_not_at_all():
    advised = Sampling(temperature=1.9, top_k=1, repetition_penalty=1.1)
    taken = Sampler(Sampling(seed=3), VOCAB, "cpu", advised).sampling
    assert taken == Sampling(temperature=1.9, top_k=1, repetition_penalty=1.1, seed=3)
    assert Sampler(Sampling(top_k=5), VOCAB, "cpu", advised).sampling.top_k == 5
    own = Sampling(temperature=0.5)
    assert Sampler(own, VOCAB, "cpu", advised).sampling == own
