"""The GPU's checks with a fake pynvml and a stand-in for torch."""

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


def changed(**readings: object) -> GpuInfo:
    return GpuInfo(**{**vars(RTX), **readings})


def test_a_gpu_with_its_link_now_and_at_best():
    shown = (
        "NVIDIA GeForce RTX 4090, 23.0 GiB of 24.0 GiB free, compute capability 8.9, PCIe gen 1 x16, at best gen 4 x16"
    )
    assert machine.gpu(RTX) == Check("GPU", "ok", shown), "an idle link is slow, which is no fault"
    assert "fewer lanes" in machine.gpu(changed(link=PcieLink(4, 8))).advice
    assert "7.5 (no bfloat16" in machine.gpu(changed(compute_capability=(7, 5))).found
    nothing = "n/a, memory n/a, compute capability n/a, PCIe n/a, at best n/a"
    assert machine.gpu(GpuInfo()) == Check("GPU", "ok", nothing)


def found(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, missing: tuple[str, ...] = ()) -> list[Check]:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus, missing=missing))
    monkeypatch.setattr(available, "host_free", lambda: 0)  # nothing is pinned here
    return list(machine.gpu_checks("auto", torch_like(), has_triton=True))


def test_every_gpu_has_its_line(monkeypatch):
    checks = found(monkeypatch, FakeGpu(), FakeGpu("H100", link_max=(5, 16), link=(5, 8)))
    assert [check.name for check in checks] == ["driver", "GPU", "GPU", "device", "pinning", "decode steps"]
    assert checks[0].found == "570.1, 2 GPUs"
    assert [check.state for check in checks[1:3]] == ["ok", "warning"]


@pytest.mark.parametrize(
    "missing", ["Name", "MemoryInfo", "CudaComputeCapability", "PciInfo", "CurrPcieLinkWidth", "MaxPcieLinkGeneration"]
)
def test_a_missing_reading_is_not_the_end(monkeypatch, missing):
    checks = found(monkeypatch, FakeGpu(), missing=(f"nvmlDeviceGet{missing}",))
    assert all(check.state != "problem" for check in checks)
    assert ("n/a" in checks[1].found) == (missing != "PciInfo")


@pytest.mark.parametrize("missing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_without_nvml_the_gpu_that_torch_sees_is_used(monkeypatch, missing):
    checks = {check.name: check for check in found(monkeypatch, FakeGpu(), missing=(missing,))}
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
def test_the_driver_and_whether_torch_uses_it(version, torch, state, words):
    check = machine.driver(version, 1, torch)
    assert (check.state, words in check.found) == (state, True)
    assert bool(check.advice) == (state == "warning")


def test_a_device_that_is_set_and_not_there_is_a_problem():
    assert machine.chosen_device("cuda", torch_like(there=False)).state == "problem"
    missing = machine.chosen_device("cuda:1", torch_like())
    assert (missing.state, "cuda:1" in missing.found) == ("problem", True)
    assert '"cuda:0"' in missing.advice
    assert machine.chosen_device("cuda:0", torch_like()).found == "cuda:0"
    assert not lacks(machine.chosen_device("auto", torch_like(there=False)).found, "auto", "cpu")
    assert not lacks(machine.chosen_device("auto", torch_like()).found, "auto", "cuda")
    assert machine.chosen_device("cpu", torch_like()).found == "cpu"
    assert not lacks(machine.chosen_device("auto", None).found, "auto", "cpu")


def test_pinning_is_tried_and_given_back(monkeypatch):
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
def test_the_way_a_step_takes(cuda, triton, pinned, words):
    check = machine.decode_steps(cuda, triton, pinned)
    assert words in check.found
    assert (check.state == "ok") == ("Triton" in check.found or not cuda)


@pytest.mark.cuda
def test_a_real_gpu():
    import torch

    found = {check.name: check for check in machine.gpu_checks("auto", torch, has_triton=True)}
    assert found["pinning"].state == "ok", found["pinning"]
    assert found["GPU"].found.startswith("NVIDIA")
    assert "PCIe gen" in found["GPU"].found


# ---- Commands that start a server: what they hold back of memory, and what is offered on which GPUs


GIB = 2**30
ADA, AMPERE = GpuInfo("RTX 4090", 24 * GIB, 0, (8, 9)), GpuInfo("RTX 3060", 12 * GIB, 0, (8, 6))


def given(command: str, option: str) -> str:
    words = shlex.split(command)
    return words[words.index(option) + 1]


def test_without_a_gpu_k_v_lie_in_a_quarter_of_the_free_memory():
    found = commands([], 16 * GIB)
    assert found["vLLM"].startswith("VLLM_CPU_KVCACHE_SPACE=4 vllm serve")
    assert given(found["llama-server"], "--cache-ram") == "4096"
    assert not found["SGLang"]


@pytest.mark.parametrize("gpu", [ADA, AMPERE])
def test_only_gpus_that_calculate_in_8_bits_are_offered_them(gpu):
    found = commands([gpu], 64 * GIB)
    assert ("--kv-cache-dtype" in found["vLLM"]) is ("--kv-cache-dtype" in found["SGLang"]) is (gpu is ADA)
    assert given(found["vLLM"], "--kv-offloading-size") == "16"
    assert given(found["llama-server"], "-ctk") == "q8_0"
    assert not any(set(command) & set(";()") for command in found.values()), "a shell takes them for its own"


def test_several_gpus_share_a_model_and_sglangs_host_memory_has_to_be_larger_than_theirs():
    found = commands([ADA, ADA], 120 * GIB)
    assert given(found["vLLM"], "--tensor-parallel-size") == given(found["SGLang"], "--tensor-parallel-size") == "2"
    assert given(found["SGLang"], "--hicache-ratio") == "1.2"
    assert given(commands([ADA], 120 * GIB)["SGLang"], "--hicache-ratio") == "2.0"
    assert "hierarchical" not in commands([ADA, ADA], 64 * GIB)["SGLang"]
    assert "offloading" not in commands([ADA], 2 * GIB)["vLLM"]
