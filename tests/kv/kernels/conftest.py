"""The device the kernels run on: the interpreter's CPU, or a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter is off where there is a GPU")
    return torch.device(request.param)
