"""Errors that say that memory ran out, of whatever library."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from support.tiny_runner import loaded

from kvchat.engine.session import Session
from kvchat.errors import OutOfMemoryError
from kvchat.kv.manager import explained, is_out_of_memory

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
