"""kvchat doctor: the whole report, printed and as JSON."""

import json
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_libraries import importing, torch_like
from support.fake_nvml import FakeGpu, FakeNvml
from support.hostile import forbidden_in, hostile

from kvchat import paths
from kvchat.doctor import installation, report
from kvchat.doctor.installation import Check
from kvchat.kv.memory import available


@pytest.fixture
def found(monkeypatch):
    """The checks that the report prints."""
    found: list[Check] = []
    monkeypatch.setattr(report, "checks", lambda: iter(found))
    return found


def test_each_check_has_a_line_with_advice(found, capsys):
    found += [Check("torch", "ok", "2.9"), Check("pinning", "warning", "refused", "ulimit -l unlimited")]
    assert report.doctor(as_json=False) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert rows[:2] == [["✓", "ok", "torch", "2.9"], ["!", "warning", "pinning", "refused"]]
    assert rows[2] == ["→", "ulimit", "-l", "unlimited"]
    assert "can run; warnings: 1" in out
    found.append(Check("torch", "problem", "gone"))
    assert report.doctor(as_json=False) == 1
    assert "Problems to fix: 1" in capsys.readouterr().out


def test_control_characters_in_checks_are_escaped(found, capsys):
    found += [Check("GPU", "warning", hostile("name"), hostile("advice"))]
    report.doctor(as_json=False)
    report.doctor(as_json=True)
    out = capsys.readouterr().out
    assert not forbidden_in(out.encode())
    assert "«name»" in out
    assert "«advice»" in out


def test_json_output_lists_the_checks(found, capsys):
    found += [Check("device", "problem", "no GPU", "…")]
    assert report.doctor(as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "usable": False,
        "checks": [{"name": "device", "state": "problem", "found": "no GPU", "advice": "…"}],
    }


def test_this_machine_can_run_kvchat(capsys):
    """tests/cli/test_main_environment.py runs this as a command."""
    code = report.doctor(as_json=True)
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (code, result["usable"], output.err) == (0, True, "")
    names = [check["name"] for check in result["checks"]]
    for name in ("torch", "driver", "pinning", "decode steps", "container", "bundled model", "terminal"):
        assert name in names


def test_a_machine_with_gpus_passes_every_check(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(), FakeGpu(bus_id="00000000:66:00.0")))
    monkeypatch.setattr(available, "host_free", lambda: 0)  # no free memory: nothing is pinned
    modules = {"torch": torch_like(), "transformers": SimpleNamespace(__version__="5.20")}
    monkeypatch.setattr(installation, "import_module", importing(**modules))
    found = list(report.checks())
    names = [check.name for check in found]
    assert all(check.state != "problem" for check in found)
    assert (names.count("GPU"), names.count("NUMA")) == (2, 2)
    assert "8 threads" in found[names.index("processors")].found


def test_the_report_works_without_libraries(monkeypatch):
    monkeypatch.setattr(installation, "import_module", importing())
    found = {check.name: check for check in report.checks()}
    assert "n/a threads" in found["processors"].found
    assert "CPU" in found["decode steps"].found
    assert "terminal" in found


# ---- Python and the libraries: versions, missing or broken ones, and those only a GPU needs


PINS = ["torch<=2.13.0,>=2.9", "transformers<5.24,>=5.17", 'triton>=3.5; extra == "test"']


@pytest.fixture
def installed(monkeypatch):
    """Let only these modules be installed; an error is raised when its module is imported."""

    def install(**modules):
        monkeypatch.setattr(installation, "import_module", importing(**modules))

    monkeypatch.setattr(installation.metadata, "requires", lambda _: PINS)
    install()
    return install


@pytest.fixture
def library(installed):
    def check(name, module):
        installed(**{name: module})
        return installation.library(name)

    return check


def test_versions_outside_the_pins_are_a_warning(library):
    assert library("torch", torch_like()) == Check("torch", "ok", "2.9.1+cu128, CUDA 12.8")
    assert library("torch", torch_like(cuda=None, version="2.13.0+cpu")).found == "2.13.0+cpu, without CUDA"
    for version in ("2.14.0", "2.8.0+cu126"):
        check = library("torch", torch_like(version=version))
        assert (check.state, "<=2.13.0" in check.advice) == ("warning", True)
    assert library("transformers", SimpleNamespace(__version__="5.30.1")).state == "warning"


def test_missing_or_broken_libraries_are_a_problem(library):
    assert installation.library("torch").state == "problem"
    broken = library("torch", OSError("libcudart.so.12: cannot open shared object file\nmore"))
    assert broken.found.endswith("OSError: libcudart.so.12: cannot open shared object file")
    assert library("transformers", RuntimeError()).state == "problem"


def test_triton_without_a_compiler_is_a_warning(monkeypatch, installed):
    monkeypatch.delenv("CC", raising=False)
    compilers: list[str] = []
    monkeypatch.setattr(installation.shutil, "which", lambda name: name if name in compilers else None)
    assert (installation.triton(False).state, installation.triton(True).state) == ("ok", "warning")
    installed(triton=SimpleNamespace(__version__="3.5.0"))
    assert (installation.triton(False).state, installation.triton(True).state) == ("ok", "warning")
    compilers.append("gcc")
    assert installation.triton(True).state == "ok"
    compilers.clear()
    monkeypatch.setenv("CC", "clang-19")
    assert installation.triton(True).state == "ok"


def test_missing_triton_is_a_warning_only_with_a_gpu(installed):
    def found(device, there):
        installed(torch=torch_like(there=there), transformers=SimpleNamespace(__version__="5.20"))
        return {check.name: check for check in installation.library_checks(device)}["Triton"]

    assert found("auto", True).state == "warning"
    assert found("auto", False).state == found("cpu", True).state == "ok"


def test_a_broken_numba_is_only_a_warning(installed):
    installed(numba=SimpleNamespace(__version__="0.68.1"))
    assert installation.numba() == Check("numba", "ok", "0.68.1")
    installed(numba=ImportError("Numba needs NumPy 2.5 or less."))
    check = installation.numba()
    assert (check.state, check.found) == ("warning", "cannot be imported: Numba needs NumPy 2.5 or less.")


def test_missing_libraries_are_all_reported(installed):
    found = {check.name: check for check in installation.library_checks("auto")}
    assert [name for name, check in found.items() if check.state == "problem"] == ["torch", "transformers"]
    assert found["bitsandbytes"].found.startswith("not installed")


# ---- kvchat's own files: settings, the bundled model and the data folder, intact and broken


def test_invalid_settings_are_a_problem_but_missing_ones_are_not():
    check, device = installation.settings()
    assert (check.state, device) == ("ok", "auto")
    assert check.found.startswith(str(paths.config_file()))
    paths.config_file().parent.mkdir(parents=True)
    paths.config_file().write_text('[model]\ndevice = "cpu"\n')
    assert installation.settings()[1] == "cpu"
    paths.config_file().write_text('[model]\ndevise = "cpu"\n')
    check, _ = installation.settings()
    assert (check.state, "devise" in check.advice) == ("problem", True)


def test_misspelled_environment_variables_are_a_warning(monkeypatch):
    assert installation.environment().state == "ok"
    monkeypatch.setenv("KVCHAT_DATADIR", "/data")
    check = installation.environment()
    assert (check.state, "KVCHAT_DATADIR" in check.found, "KVCHAT_DATA_DIR" in check.advice) == ("warning", True, True)


def test_an_unreadable_bundled_model_is_a_problem(tmp_path, monkeypatch):
    assert installation.bundled_model() == Check("bundled model", "ok", f"{paths.bundled_model_dir()}, 75 tensors")
    monkeypatch.setattr(paths, "bundled_model_dir", lambda: tmp_path)
    assert installation.bundled_model().state == "problem"
    (tmp_path / "config.json").write_text("{}")
    for content in (b"", struct.pack("<Q", 100) + b"{", b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert installation.bundled_model().state == "problem"


def test_full_disks_and_unwritable_folders_get_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path / "not" / "yet")
    assert installation.data_folder().state == "ok"
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
        assert "Free some space" in installation.data_folder().advice
    monkeypatch.setattr(paths, "data_dir", lambda: Path("/dev/null/kvchat"))
    assert "KVCHAT_DATA_DIR" in installation.data_folder().advice


def test_the_package_path_is_its_folder():
    assert Path(installation.__file__).parents[1] == paths.PACKAGE
