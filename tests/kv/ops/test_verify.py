"""The kernels' self-test: correct kernels pass in every shape; wrong and broken ones are named."""

import pytest
import torch
from support.random_kv import PLAIN_CELLS, ROUNDED_CELLS, geometry_of

from kvchat.kv.geometry import Geometry
from kvchat.kv.ops import verify
from kvchat.kv.ops.eight_bit_ops import EightBitOps
from kvchat.kv.ops.triton import append, attend, recall, select
from kvchat.kv.ops.triton_ops import EightBitTritonOps


@pytest.fixture(autouse=True)
def without_cached_results():
    verify.kernel_failure.cache_clear()
    yield
    verify.kernel_failure.cache_clear()


@pytest.mark.parametrize(("group", "d", "dtype"), PLAIN_CELLS, ids=str)
def test_correct_kernels_pass_at_heads_of_todays_models(group, d, dtype, device):
    """Three of the forty cells, all of them in the long form."""
    assert verify.kernel_failure(Geometry(1, 2 * group, 2, d, d, dtype), device) == ""


def test_correct_kernels_pass_with_narrow_values(device):
    assert verify.kernel_failure(Geometry(1, 6, 3, 24, 16, torch.bfloat16, page=8, headroom=8), device) == ""


def nothing(*_args, **_options):
    return None


def test_kernels_that_do_nothing_are_named(device, monkeypatch):
    for module, kernels in (
        (append, ["append", "update_bounds"]),
        (select, ["open_pages"]),
        (recall, ["move_pages", "move_tokens", "move_shared"]),
    ):
        for kernel in kernels:
            monkeypatch.setattr(module, kernel, nothing)
    failure = verify.kernel_failure(geometry_of("plain", torch.float16), device)
    assert failure.startswith("wrong results on this machine: ")
    wrong = failure.partition(": ")[2].split(", ")
    assert {"append", "update_bounds", "open_pages", "move_pages", "move_tokens", "move_shared"} <= {*wrong}


def test_wrong_selections_are_named(device, monkeypatch):
    for verb in ("page_scores", "needs_correction", "choose"):
        right = getattr(select, verb)
        monkeypatch.setattr(select, verb, lambda *args, right=right: right(*args) * 0)
    failure = verify.kernel_failure(geometry_of("plain", torch.float16), device)
    assert all(verb in failure for verb in ("page_scores", "needs_correction", "choose"))


def test_wrong_attention_is_named(device, monkeypatch):
    right = attend.attend

    def late(slots, layer, position, query, spec, *rest):
        return right(slots, layer, position, query.roll(1, 0), spec, *rest)

    monkeypatch.setattr(attend, "attend", late)
    failure = verify.kernel_failure(geometry_of("plain", torch.bfloat16), device)
    assert failure.startswith("wrong results on this machine: attend")


def test_triton_errors_are_reported(device, monkeypatch):
    def fails(*_args, **_options):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(append, "append", fails)
    failure = verify.kernel_failure(geometry_of("plain", torch.float16), device)
    assert failure == "RuntimeError: Failed to find C compiler."


# ---- The kernels over 8-bit pages against stock torch, which test_selection.py compares with numpy


# Triton's interpreter truncates to bfloat16: one unit in the last place, also in scales and hence in codes.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize(("group", "d", "dtype"), ROUNDED_CELLS, ids=str)
def test_8_bit_kernels_match_torch_at_heads_of_todays_models(group, d, dtype, device):
    """Two of the forty cells, all of them in the long form."""
    g = Geometry(1, 2 * group, 2, d, d, dtype, headroom=32)
    with torch.inference_mode():
        expected, measured = (verify.outcomes(kind, g, device) for kind in (EightBitOps, EightBitTritonOps))
    off = {name: verify.error(measured[name], expected[name]) for name in expected}
    assert {name: error for name, error in off.items() if error > TOLERANCE[dtype]} == {}
    assert measured["move_pages"][2] > 0


def test_8_bit_kernels_pass_with_narrow_values_and_small_pages(device):
    g = Geometry(1, 6, 3, 24, 16, torch.float16, page=8, headroom=8)
    with torch.inference_mode():
        assert verify.kernel_failure(g, device, quantizes=True) == ""
