"""The commands that hints name install packages where this kvchat is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvchat import libraries
from kvchat.errors import ModelError

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_packages_are_those_of_pyproject() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert {name: list(packages) for name, packages in libraries.EXTRAS.items()} == {
        name: extras[name] for name in libraries.EXTRAS
    }


def test_the_command_is_that_of_this_python() -> None:
    """It runs: pip finds what is installed already, and asks no index."""
    ran = subprocess.run(libraries.command("pip"), shell=True, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "already satisfied" in ran.stdout
    assert sys.prefix in ran.stdout


def test_pipx_and_uv_are_asked_where_they_installed_kvchat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.sys, "prefix", str(tmp_path / "kvchat"))
    monkeypatch.setattr(libraries.sys, "executable", "/a b/python")
    monkeypatch.setattr(libraries.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    assert libraries.command("a>=1", "b") == "uv pip install --python '/a b/python' 'a>=1' b"
    monkeypatch.setattr(libraries.shutil, "which", lambda name: None)
    assert libraries.command("b") == "'/a b/python' -m ensurepip && '/a b/python' -m pip install b"
    (tmp_path / "kvchat").mkdir()
    (tmp_path / "kvchat" / "pipx_metadata.json").write_text("{}")
    monkeypatch.setattr(libraries.shutil, "which", lambda name: f"/bin/{name}")
    assert libraries.command("a>=1", "b") == "pipx inject kvchat 'a>=1' b"


def test_a_systems_own_python_is_told_that_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(libraries.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "--break-system-packages" not in libraries.command("a")
    (tmp_path / "EXTERNALLY-MANAGED").write_text("")
    assert libraries.command("a").endswith("-m pip install --break-system-packages a")


@pytest.mark.parametrize(
    ("quantize", "device"), [("nf4", "cpu"), ("nf4", "auto"), ("int8", "cuda"), ("int4", "cuda:1")]
)
def test_a_missing_package_is_told_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, quantize: str, device: str
) -> None:
    monkeypatch.setattr(libraries, "find_spec", lambda name: None if name == "accelerate" else object())
    with pytest.raises(ModelError, match=r"accelerate.* install .*accelerate"):
        libraries.check(quantize, device)
    libraries.check("int8", "cpu")
    libraries.check("auto", "cuda")
