"""Readings of NVML, with a fake pynvml: all of them, missing ones, and which GPU is read."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_nvml import FakeGpu, FakeNvml, GiB

from kvchat import nvml, paths
from kvchat.nvml import GpuInfo, GpuReader, PcieLink, PcieTraffic
from kvchat.protocol.figures import Gpu

RTX, H100 = FakeGpu(), FakeGpu("NVIDIA H100", 80 * GiB, capability=(9, 0), uuid="GPU-h100")
MIG = FakeGpu("NVIDIA H100 MIG 1g.10gb", 10 * GiB, uuid="MIG-1g")


@pytest.fixture
def pynvml(monkeypatch):
    def install(*gpus, missing=(), driver="570.1"):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus, missing=missing, driver=driver))

    return install


def test_all_readings_of_a_gpu_are_returned(pynvml):
    pynvml(RTX)
    reader = GpuReader("0")
    link, link_max = PcieLink(1, 16), PcieLink(4, 16)
    assert reader.info() == GpuInfo(RTX.name, 24 * GiB, GiB, (8, 9), "00000000:65:00.0", link, link_max)
    assert reader.usage("RTX") == Gpu("RTX", GiB, 24 * GiB, 3 * GiB, 45, 61, 123.4)
    assert reader.pcie() == PcieTraffic(to_device=11_200_000_000, to_host=300_000_000)
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
def test_a_missing_reading_is_none_and_affects_no_other(pynvml, missing, fields):
    pynvml(RTX)
    before = {**vars(GpuReader("0").usage("")), **vars(GpuReader("0").info())}
    pynvml(RTX, missing=(f"nvmlDeviceGet{missing}",))
    after = {**vars(GpuReader("0").usage("")), **vars(GpuReader("0").info())}
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
    assert (reader.info(), reader.usage("RTX")) == (GpuInfo(), Gpu("RTX"))
    assert (nvml.driver_version(), nvml.all_gpus(), nvml.visible_gpu(0, {})) == (None, (), None)


def test_memory_of_an_unlisted_process_is_none(pynvml):
    pynvml(dataclasses.replace(RTX, processes=((os.getpid() + 1, GiB),)))
    assert GpuReader("0").usage("RTX").process is None
    pynvml(dataclasses.replace(RTX, processes=((os.getpid(), None),)))
    assert GpuReader("0").usage("RTX") == Gpu("RTX", GiB, 24 * GiB, None, 45, 61, 123.4), "Windows lists no bytes"


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
def test_cuda_visible_devices_selects_the_gpu(pynvml, number, visible, name):
    pynvml(RTX, H100, MIG)
    reader = nvml.visible_gpu(number, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (reader and reader.info().name) == name


def test_all_gpus_includes_invisible_ones(pynvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    pynvml(RTX, H100)
    assert [reader.info().name for reader in nvml.all_gpus()] == [RTX.name, H100.name]
    pynvml(RTX, H100, missing=("nvmlDeviceGetCount",))
    assert nvml.all_gpus() == ()


@pytest.mark.cuda
def test_readings_of_a_real_gpu_match_torch():
    import torch

    properties = torch.cuda.get_device_properties(0)
    reader = GpuReader(str(properties.uuid))
    info, usage = reader.info(), reader.usage("RTX")
    assert (info.name, info.compute_capability) == (properties.name, (properties.major, properties.minor))
    assert usage.total == info.memory == pytest.approx(properties.total_memory, rel=0.1)
    assert info.link_max.width is not None


def test_user_folders_come_from_platformdirs(monkeypatch, tmp_path):
    monkeypatch.delenv("KVCHAT_CONFIG")
    monkeypatch.delenv("KVCHAT_DATA_DIR")
    for name in ("CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    assert paths.config_file() == tmp_path / "CONFIG/kvchat/config.toml"
    assert paths.user_themes_dir() == tmp_path / "CONFIG/kvchat/themes"
    assert paths.data_dir() == tmp_path / "DATA/kvchat"
    assert paths.log_file().parent == paths.history_file().parent == tmp_path / "STATE/kvchat"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "CACHE"))
    assert paths.models_dir() == tmp_path / "CACHE/kvchat/models"


def test_environment_variables_move_settings_and_state(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCHAT_CONFIG", str(tmp_path / "mine.toml"))
    monkeypatch.setenv("KVCHAT_DATA_DIR", "~/there")
    assert paths.config_file() == tmp_path / "mine.toml"
    assert paths.user_themes_dir() == tmp_path / "themes"
    assert paths.data_dir() == paths.state_dir() == Path.home() / "there"


def test_named_models_are_found_in_the_cache_or_a_package(tmp_path, monkeypatch):
    named = paths.NAMED["smollm2"]
    assert paths.named_model("smollm2") is None
    assert paths.named_model("nothing") is None
    site, package = tmp_path / "site", named.package.replace("-", "_")
    for file, text in (
        (f"{package}/__init__.py", "raise SystemExit('imported')"),
        (f"{package}/{named.file}", "GGUF"),
        (f"{package}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {named.package}\nVersion: 1\n"),
        (f"{package}-1.dist-info/RECORD", f"{package}/__init__.py,,\n{package}/{named.file},,\n"),
    ):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)
    monkeypatch.syspath_prepend(site)
    assert paths.named_model("smollm2") == site / package / named.file
    paths.models_dir().mkdir(parents=True)
    (paths.models_dir() / named.file).write_text("GGUF")
    assert paths.named_model("smollm2") == paths.models_dir() / named.file


def test_the_version_includes_the_commit_of_a_checkout(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "kvchat")
    assert paths.with_commit("1.2") == "1.2"
    subprocess.run([*git, "init", "-q"], check=True)
    assert paths.with_commit("1.2") == "1.2"  # nothing is committed yet
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert paths.with_commit("1.2") == f"1.2 ({commit[:8]})"
    (tmp_path / "kvchat").mkdir()
    (tmp_path / "kvchat" / "commit.txt").write_text("0123456789abcdef\n")
    assert paths.with_commit("1.2").endswith("(01234567)")
