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

loaded = []

def taken():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def watch():
    while not loaded:
        peaks.append(taken())
        time.sleep(0.002)

for quantize, dtype in (("int8", "bfloat16"), ("int4", "float32")):
    load_model(Load("bundled", "cpu", dtype, quantize=quantize), lambda stage: None)
    loaded.clear()
    gc.collect()
    malloc_trim()
    before, peaks = taken(), []
    watching = threading.Thread(target=watch)
    watching.start()
    loaded.append(load_model(Load(sys.argv[1], "cpu", dtype, quantize=quantize), lambda stage: None))
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


@pytest.mark.slow("a process imports torch and loads four models")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_weights_are_packed_one_after_the_other(folder: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", LOADS, str(folder)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("\n") == 2
    for line in ran.stdout.splitlines():
        peak, left, weights = map(int, line.split())
        # A piece of weights is there twice while it is laid out; the allocator may keep as much again meanwhile.
        assert peak < weights + 2 * PIECE + MARGIN
        assert left < weights + MARGIN
