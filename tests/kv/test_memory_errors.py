"""Errors that say that memory ran out, of whatever library."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_runner import loaded

from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError, OutOfMemoryError
from kvchat.kv import prefill
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.geometry import Geometry
from kvchat.kv.manager import explained, is_out_of_memory
from kvchat.kv.memory import available

SHORTAGES = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("the page is out of memory's range"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
]


@pytest.fixture
def session():
    opened = Session(loaded("llama", num_hidden_layers=2))
    yield opened
    opened.close()


@pytest.mark.parametrize("error", SHORTAGES, ids=repr)
def test_a_shortage_is_explained(session, error):
    assert is_out_of_memory(error)
    with pytest.raises(OutOfMemoryError) as caught, explained(session._kv, "answering"):
        raise error
    assert caught.value.hint


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_another_error_stays_what_it_is(session, error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)), explained(session._kv, "answering"):
        raise error


# ---- The plan of a prefill: its bytes, the largest chunk that fits, refusals


CPU = torch.device("cpu")

GEOMETRY_8B = Geometry(32, 32, 8, 128, 128, torch.bfloat16)


def planned(free: int, stored: int = 0, new: int = 20_000, token_bytes: int = 100_000) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(available, "free_bytes", lambda device: free)
        return prefill.prefill_chunk(GEOMETRY_8B, stored, new, token_bytes, [CPU])


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
