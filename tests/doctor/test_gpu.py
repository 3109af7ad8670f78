"""The GPU checks with a fake pynvml and a fake torch."""

import shlex
import sys

import pytest
from support.fake_libraries import torch_like
from support.fake_nvml import FakeGpu, FakeNvml, GiB
from support.memory import Pins
from support.message import lacks

from kvchat.doctor import machine
from kvchat.doctor.installation import Check
from kvchat.doctor.servers import commands
from kvchat.kv.memory import available
from kvchat.nvml import GpuInfo, PcieLink

RTX = GpuInfo("NVIDIA GeForce RTX 4090", 24 * GiB, GiB, (8, 9), None, PcieLink(1, 16), PcieLink(4, 16))


def gpu_with(**readings: object) -> GpuInfo:
    return GpuInfo(**{**vars(RTX), **readings})


def test_the_gpu_check_shows_memory_and_pcie_link():
    shown = (
        "NVIDIA GeForce RTX 4090, 23.0 GiB of 24.0 GiB free, compute capability 8.9, PCIe gen 1 x16, at best gen 4 x16"
    )
    assert machine.gpu(RTX) == Check("GPU", "ok", shown), "a slow idle link is normal"
    assert "fewer lanes" in machine.gpu(gpu_with(link=PcieLink(4, 8))).advice
    assert "7.5 (no bfloat16" in machine.gpu(gpu_with(compute_capability=(7, 5))).found
    unknown = "n/a, memory n/a, compute capability n/a, PCIe n/a, at best n/a"
    assert machine.gpu(GpuInfo()) == Check("GPU", "ok", unknown)


def checks_of(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, missing: tuple[str, ...] = ()) -> list[Check]:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus, missing=missing))
    monkeypatch.setattr(available, "host_free", lambda: 0)  # no free memory: nothing is pinned
    return list(machine.gpu_checks("auto", torch_like(), has_triton=True))


def test_every_gpu_has_a_check(monkeypatch):
    checks = checks_of(monkeypatch, FakeGpu(), FakeGpu("H100", link_max=(5, 16), link=(5, 8)))
    assert [check.name for check in checks] == ["driver", "GPU", "GPU", "device", "pinning", "decode steps"]
    assert checks[0].found == "570.1, 2 GPUs"
    assert [check.state for check in checks[1:3]] == ["ok", "warning"]


@pytest.mark.parametrize(
    "missing", ["Name", "MemoryInfo", "CudaComputeCapability", "PciInfo", "CurrPcieLinkWidth", "MaxPcieLinkGeneration"]
)
def test_missing_nvml_readings_are_no_problem(monkeypatch, missing):
    checks = checks_of(monkeypatch, FakeGpu(), missing=(f"nvmlDeviceGet{missing}",))
    assert all(check.state != "problem" for check in checks)
    assert ("n/a" in checks[1].found) == (missing != "PciInfo")


@pytest.mark.parametrize("missing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_torch_finds_the_gpu_without_nvml(monkeypatch, missing):
    checks = {check.name: check for check in checks_of(monkeypatch, FakeGpu(), missing=(missing,))}
    assert "GPU" not in checks
    assert not lacks(checks["device"].found, "auto", "cuda")


@pytest.mark.parametrize(
    ("version", "torch", "state", "words"),
    [
        (None, torch_like(there=False), "ok", "CPU"),
        (None, torch_like(), "ok", "1 GPU"),
        (None, None, "ok", "CPU"),
        ("570.1", torch_like(cuda=None, there=False), "warning", "570.1, 1 GPU"),
        ("570.1", torch_like(there=False), "warning", "570.1, 1 GPU"),
        ("570.1", torch_like(), "ok", "570.1, 1 GPU"),
    ],
)
def test_a_driver_that_torch_cannot_use_is_a_warning(version, torch, state, words):
    check = machine.driver(version, 1, torch)
    assert (check.state, words in check.found) == (state, True)
    assert bool(check.advice) == (state == "warning")


def test_a_missing_device_is_a_problem():
    assert machine.chosen_device("cuda", torch_like(there=False)).state == "problem"
    missing = machine.chosen_device("cuda:1", torch_like())
    assert (missing.state, "cuda:1" in missing.found) == ("problem", True)
    assert '"cuda:0"' in missing.advice
    assert machine.chosen_device("cuda:0", torch_like()).found == "cuda:0"
    assert not lacks(machine.chosen_device("auto", torch_like(there=False)).found, "auto", "cpu")
    assert not lacks(machine.chosen_device("auto", torch_like()).found, "auto", "cuda")
    assert machine.chosen_device("cpu", torch_like()).found == "cpu"
    assert not lacks(machine.chosen_device("auto", None).found, "auto", "cpu")


def test_pinning_is_tried_and_released(monkeypatch):
    monkeypatch.setattr(machine, "TRIAL_BYTES", 2**20)
    pins = Pins()
    check = machine.pinning(torch_like(), True, pins)
    assert (check.state, check.found.startswith("1.0 MiB tried, ")) == ("ok", True)
    assert (pins.calls, pins.held) == (1, {})
    refused = machine.pinning(torch_like(), True, Pins(fails_at=1))
    assert (refused.state, refused.found) == ("warning", "no more memory may be pinned")
    assert "memlock" in refused.advice
    assert machine.pinning(None, False).state == "ok"
    monkeypatch.setattr(available, "host_free", lambda: 2**19)
    assert machine.pinning(torch_like(), True, pins).found == "n/a"
    assert pins.calls == 1


@pytest.mark.parametrize(
    ("cuda", "triton", "pinned", "words"),
    [
        (False, True, True, "on the CPU"),
        (True, True, True, "CUDA graph with Triton kernels"),
        (True, False, True, "CUDA graph with stock torch operations"),
        (True, True, False, "no CUDA graph"),
    ],
)
def test_the_decode_step_check_names_the_path(cuda, triton, pinned, words):
    check = machine.decode_steps(cuda, triton, pinned)
    assert words in check.found
    assert (check.state == "ok") == ("Triton" in check.found or not cuda)


@pytest.mark.cuda
def test_a_real_gpu_passes_its_checks():
    import torch

    found = {check.name: check for check in machine.gpu_checks("auto", torch, has_triton=True)}
    assert found["pinning"].state == "ok", found["pinning"]
    assert found["GPU"].found.startswith("NVIDIA")
    assert "PCIe gen" in found["GPU"].found


# ---- Commands that start a server: the memory they reserve, and the options for each GPU


GIB = 2**30
ADA, AMPERE = GpuInfo("RTX 4090", 24 * GIB, 0, (8, 9)), GpuInfo("RTX 3060", 12 * GIB, 0, (8, 6))


def value(command: str, option: str) -> str:
    words = shlex.split(command)
    return words[words.index(option) + 1]


def test_cpu_servers_get_a_quarter_of_free_memory():
    found = commands([], 16 * GIB)
    assert found["vLLM"].startswith("VLLM_CPU_KVCACHE_SPACE=4 vllm serve")
    assert value(found["llama-server"], "--cache-ram") == "4096"
    assert not found["SGLang"]


@pytest.mark.parametrize("gpu", [ADA, AMPERE])
def test_only_gpus_with_fp8_get_an_8_bit_kv_cache(gpu):
    found = commands([gpu], 64 * GIB)
    assert ("--kv-cache-dtype" in found["vLLM"]) is ("--kv-cache-dtype" in found["SGLang"]) is (gpu is ADA)
    assert value(found["vLLM"], "--kv-offloading-size") == "16"
    assert value(found["llama-server"], "-ctk") == "q8_0"
    assert not any(set(command) & set(";()") for command in found.values()), "a shell would interpret them"


def test_several_gpus_split_a_model_and_limit_host_caches():
    found = commands([ADA, ADA], 120 * GIB)
    assert value(found["vLLM"], "--tensor-parallel-size") == value(found["SGLang"], "--tensor-parallel-size") == "2"
    assert value(found["SGLang"], "--hicache-ratio") == "1.2"
    assert value(commands([ADA], 120 * GIB)["SGLang"], "--hicache-ratio") == "2.0"
    assert "hierarchical" not in commands([ADA, ADA], 64 * GIB)["SGLang"]
    assert "offloading" not in commands([ADA], 2 * GIB)["vLLM"]
