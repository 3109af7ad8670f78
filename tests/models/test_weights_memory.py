"""A model's weights become adjacent in memory, with the same values."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from support import tiny_models, tiny_multimodal
from support.gguf_files import write_model
from torch import nn
from transformers.utils import logging

from kvchat.kv.memory.pinned import HUGE_PAGE
from kvchat.models import hub, reading
from kvchat.models.fuse import modules
from kvchat.models.load import load_model
from kvchat.models.reading import PIECE, defragment
from kvchat.protocol.messages import Load
from kvchat.units import size


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False), nn.Embedding(5, 3)).to(dtype)


def addresses(module: nn.Module) -> list[tuple[int, int]]:
    """Address and size of each weight, matrices first, as they are moved."""
    weights = sorted(module.parameters(), key=torch.Tensor.dim, reverse=True)
    return [(weight.data_ptr(), weight.nbytes) for weight in weights]


def aligned_size(size: int) -> int:
    """Bytes from one weight of ``size`` to the next: each begins at a multiple of 64, as in torch."""
    return (size + 63) // 64 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_become_adjacent_and_keep_their_values(dtype):
    plain, defragmented = model(dtype), model(dtype)
    defragment(defragmented)
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), defragmented.parameters(), strict=True))
    at = addresses(defragmented)
    assert at[0][0] % HUGE_PAGE == 0
    assert all(begin + aligned_size(size) == following for (begin, size), (following, _) in itertools.pairwise(at))


def test_defragmenting_allocates_one_piece_at_a_time(monkeypatch):
    defragmented = model()
    monkeypatch.setattr(reading, "PIECE", 256)
    requested: list[int] = []
    genuine = reading.aligned
    monkeypatch.setattr(reading, "aligned", lambda size: requested.append(size) or genuine(size))
    defragment(defragmented)
    assert max(requested) <= 256
    assert sum(requested) == sum(aligned_size(size) for _, size in addresses(defragmented))


def test_weights_larger_than_a_piece_are_not_moved(monkeypatch):
    defragmented = model()
    monkeypatch.setattr(reading, "PIECE", 100)
    before = {weight: weight.data_ptr() for weight in defragmented.parameters()}
    defragment(defragmented)
    for weight, address in before.items():
        assert (weight.data_ptr() == address) == (weight.nbytes > 100)


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_get_huge_pages_only_if_tied_to_the_head(monkeypatch, is_tied):
    module = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
    if is_tied:
        module[1].weight = module[0].weight
    seen: list[int] = []
    monkeypatch.setattr(reading, "PIECE", 10)
    monkeypatch.setattr(reading, "use_huge_pages", lambda memory: seen.append(memory.data_ptr()))
    defragment(module)
    assert seen == [module[1].weight.data_ptr()]


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_merging_defragmented_weights_allocates_nothing(monkeypatch, name):
    """Qwen2's projections have biases; pieces end anywhere."""
    monkeypatch.setattr(reading, "PIECE", 80_000)
    merged = tiny_models.fresh(name)
    defragment(merged)
    before = {weight.untyped_storage().data_ptr() for weight in merged.parameters()}
    modules.fuse(merged, None)
    assert {weight.untyped_storage().data_ptr() for weight in merged.parameters() if weight.dim() > 1} <= before


def test_tied_weights_stay_tied():
    tied = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
    tied[1].weight = tied[0].weight
    defragment(tied)
    assert tied[1].weight is tied[0].weight


# ---- Memory of the process while a model is loaded and packed, and afterwards


# The first line is by how many bytes the process grows while large tensors are freed. Each is larger than the hole left
# by the one before, which a small tensor closes. It comes before other imports, whose holes glibc would fill. The other
# lines are for a model that is loaded and packed. Only anonymous memory counts: pages of a file that is read belong to
# the system. The bundled model is loaded first, so that one-time costs such as modules and first products do not count.
PROGRAM = """
import gc, sys, threading, time, torch
from kvchat.models import reading

def taken():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon:"))

torch.ones(31 * 2**20, dtype=torch.uint8)  # once this is freed, glibc keeps what is smaller
small, grown = [], []
with reading.mmap_large_allocations():
    before = taken()
    for size in range(8, 16):
        large = torch.ones(size * 2**20, dtype=torch.uint8)
        small.append(torch.ones(2**10))
        del large
        grown.append(taken() - before)
print(max(grown))

from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

loaded = []

def watch():
    while not loaded:
        peaks.append(taken())
        time.sleep(0.002)

for quantize, dtype in (("int8", "bfloat16"), ("int4", "float32")):
    load_model(Load("bundled", "cpu", dtype, quantize=quantize), lambda stage: None)
    loaded.clear()
    gc.collect()
    reading.malloc_trim()
    before, peaks = taken(), []
    watching = threading.Thread(target=watch)
    watching.start()
    loaded.append(load_model(Load(sys.argv[1], "cpu", dtype, quantize=quantize), lambda stage: None))
    watching.join()
    print(max(peaks) - before, taken() - before, loaded[0].weight_bytes)
"""
MARGIN = 64 * 2**20  # tokenizer, modules, numba's library and loops, oneDNN's buffers, the self-test's results


@pytest.mark.slow("a process imports torch and loads four models")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc/self/status")
def test_loading_frees_memory_and_packs_one_weight_at_a_time(tmp_path):
    """A model of 122 MiB in bfloat16, 244 in float32."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "head_dim": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    tiny_multimodal.save(tiny_models.fresh("llama", torch.bfloat16, vocab_size=8192, **sizes, **heads), tmp_path)
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    grown, *measured = ran.stdout.splitlines()
    assert int(grown) < 16 * 2**20  # of 92; otherwise 28 to 91
    assert len(measured) == 2
    for line in measured:
        peak, left, weights = map(int, line.split())
        # One piece of weights exists twice while it is moved, and the allocator may keep as much again.
        assert peak < weights + 2 * PIECE + MARGIN
        assert left < weights + MARGIN


# ---- Progress of reading weights, for each kind of checkpoint


@pytest.fixture
def clock(monkeypatch):
    """The clock advances one second per reading."""
    seconds = itertools.count()
    monkeypatch.setattr(hub.ByteProgress.__init__, "__defaults__", (lambda: next(seconds),))


def stages_of(path, **options):
    stages = []
    load_model(Load(str(path), "cpu", "float32", **options), stages.append)
    return [stage for stage in stages if stage.startswith("Loading the weights")]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("name", "quantize"), [("llama", "none"), ("llama", "int8"), ("qwen3_moe", "none")])
def test_progress_counts_every_byte_once(tmp_path, name, quantize):
    model = tiny_models.model(name)
    tiny_multimodal.save(model, tmp_path)
    stages = stages_of(tmp_path, quantize=quantize)
    stored = sum(tensor.nbytes for tensor in model.parameters())
    assert stages[-1].startswith(f"Loading the weights ▰▰▰▰▰▰▰▰ {size(stored)} of {size(stored)}")
    assert len(stages) > 10
    assert all(re.search(r"/s · .* left$", stage) for stage in stages[2:])


@pytest.mark.usefixtures("clock")
def test_progress_of_a_gguf_file_begins_with_its_sizes(tmp_path, model):
    write_model(tmp_path / "model.gguf", model, "Q8_0")
    stages = stages_of(tmp_path / "model.gguf")
    assert re.match(r"Loading .* in the file, .* unpacked, .* in int8$", stages[0])
    assert re.match(r"Loading the weights ▰+ (.*) of \1", stages[-1])
    assert len(stages) > 10


@pytest.mark.usefixtures("clock")
def test_progress_is_shown_while_library_output_is_hidden(tmp_path, capfd, monkeypatch):
    tiny_multimodal.save(tiny_models.model("llama"), tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained

    def say(*texts):
        sys.stdout.writelines(texts)
        sys.stderr.writelines(texts)

    def loud(*args, **options):
        say("a banner")
        return read(*args, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", loud)
    load_model(Load(str(tmp_path), "cpu"), say)
    for text in capfd.readouterr():
        assert "Loading the weights ▱" in text
        assert "a banner" not in text


@pytest.mark.usefixtures("clock")
def test_loading_restores_the_previous_tqdm_hook():
    def hook(factory, args, options):
        return factory(*args, **options)

    before = logging.set_tqdm_hook(hook)
    try:
        load_model(Load("bundled", "cpu"), lambda stage: None)
    finally:
        assert logging.set_tqdm_hook(before) is hook
