"""kvchat doctor: the whole report, printed and as JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from support.fake_libraries import importing, torch_like
from support.fake_nvml import FakeGpu, FakeNvml
from support.hostile import forbidden_in, hostile

from kvchat.doctor import installation, report
from kvchat.doctor.installation import Check
from kvchat.kv.memory import available


@pytest.fixture
def found(monkeypatch) -> list[Check]:
    """The report is these checks."""
    found: list[Check] = []
    monkeypatch.setattr(report, "checks", lambda: iter(found))
    return found


def test_a_line_a_check_with_what_to_do(found, capsys):
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


def test_names_of_drivers_and_gpus_are_harmless(found, capsys):
    found += [Check("GPU", "warning", hostile("name"), hostile("advice"))]
    report.doctor(as_json=False)
    report.doctor(as_json=True)
    out = capsys.readouterr().out
    assert not forbidden_in(out.encode())
    assert "«name»" in out
    assert "«advice»" in out


def test_as_json(found, capsys):
    found += [Check("device", "problem", "no GPU", "…")]
    assert report.doctor(as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "usable": False,
        "checks": [{"name": "device", "state": "problem", "found": "no GPU", "advice": "…"}],
    }


def test_this_machine(capsys):
    """As a command of its own it is among those of tests/cli/test_no_home.py."""
    code = report.doctor(as_json=True)
    told = capsys.readouterr()
    said = json.loads(told.out)
    assert (code, said["usable"], told.err) == (0, True, "")
    names = [check["name"] for check in said["checks"]]
    for name in ("torch", "driver", "pinning", "decode steps", "container", "bundled model", "terminal"):
        assert name in names


def test_a_gpu_goes_through_all_checks(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(), FakeGpu(bus_id="00000000:66:00.0")))
    monkeypatch.setattr(available, "host_free", lambda: 0)  # nothing is pinned here
    modules = {"torch": torch_like(), "transformers": SimpleNamespace(__version__="5.20")}
    monkeypatch.setattr(installation, "import_module", importing(**modules))
    found = list(report.checks())
    names = [check.name for check in found]
    assert all(check.state != "problem" for check in found)
    assert (names.count("GPU"), names.count("NUMA")) == (2, 2)
    assert "8 threads" in found[names.index("processors")].found


def test_without_any_library_there_is_a_report(monkeypatch):
    monkeypatch.setattr(installation, "import_module", importing())
    found = {check.name: check for check in report.checks()}
    assert "n/a threads" in found["processors"].found
    assert "CPU" in found["decode steps"].found
    assert "terminal" in found
