"""Memory of the process while a model is loaded and packed, and what of it is left afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import tiny_models, tiny_multimodal

from kvchat.models.reading import PIECE

# Anonymous memory only: the pages of a file that is read are the system's. What loading anything takes, as modules and
# the first products do, is taken before by loading the bundled model.
LOADS = """
import gc, sys, threading, time
from pathlib import Path
from kvchat.models.load import load_model
from kvchat.models.reading import malloc_trim
from kvchat.protocol.messages import Load

folder, dtype, quantize = sys.argv[1:]

def taken():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def watch():
    while not loaded:
        peaks.append(taken())
        time.sleep(0.002)

load_model(Load("bundled", "cpu", dtype, quantize=quantize), lambda stage: None)
gc.collect()
malloc_trim()
before, peaks, loaded = taken(), [], []
watching = threading.Thread(target=watch)
watching.start()
loaded.append(load_model(Load(folder, "cpu", dtype, quantize=quantize), lambda stage: None))
watching.join()
print(max(peaks) - before, taken() - before, loaded[0].weight_bytes)
"""
MARGIN = 64 * 2**20  # tokenizer, modules, numba's library and loops, buffers of oneDNN, the self-test's results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 122 MiB in bfloat16, 244 in float32."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "head_dim": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    tiny_multimodal.save(tiny_models.fresh("llama", torch.bfloat16, vocab_size=8192, **sizes, **heads), folder)
    return folder


@pytest.mark.slow("a process imports torch and loads two models")
@pytest.mark.parametrize(("quantize", "dtype"), [("int8", "bfloat16"), ("int4", "float32")])
def test_weights_are_packed_one_after_the_other(folder: Path, dtype: str, quantize: str) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("the system does not tell")
    command = [sys.executable, "-c", LOADS, str(folder), dtype, quantize]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    peak, left, weights = map(int, ran.stdout.split())
    # A piece of weights is there twice while it is laid out; as much again may be what the allocator keeps meanwhile.
    assert peak < weights + 2 * PIECE + MARGIN
    assert left < weights + MARGIN
