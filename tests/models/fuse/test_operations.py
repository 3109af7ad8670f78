"""Operations of fused modules: dtypes and calls. ``test_swap`` checks their results in whole models."""

import pytest
import torch
from torch import nn

from kvchat.models.fuse.modules import MergedLinear, Norm, Operations, Output

NORM = Norm(torch.linspace(0.5, 1.5, 16), 1e-5)


class Kernels:
    """Records its calls and returns ones."""

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


@pytest.mark.parametrize("tokens", [1, 2])
def test_float16_norms_with_float32_weights_do_not_overflow(tokens):
    """transformers keeps some models' norms in float32, and 60,000 times a weight overflows float16."""
    x, norm = torch.full((1, tokens, 16), 60_000.0, dtype=torch.float16), Norm(torch.full((16,), 2.0), 1e-5)
    normed = Operations(None).normed(x, norm)
    assert normed.dtype == x.dtype
    torch.testing.assert_close(normed, torch.full_like(x, 2.0))


def test_float32_angles_keep_the_dtype_of_heads():
    heads, cos, sin = random(1, 6, 3, 8).bfloat16(), random(1, 3, 8), random(1, 3, 8)
    assert {part.dtype for part in Operations(None).rotate(heads[:, :4], heads[:, 4:], cos, sin)} == {torch.bfloat16}


def test_kernels_get_only_single_contiguous_tokens():
    kernels = Kernels()
    operations, weight = Operations(kernels), random(8, 16)
    assert torch.equal(operations.project(random(1, 1, 16), weight), torch.ones(1, 1, 8))
    assert torch.equal(operations.gated(random(1, 1, 16), weight, NORM), torch.ones(1, 1, 4))
    assert kernels.calls == ["project", "gated"]
    operations.project(random(1, 2, 16), weight)
    operations.gated(random(1, 2, 16), weight, NORM)
    operations.project(random(1, 32)[:, ::2], weight)  # not contiguous
    assert kernels.calls == ["project", "gated"]


def test_a_merged_linear_computes_once_and_caches_nothing():
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


def test_norm_and_residual_apply_to_one_call():
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
