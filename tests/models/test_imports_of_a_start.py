"""What is imported for a model, and what is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADS = """
import sys
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load
from kvchat.models.support import LATER
load_model(Load(sys.argv[1], "cpu"), lambda stage: None)
heavy = ("sympy", "torchao", "torch._inductor", "torch.distributed.tensor", "torch._dynamo.convert_frame")
print([name for name in heavy if name in sys.modules])
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    pass
import torch
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
print([name for name in LATER if type(sys.modules.get(name)).__name__ == "_Later"])
from transformers.utils import is_torchao_available
print(is_torchao_available())
"""


@pytest.mark.slow("a process imports torch's compiler")
def test_a_model_is_loaded_without_torchs_compiler_which_is_there_when_asked_for():
    done = subprocess.run([sys.executable, "-c", LOADS, "bundled"], capture_output=True, text=True, check=True)
    imported, compiled, in_place, has_torchao = done.stdout.splitlines()
    assert imported == "[]"
    assert compiled == "[2.0, 2.0]"
    assert in_place == "[]"
    pytest.importorskip("torchao")
    assert has_torchao == "True"
