"""The operations of fused modules against the modules they replace."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kvchat.models.fuse.modules import MergedLinear, Norm, Operations, Output, merge

NORM = Norm(torch.linspace(0.5, 1.5, 16), 1e-5)


class Kernels:
    """Counts its calls and answers with ones."""

    def __init__(self):
        self.calls = []

    def project(self, x, weight, bias, scale, eps, residual, scales):
        self.calls.append("project")
        return torch.ones(*x.shape[:-1], len(weight))

    def gated(self, x, weight, scale, eps, scales):
        self.calls.append("gated")
        return torch.ones(*x.shape[:-1], len(weight) // 2)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("norm", [None, NORM])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_projection_with_norm_and_residual(norm, with_residual):
    x, weight, bias, residual = random(1, 3, 16), random(8, 16), random(8), random(1, 3, 8)
    normed = x if norm is None else norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    expected = normed @ weight.T + bias + (residual if with_residual else 0)
    measured = Operations(None).project(x, weight, bias, norm, residual if with_residual else None)
    torch.testing.assert_close(measured, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_norm_in_float16_with_weights_in_float32(tokens):
    """transformers keeps some models' norms in float32; and 60,000 times a weight is more than float16 holds."""
    x, norm = torch.full((1, tokens, 16), 60_000.0, dtype=torch.float16), Norm(torch.full((16,), 2.0), 1e-5)
    normed = Operations(None).normed(x, norm)
    assert normed.dtype == x.dtype
    torch.testing.assert_close(normed, torch.full_like(x, 2.0))


def test_gate_and_up():
    x, gate, up = random(1, 2, 16), random(24, 16), random(24, 16) + 1
    normed = Operations(None).normed(x, NORM)
    expected = F.silu(normed @ gate.T) * (normed @ up.T)
    torch.testing.assert_close(Operations(None).gated(x, torch.cat([gate, up]), NORM), expected)


def test_the_rotation_follows_new_angles():
    """The signed sine is kept while the same tensor arrives, and only then."""
    operations, query, key = Operations(None), random(1, 4, 3, 8), random(1, 2, 3, 8)
    for step in range(2):
        angle = random(1, 3, 4) + step
        cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
        for x, rotated in zip((query, key), operations.rotate(query, key, cos, sin), strict=True):
            low, high = x.chunk(2, -1)
            expected = torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)
            torch.testing.assert_close(rotated, expected)


def test_angles_in_float32_leave_heads_in_their_own_dtype():
    heads, cos, sin = random(1, 6, 3, 8).bfloat16(), random(1, 3, 8), random(1, 3, 8)
    assert {part.dtype for part in Operations(None).rotate(heads[:, :4], heads[:, 4:], cos, sin)} == {torch.bfloat16}


@pytest.mark.parametrize("tokens", [1, 3])
def test_queries_and_keys_rotate_together_as_alone(tokens):
    heads, cos, sin = random(1, 6, tokens, 8), random(1, tokens, 8), random(1, tokens, 8)
    alone = Operations(None).rotate(heads[:, :4], heads[:, 4:], cos, sin)
    together = Operations(None).rotate_together(heads.clone(), 4, cos, sin)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_kernels_get_single_tokens_only():
    kernels = Kernels()
    operations, weight = Operations(kernels), random(8, 16)
    assert torch.equal(operations.project(random(1, 1, 16), weight), torch.ones(1, 1, 8))
    assert torch.equal(operations.gated(random(1, 1, 16), weight, NORM), torch.ones(1, 1, 4))
    assert kernels.calls == ["project", "gated"]
    operations.project(random(1, 2, 16), weight)
    operations.gated(random(1, 2, 16), weight, NORM)
    operations.project(random(1, 32)[:, ::2], weight)  # not contiguous
    assert kernels.calls == ["project", "gated"]


def test_merged_parameters_are_views():
    parameters = [nn.Parameter(random(2, 4)), nn.Parameter(random(3, 4))]
    before = [parameter.clone() for parameter in parameters]
    merged = merge(parameters)
    assert torch.equal(merged, torch.cat(before))
    merged[2:].zero_()
    assert torch.equal(parameters[0], before[0])
    assert not parameters[1].any()


def test_a_merged_linear_computes_once_and_keeps_nothing():
    linears = [nn.Linear(16, size, bias=True) for size in (8, 4, 4)]
    x = random(1, 2, 16)
    expected = [linear(x) for linear in linears]
    operations = Operations(None)
    products = []
    plain = operations.project
    operations.project = lambda *args: products.append(args) or plain(*args)
    merged = MergedLinear(linears, operations)
    for index in (1, 0, 2):
        torch.testing.assert_close(merged.part(x, index), expected[index])
    assert len(products) == 1
    assert merged._input is None
    torch.testing.assert_close(merged.part(x, 0), expected[0])
    assert len(products) == 2


def test_the_norm_and_the_residual_serve_one_call():
    linear, x, residual = nn.Linear(16, 8), random(1, 2, 16), random(1, 2, 8)
    plain = linear(x)
    output = Output(linear, Operations(None))
    output.residual = residual
    torch.testing.assert_close(output(x), plain + residual)
    torch.testing.assert_close(output(x), plain)
    merged = MergedLinear([linear], Operations(None))
    merged.norm = NORM
    torch.testing.assert_close(merged.part(x, 0), linear(Operations(None).normed(x, NORM)))
    torch.testing.assert_close(merged.part(x, 0), plain)
