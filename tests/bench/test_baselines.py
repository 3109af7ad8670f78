"""Baselines: transformers' caches continue from the stored context, and the model runs as written."""

from __future__ import annotations

import pytest
import torch
from support.shape_runner import filled

from kvchat.bench.beside import baselines
from kvchat.bench.frame import parsed
from kvchat.engine.runner import geometry_of, traits_of
from kvchat.kv.modes import build
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_baselines_continue_from_the_stored_context(tiny_shape, name):
    """Their logits after the same tokens are full mode's."""
    runner = filled(tiny_shape, build(parsed("full", 0), geometry_of(tiny_shape), traits_of(tiny_shape)), 130)
    ids = [0] * 130
    baseline = baselines.build(name, tiny_shape, runner.kv.state, ids, spare=8)
    seen = []
    forward = baseline._forward
    baseline._forward = lambda: seen.append(forward()[0, -1].float()) or seen[-1]
    for _ in range(2):  # what a round leaves is rewound
        baseline.measure([5, 6, 7, 8, 9])
    ours = [runner.step(token) for token in (5, 6, 7, 8, 9)]
    for round_ in (seen[:5], seen[5:]):
        torch.testing.assert_close(torch.stack(round_), torch.stack(ours), atol=1e-4, rtol=1e-3)
    assert baseline.kv_device_bytes >= 130 * runner.kv.state.geometry.token_bytes


def test_baselines_run_the_model_as_transformers_wrote_it(tiny_shape):
    layer = tiny_shape.model.model.layers[0]
    swapped = lambda *args, **kwargs: None  # noqa: E731
    layer.forward = swapped
    try:
        with baselines.as_written(tiny_shape.model):
            assert "forward" not in layer.__dict__
            assert tiny_shape.model.config._attn_implementation == "sdpa"
        assert layer.forward is swapped
        assert tiny_shape.model.config._attn_implementation == "kvchat"
    finally:
        del layer.forward


def test_on_a_cpu_they_have_weights_of_their_own_in_ordinary_memory():
    """kvchat's lie one behind the other, in huge pages, which no user of transformers has."""
    bundled = load_model(Load("bundled", "cpu", "float32"), lambda stage: None)
    plain = baselines.in_ordinary_memory(bundled)
    ours, theirs = dict(bundled.model.named_parameters()), dict(plain.model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, ours[name]) for name, weight in theirs.items())
    storages = {weight.untyped_storage().data_ptr() for weight in theirs.values()}
    assert len(storages) == len(theirs)
    assert not storages & {weight.untyped_storage().data_ptr() for weight in ours.values()}
    ids = torch.tensor([[3, 4, 5]])
    with baselines.as_written(plain.model), baselines.as_written(bundled.model):
        assert torch.allclose(plain.model(ids).logits, bundled.model(ids).logits, atol=1e-4)


def test_packed_weights_are_multiplied_where_transformers_could_not():
    exact, packed = (
        load_model(Load("bundled", "cpu", "float32", quantize=q), lambda stage: None) for q in ("none", "int8")
    )
    ids = torch.tensor([[3, 4, 5]])
    with baselines.as_written(exact.model), baselines.as_written(packed.model):
        expected, found = (model.model(ids).logits for model in (exact, packed))
    assert not torch.equal(expected, found)
    assert (expected - found).norm() < 0.05 * expected.norm()
