"""Devices for the kernels: a CPU with Triton's interpreter, and a GPU if there is one."""

import pytest
import torch

triton = pytest.importorskip("triton")


@pytest.fixture
def interpreter():
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter is off on machines with a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return torch.device(request.param)
