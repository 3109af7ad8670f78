"""The engine's checks over fakes of torch, NVML and the package metadata."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.memory import Pins

from kvchat.doctor import libraries
from kvchat.doctor.machine import Check
from kvchat.kv.memory import available

GiB = 2**30
PINS = ["torch<=2.13.0,>=2.9", "transformers<5.24,>=5.17", 'triton>=3.5; extra == "test"']


def torch_like(cuda: str | None = "12.8", there: bool = True, version: str = "2.9.1+cu128") -> Any:
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: there, device_count=lambda: 1, current_device=lambda: 0),
        device=lambda kind, index: f"{kind}:{index}",
        get_num_threads=lambda: 8,
    )


class Nvml:
    """One GPU; ``missing`` readings raise, as NVML's do."""

    def __init__(self, missing: tuple[str, ...] = (), width: int = 16, capability: tuple[int, int] = (8, 9)) -> None:
        self.readings = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "570.1",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24 * GiB, used=GiB),
            "nvmlDeviceGetCudaComputeCapability": capability,
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetCurrPcieLinkWidth": width,
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:65:00.0"),
        }
        self.missing = missing

    def __getattr__(self, name: str) -> Any:
        def read(*arguments: object) -> Any:
            if name in self.missing:
                raise RuntimeError("Not Supported")
            return self.readings[name]

        return read


def importing(**modules: Any) -> libraries.Importer:
    def load(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}")
        if isinstance(modules[name], Exception):
            raise modules[name]
        return modules[name]

    return load


def library(name: str, module: Any) -> Check:
    return libraries.library(name, importing(**{name: module}), lambda _: PINS)


def test_versions_inside_and_outside_the_pins():
    assert library("torch", torch_like()) == Check("torch", "ok", "2.9.1+cu128, CUDA 12.8")
    assert library("torch", torch_like(cuda=None, version="2.13.0+cpu")).found == "2.13.0+cpu, without CUDA"
    for version in ("2.14.0", "2.8.0+cu126"):
        check = library("torch", torch_like(version=version))
        assert (check.state, "<=2.13.0" in check.advice) == ("warning", True)
    assert library("transformers", SimpleNamespace(__version__="5.30.1")).state == "warning"


def test_a_library_that_is_missing_or_broken_keeps_kvchat_from_running():
    assert libraries.library("torch", importing(), lambda _: PINS).state == "problem"
    broken = library("torch", OSError("libcudart.so.12: cannot open shared object file\nmore"))
    assert broken.found == "cannot be imported: OSError: libcudart.so.12: cannot open shared object file"
    assert library("transformers", RuntimeError()).state == "problem"


def test_python():
    assert libraries.python((3, 10, 4)).state == "problem"
    assert libraries.python((3, 13, 0)) == Check("Python", "ok", "3.13.0")


def test_a_gpu_with_its_link_now_and_at_best():
    found = libraries.gpu(Nvml(), "handle")
    shown = (
        "NVIDIA GeForce RTX 4090, 23.0 GiB of 24.0 GiB free, compute capability 8.9, PCIe gen 1 x16, at best gen 4 x16"
    )
    assert found == Check("GPU", "ok", shown), "an idle link is slow, which is no fault"
    assert "fewer lanes" in libraries.gpu(Nvml(width=8), "handle").advice
    assert "float16" in libraries.gpu(Nvml(capability=(7, 5)), "handle").advice


@pytest.mark.parametrize("missing", [name for name in Nvml().readings if name != "nvmlDeviceGetName"])
def test_a_missing_reading_is_not_the_end(missing, monkeypatch):
    monkeypatch.setattr(available, "host_free", lambda: 0)  # nothing is pinned here
    modules = {"torch": torch_like(), "transformers": SimpleNamespace(__version__="5.20"), "pynvml": Nvml((missing,))}
    found = {check.name: check for check in libraries.checks("auto", importing(**modules))}
    assert {"torch", "driver", "pinning", "decode steps", "NUMA"} <= found.keys()
    assert all(check.state != "problem" for check in found.values())
    if missing.startswith("nvmlDeviceGet") and "GPU" in found and missing != "nvmlDeviceGetPciInfo":
        assert "n/a" in found["GPU"].found


@pytest.mark.parametrize(
    ("nvml", "torch", "state", "words"),
    [
        (None, torch_like(there=False), "ok", "no NVML; kvchat runs on the CPU"),
        (None, torch_like(), "ok", "no NVML; torch sees 1 GPU"),
        (None, None, "ok", "runs on the CPU"),
        (Nvml(), torch_like(cuda=None, there=False), "warning", "570.1, 1 GPU"),
        (Nvml(), torch_like(there=False), "warning", "570.1, 1 GPU"),
        (Nvml(), torch_like(), "ok", "570.1, 1 GPU"),
    ],
)
def test_the_driver_and_whether_torch_uses_it(nvml, torch, state, words):
    check = libraries.driver(nvml, torch)
    assert (check.state, words in check.found) == (state, True)
    assert bool(check.advice) == (state == "warning")


def test_a_device_that_is_set_and_not_there_is_a_problem():
    assert libraries.chosen_device("cuda", torch_like(there=False)).state == "problem"
    assert libraries.chosen_device("cuda:1", torch_like()).found == "cuda:1 is set, there are 1 GPUs"
    assert libraries.chosen_device("cuda:0", torch_like()).found == "cuda:0"
    assert libraries.chosen_device("auto", torch_like(there=False)).found == "auto is set, cpu is used"
    assert libraries.chosen_device("auto", torch_like()).found == "auto is set, cuda is used"
    assert libraries.chosen_device("cpu", torch_like()).found == "cpu"
    assert libraries.chosen_device("auto", None).found == "auto is set, cpu is used"


def test_pinning_is_tried_and_given_back(monkeypatch):
    monkeypatch.setattr(libraries, "TRIAL_BYTES", 2**20)
    pins = Pins()
    check = libraries.pinning(torch_like(), True, pins)
    assert (check.state, check.found.startswith("1 MiB tried, ")) == ("ok", True)
    assert (pins.calls, pins.held) == (1, {})
    refused = libraries.pinning(torch_like(), True, Pins(fails_at=1))
    assert (refused.state, refused.found) == ("warning", "no more memory may be pinned")
    assert "memlock" in refused.advice
    assert libraries.pinning(None, False).state == "ok"
    monkeypatch.setattr(available, "host_free", lambda: 2**19)
    assert libraries.pinning(torch_like(), True, pins).found == "n/a"
    assert pins.calls == 1


def test_triton_needs_a_compiler_where_it_is_used(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    load = importing(triton=SimpleNamespace(__version__="3.5.0"))
    assert libraries.triton(load, True, lambda name: None).state == "warning"
    assert libraries.triton(load, True, lambda name: "/usr/bin/gcc" if name == "gcc" else None).state == "ok"
    assert libraries.triton(load, False, lambda name: None).state == "ok"
    assert libraries.triton(importing(), False).state == "ok"
    assert libraries.triton(importing(), True).state == "warning"
    monkeypatch.setenv("CC", "clang-19")
    assert libraries.triton(load, True, lambda name: None).state == "ok"


@pytest.mark.parametrize(
    ("cuda", "triton", "pinned", "words"),
    [
        (False, True, True, "CPU: stock"),
        (True, True, True, "CUDA graph with Triton kernels"),
        (True, False, True, "CUDA graph with stock torch operations"),
        (True, True, False, "no CUDA graph"),
    ],
)
def test_the_way_a_step_takes(cuda, triton, pinned, words):
    check = libraries.path(cuda, triton, pinned)
    assert words in check.found
    assert (check.state == "ok") == ("Triton" in check.found or not cuda)


def test_nothing_at_all_is_reported_too():
    found = {check.name: check for check in libraries.checks("auto", importing())}
    assert [name for name, check in found.items() if check.state == "problem"] == ["torch", "transformers"]
    assert found["bitsandbytes"].found.startswith("not installed")
    assert found["processors"].found.endswith("torch computes with n/a threads")


@pytest.mark.cuda
def test_a_real_gpu():
    found = {check.name: check for check in libraries.checks()}
    assert found["pinning"].state == "ok", found["pinning"]
    assert found["GPU"].found.startswith("NVIDIA")
    assert "PCIe gen" in found["GPU"].found
