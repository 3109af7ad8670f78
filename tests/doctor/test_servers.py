"""Commands that start a server: what they hold back of memory, and what is offered on which GPUs."""

from __future__ import annotations

import shlex

import pytest

from kvchat.doctor.servers import commands
from kvchat.nvml import GpuInfo

GIB = 2**30
ADA, AMPERE = GpuInfo("RTX 4090", 24 * GIB, 0, (8, 9)), GpuInfo("RTX 3060", 12 * GIB, 0, (8, 6))


def given(command: str, option: str) -> str:
    words = shlex.split(command)
    return words[words.index(option) + 1]


def test_without_a_gpu_k_v_lie_in_a_quarter_of_the_free_memory() -> None:
    found = commands([], 16 * GIB)
    assert found["vLLM"].startswith("VLLM_CPU_KVCACHE_SPACE=4 vllm serve")
    assert given(found["llama-server"], "--cache-ram") == "4096"
    assert not found["SGLang"]


@pytest.mark.parametrize("gpu", [ADA, AMPERE])
def test_only_gpus_that_calculate_in_8_bits_are_offered_them(gpu: GpuInfo) -> None:
    found = commands([gpu], 64 * GIB)
    assert ("--kv-cache-dtype" in found["vLLM"]) is ("--kv-cache-dtype" in found["SGLang"]) is (gpu is ADA)
    assert given(found["vLLM"], "--kv-offloading-size") == "16"
    assert given(found["llama-server"], "-ctk") == "q8_0"
    assert not any(set(command) & set(";()") for command in found.values()), "a shell takes them for its own"


def test_several_gpus_share_a_model_and_sglangs_host_memory_has_to_be_larger_than_theirs() -> None:
    found = commands([ADA, ADA], 120 * GIB)
    assert given(found["vLLM"], "--tensor-parallel-size") == given(found["SGLang"], "--tensor-parallel-size") == "2"
    assert given(found["SGLang"], "--hicache-ratio") == "1.2"
    assert given(commands([ADA], 120 * GIB)["SGLang"], "--hicache-ratio") == "2.0"
    assert "hierarchical" not in commands([ADA, ADA], 64 * GIB)["SGLang"]
    assert "offloading" not in commands([ADA], 2 * GIB)["vLLM"]
