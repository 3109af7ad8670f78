"""Memory of the process while a model is loaded and packed, and what of it is left afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import tiny_models, tiny_multimodal

# Anonymous memory only: the pages of a file that is read are the system's. What loading anything takes, as modules and
# the first products do, is taken before by loading the bundled model.
LOADS = """
import sys, threading, time
from pathlib import Path
from kvchat.engine.model.load import load_model
from kvchat.protocol.messages import Load

def taken():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def watch():
    while not loaded:
        peaks.append(taken())
        time.sleep(0.002)

load_model(Load("bundled", "cpu", "float32", quantize="int8"), lambda stage: None)
before, peaks, loaded = taken(), [], []
watching = threading.Thread(target=watch)
watching.start()
loaded.append(load_model(Load(sys.argv[1], "cpu", "float32", quantize="int8"), lambda stage: None))
watching.join()
print(max(peaks) - before, taken() - before, loaded[0].weight_bytes)
"""
MARGIN = 16 * 2**20  # tokenizer, modules' Python objects, intermediate results of the self-test
VOCAB, HIDDEN = 8192, 1024
LARGEST = 4 * VOCAB * HIDDEN  # the head, in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 122 MiB in bfloat16, 244 in float32."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2816, "num_hidden_layers": 4, "head_dim": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    tiny_multimodal.save(tiny_models.fresh("llama", torch.bfloat16, vocab_size=VOCAB, **sizes, **heads), folder)
    return folder


def loaded(folder: Path, **environ: str) -> tuple[int, int, int]:
    """Bytes above the start at the peak and in the end, and those of the weights."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the system does not tell")
    command = [sys.executable, "-c", LOADS, str(folder)]
    ran = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    peak, left, weights = map(int, ran.stdout.split())
    return peak, left, weights


@pytest.mark.slow("a process imports torch and loads two models")
def test_weights_are_packed_one_after_the_other(folder: Path) -> None:
    """The self-test multiplies several tokens by unpacking a matrix, converted and then scaled: the largest twice."""
    # So that the allocator gives back at once what is freed: counted is what is held.
    peak, _, weights = loaded(folder, MALLOC_MMAP_THRESHOLD_="65536")
    assert peak < weights + 2 * LARGEST + MARGIN
    assert weights + 2 * LARGEST + MARGIN < 4 * sum(tensor.numel() for tensor in _stored(folder))


@pytest.mark.slow("a process imports torch and loads two models")
def test_what_was_freed_while_loading_is_given_back(folder: Path) -> None:
    _, left, weights = loaded(folder)
    assert left < weights + MARGIN


def _stored(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())
