"""The plan of a prefill: its bytes, the largest chunk that fits, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvchat.errors import DoesNotFitError
from kvchat.kv import prefill
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available

CPU = torch.device("cpu")

GEOMETRY_8B = Geometry(32, 32, 8, 128, 128, torch.bfloat16)


def planned(free: int, stored: int = 0, new: int = 20_000, token_bytes: int = 100_000) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(available, "free_bytes", lambda device: free)
        return prefill.prefill_chunk(GEOMETRY_8B, stored, new, token_bytes, CPU)


def test_bytes_of_a_prefill_of_an_8b_model():
    """32K tokens: 134 MB of one layer's K/V, held twice at most, whatever the number of layers."""
    layer = 32768 * 8 * 2 * 128 * 2
    assert prefill.staging_bytes(GEOMETRY_8B, 0, 32768) == 2 * layer
    assert prefill.staging_bytes(GEOMETRY_8B, 32768 - 512, 512) == 2 * layer
    both = prefill.prefill_bytes(GEOMETRY_8B, 24576, 8192, 140_000)
    assert both == 2 * layer + 8192 * 140_000 + PREFILL_WORKSPACE


def test_the_chunk_is_the_largest_of_which_two_would_fit():
    sizes = {free: planned(free * 10**9) for free in (1, 2, 3, 4, 6, 80)}
    assert sizes == {1: 512, 2: 4096, 3: 8192, 4: 8192, 6: 16384, 80: 16384}


@given(free=st.integers(10**8, 10**11), stored=st.integers(0, 10**5), new=st.integers(1, 10**5))
def test_a_chunk_fits_or_is_refused(free, stored, new):
    try:
        chunk = planned(free, stored, new)
    except DoesNotFitError:
        return
    last = min(chunk, new)
    assert prefill.prefill_bytes(GEOMETRY_8B, stored + new - last, last, 100_000) <= free
    # Earlier chunks need less: they come after fewer tokens.
    first = prefill.prefill_bytes(GEOMETRY_8B, stored, last, 100_000)
    assert first <= prefill.prefill_bytes(GEOMETRY_8B, stored + new - last, last, 100_000)


def test_a_short_prompt_needs_no_more_than_its_tokens():
    assert planned(310 * 10**6, new=10) == 512
    with pytest.raises(DoesNotFitError):
        planned(310 * 10**6, new=512)


def test_a_refusal_tells_the_numbers():
    with pytest.raises(DoesNotFitError) as refused:
        planned(5 * 10**8, stored=30_000)
    told = str(refused.value)
    assert "20,000 tokens after 30,000" in told
    assert [number for number in ("696 MiB", "512 at a time", "391 MiB", "448 MiB") if number not in told] == []
