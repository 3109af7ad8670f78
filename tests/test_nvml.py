"""Readings of NVML, with a fake pynvml: what is there, what is missing, and which GPU is read."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.fake_nvml import FakeGpu, FakeNvml, GiB

from kvchat import nvml
from kvchat.nvml import GpuInfo, GpuReader, GpuUsage, PcieLink, PcieTraffic

RTX, H100 = FakeGpu(), FakeGpu("NVIDIA H100", 80 * GiB, capability=(9, 0), uuid="GPU-h100")
MIG = FakeGpu("NVIDIA H100 MIG 1g.10gb", 10 * GiB, uuid="MIG-1g")
Install = Callable[..., None]


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(*gpus: FakeGpu, missing: tuple[str, ...] = (), driver: str | bytes | None = "570.1") -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus, missing=missing, driver=driver))

    return install


def test_importing_loads_neither_torch_nor_pynvml():
    code = "import sys, kvchat.nvml; sys.exit(bool({'torch', 'pynvml', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0


def test_what_a_gpu_is_and_what_it_does(pynvml):
    pynvml(RTX)
    reader = GpuReader("0")
    link, link_max = PcieLink(1, 16), PcieLink(4, 16)
    assert reader.info() == GpuInfo(RTX.name, 24 * GiB, GiB, (8, 9), "00000000:65:00.0", link, link_max)
    assert reader.usage() == GpuUsage(GiB, 24 * GiB, 3 * GiB, 45, 61, 123.4)
    assert reader.pcie() == PcieTraffic(to_device=11_200_000_000, to_host=300_000_000)
    pynvml(dataclasses.replace(RTX, bus_id=b"00000000:65:00.0"), driver=b"570.1")
    assert GpuReader("0").info().bus_id == "00000000:65:00.0", "older versions of pynvml return bytes"
    assert nvml.driver_version() == "570.1"


@pytest.mark.parametrize(
    ("missing", "fields"),
    [
        ("Name", {"name"}),
        ("MemoryInfo", {"memory", "memory_used", "used", "total"}),
        ("CudaComputeCapability", {"compute_capability"}),
        ("PciInfo", {"bus_id"}),
        ("CurrPcieLinkWidth", {"link"}),
        ("MaxPcieLinkGeneration", {"link_max"}),
        ("ComputeRunningProcesses", {"process"}),
        ("UtilizationRates", {"utilization"}),
        ("Temperature", {"temperature"}),
        ("PowerUsage", {"power"}),
    ],
)
def test_a_missing_reading_is_none_and_the_others_stay(pynvml, missing, fields):
    pynvml(RTX)
    before = {**vars(GpuReader("0").info()), **vars(GpuReader("0").usage())}
    pynvml(RTX, missing=(f"nvmlDeviceGet{missing}",))
    after = {**vars(GpuReader("0").info()), **vars(GpuReader("0").usage())}
    assert {name for name in before if before[name] != after[name]} == fields
    links = {"link": PcieLink(1, None), "link_max": PcieLink(None, 16)}
    assert all(after[name] == links.get(name) for name in fields)


@pytest.mark.parametrize("driver", ["no library", "no driver"])
def test_without_a_driver_every_reading_is_missing(pynvml, monkeypatch, driver):
    pynvml(RTX, driver=None)
    if driver == "no library":
        monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    reader = GpuReader("0")
    assert not reader.found
    assert (reader.info(), reader.usage()) == (GpuInfo(), GpuUsage())
    assert (nvml.driver_version(), nvml.all_gpus(), nvml.visible_gpu(0, {})) == (None, (), None)


def test_in_a_container_this_process_is_not_listed(pynvml):
    pynvml(dataclasses.replace(RTX, processes=((os.getpid() + 1, GiB),)))
    assert GpuReader("0").usage().process is None
    pynvml(dataclasses.replace(RTX, processes=((os.getpid(), None),)))
    assert GpuReader("0").usage() == GpuUsage(GiB, 24 * GiB, None, 45, 61, 123.4), "Windows lists no bytes"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("1", H100.name),
        ("GPU-h100", H100.name),
        ("h100", H100.name),
        ("MIG-1g", MIG.name),
        ("1g", MIG.name),
        ("GPU-1g", None),
        ("7", None),
        ("", None),
    ],
)
def test_a_gpu_is_found_by_number_or_uuid(pynvml, device, name):
    pynvml(RTX, H100, MIG)
    reader = GpuReader(device)
    assert (reader.found, reader.info().name) == (name is not None, name)


@pytest.mark.parametrize(
    ("number", "visible", "name"),
    [
        (0, None, RTX.name),
        (1, None, H100.name),
        (0, "1", H100.name),
        (1, "1,0", RTX.name),
        (1, "1, 0", RTX.name),
        (0, "GPU-h100", H100.name),
        (0, "MIG-1g", MIG.name),
        (1, "0", None),
        (0, "", None),
        (0, "-1", None),
        (5, None, None),
    ],
)
def test_the_gpu_that_cuda_numbers_so(pynvml, number, visible, name):
    pynvml(RTX, H100, MIG)
    reader = nvml.visible_gpu(number, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (reader and reader.info().name) == name


def test_all_gpus_are_there_whether_visible_or_not(pynvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    pynvml(RTX, H100)
    assert [reader.info().name for reader in nvml.all_gpus()] == [RTX.name, H100.name]
    pynvml(RTX, H100, missing=("nvmlDeviceGetCount",))
    assert nvml.all_gpus() == ()


@pytest.mark.cuda
def test_a_real_gpu() -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    reader = GpuReader(str(properties.uuid))
    info, usage = reader.info(), reader.usage()
    assert (info.name, info.compute_capability) == (properties.name, (properties.major, properties.minor))
    assert usage.total == info.memory == pytest.approx(properties.total_memory, rel=0.1)
    assert info.link_max.width is not None
