"""The commands in hints install packages into the environment of this kvchat."""

import ast
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvchat import libraries
from kvchat.errors import UsageError
from kvchat.libraries import BITSANDBYTES_LOG, TRANSFORMERS, import_bitsandbytes, prepare_transformers

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_extras_match_pyproject():
    extras = PROJECT["optional-dependencies"]
    assert {name: list(packages) for name, packages in libraries.EXTRAS.items()} == {
        name: extras[name] for name in libraries.EXTRAS
    }


def test_the_install_command_uses_this_python(tmp_path):
    """Needs no index, since pip is already installed. ``cwd``: pip shortens paths below the current folder."""
    ran = subprocess.run(
        libraries.command("pip"), shell=True, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert "already satisfied" in ran.stdout
    assert sys.prefix in ran.stdout


def test_pipx_and_uv_install_where_they_installed_kvchat(tmp_path, monkeypatch):
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


def test_an_externally_managed_python_needs_a_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(libraries.sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(libraries.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "--break-system-packages" not in libraries.command("a")
    (tmp_path / "EXTERNALLY-MANAGED").write_text("")
    assert libraries.command("a").endswith("-m pip install --break-system-packages a")


@pytest.mark.parametrize(
    ("quantize", "device"), [("nf4", "cpu"), ("nf4", "auto"), ("int8", "cuda"), ("int4", "cuda:1")]
)
def test_missing_packages_for_quantization_are_named(monkeypatch, quantize, device):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None if name == "accelerate" else object())
    with pytest.raises(UsageError, match=r"accelerate.* install .*accelerate"):
        libraries.check(quantize, device)
    libraries.check("int8", "cpu")
    libraries.check("auto", "cuda")


# ---- ``pyproject.toml`` declares every imported package, in bounds that allow bug-fix releases


REQUIREMENTS = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
]
DECLARED = {canonicalize_name(requirement.name) for requirement in REQUIREMENTS}


def imported() -> set[str]:
    """The packages that kvchat's files import, also inside functions."""
    names = set()
    for path in (ROOT / "kvchat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "kvchat"}


def test_every_imported_package_is_declared():
    # The distribution that has each package; one that is not installed here counts as named like its package.
    distributions = {"llama_cpp": ["llama-cpp-python"], **packages_distributions()}
    known = {name: {canonicalize_name(one) for one in distributions.get(name, [name])} for name in imported()}
    assert "torch" in known
    assert not [name for name, ones in known.items() if not ones & DECLARED]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_bounds_allow_bug_fix_releases(requirement):
    bounds = {one.operator: one.version for one in requirement.specifier}
    assert not bounds.keys() & {"==", "===", "<=", "~="}
    assert bounds.get("<", "").count(".") < 2, "an upper bound names a minor release"


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_bounds_allow_the_tested_minor_release_but_not_the_next(name):
    (asked,) = (one for one in REQUIREMENTS if one.name == name)
    major, minor, *_ = Version(version(name)).release
    assert asked.specifier.contains(f"{major}.{minor}.99")
    newest = next(one.version for one in asked.specifier if one.operator == "<")
    assert not asked.specifier.contains(f"{newest}.0")


@pytest.mark.parametrize("build", ["", "+cpu", "+cu126", "+cu130", "+rocm7.1"])
def test_any_build_of_torch_is_allowed(build):
    """A user with a GPU has installed the build for it; pip must not replace it."""
    (torch,) = (one for one in REQUIREMENTS if one.name == "torch")
    assert torch.specifier.contains(f"{Version(version('torch')).public}{build}")
    assert torch.url is torch.marker is None


def test_no_extra_requires_torch():
    """It could replace an installed CUDA build."""
    everyone = {"torch", "torchvision", "torchaudio"}
    extras = [Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts]
    assert not everyone & {one.name for one in extras}


# ---- No package downloads compiled code and runs it, even if ``kernels`` is installed


KERNELS = """
from pathlib import Path
from unittest.mock import MagicMock
def get_kernel(*args, **kwargs):
    Path(__file__).with_name("was_asked").touch()
    raise FileNotFoundError
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""
IMPORTING = """
import kvchat.engine
from transformers.integrations import hub_kernels
for name in hub_kernels._HUB_KERNEL_MAPPING:
    hub_kernels.lazy_load_kernel(name)
from kvchat.libraries import import_bitsandbytes
try:
    import_bitsandbytes()
except ImportError:
    pass
"""


@pytest.mark.parametrize("before", [None, ModuleType("kernels")], ids=["absent", "imported before"])
def test_bitsandbytes_finds_no_kernels_and_sys_modules_is_restored(monkeypatch, caplog, before):
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    if before:
        monkeypatch.setitem(sys.modules, "kernels", before)

    def load(name):
        with pytest.raises(ImportError):
            importlib.import_module("kernels")
        logging.getLogger(BITSANDBYTES_LOG).warning("cannot load a kernel")
        return name

    assert import_bitsandbytes(load) == "bitsandbytes"
    assert sys.modules.get("kernels") is before
    assert not caplog.text
    assert logging.getLogger(BITSANDBYTES_LOG).isEnabledFor(logging.WARNING)


def test_a_failed_bitsandbytes_import_restores_sys_modules():
    def load(name):
        raise ImportError(name)

    with pytest.raises(ImportError, match="bitsandbytes"):
        import_bitsandbytes(load)
    assert sys.modules.get("kernels", "absent") == "absent"


@pytest.mark.parametrize(("given", "left"), [(None, "NO"), ("YES", "YES")])
def test_hub_kernels_are_off_unless_the_environment_enables_them(monkeypatch, given, left):
    monkeypatch.delenv(TRANSFORMERS, raising=False)
    if given:
        monkeypatch.setenv(TRANSFORMERS, given)
    prepare_transformers()
    assert os.environ[TRANSFORMERS] == left


def test_the_engines_libraries_download_no_kernels(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text(KERNELS)
    metadata = tmp_path / "kernels-0.18.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n")
    root = Path(importlib.util.find_spec("kvchat").origin).parents[1]
    path = os.pathsep.join((str(tmp_path), str(root)))
    environment = {name: value for name, value in os.environ.items() if name != TRANSFORMERS}
    subprocess.run([sys.executable, "-c", IMPORTING], env={**environment, "PYTHONPATH": path}, check=True, timeout=120)
    assert not (folder / "was_asked").exists()
