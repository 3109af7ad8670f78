"""The wheel is complete, contains nothing else, and works once installed."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvchat import paths

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".toml", ".json", ".safetensors", ".md", ".tcss", ".txt", ".typed", ".gz"}
NOT_INCLUDED = (
    *(f"kvchat/{folder}README.md" for folder in ("", "bench/", "cli/", "tui/")),
    "kvchat/CHANGES.md",
    "kvchat/bench/results/",
)

pytestmark = pytest.mark.slow("a wheel is built and installed")


def run(*args: str, **kwargs: object) -> str:
    result = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=600, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def test_the_wheel_contains_exactly_the_package_files(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kept = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kvchat").rglob("*") if p.is_file()}
    kept = {name for name in kept if "__pycache__" not in name and not name.startswith(NOT_INCLUDED)}
    themes = {f"kvchat/themes/{p.name}" for p in (ROOT / "themes").iterdir()}
    commit = {"kvchat/commit.txt"} if (ROOT / ".git").exists() else set()
    assert names == kept | themes | commit
    assert {Path(name).suffix for name in names} <= SUFFIXES
    assert len(themes) >= 2
    assert {
        "kvchat/models/bundled/model.safetensors",
        "kvchat/py.typed",
        "kvchat/config/gpu_profiles/8gb.toml",
    } <= names


def test_license_and_entry_point_are_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "MIT License" in info["LICENSE"]
    assert "kvchat = kvchat.__main__:main" in info["entry_points.txt"]
    assert "License-Expression: MIT" in info["METADATA"]


def test_the_installed_package_finds_its_own_files(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    found = run(
        "-c",
        "from kvchat import paths; print(paths.bundled_model_dir()); print(paths.bundled_themes_dir());"
        "from kvchat.tui import themes; print(sorted(themes.load_all(())[0]))",
        cwd=tmp_path,
        env=env,
    ).splitlines()
    assert found[:2] == [str(installed / "kvchat/models/bundled"), str(installed / "kvchat/themes")]
    assert (installed / "kvchat/models/bundled/model.safetensors").samefile(Path(found[0]) / "model.safetensors")
    assert len(json.loads(found[2].replace("'", '"'))) == len(list(paths.bundled_themes_dir().glob("*.toml")))


def test_the_installed_package_answers(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    # float16 has no compiled loops; those of another copy of kvchat would have to be compiled again.
    command = ["-m", "kvchat", "ask", "Hello", "--max-new-tokens", "3", "--dtype", "float16"]
    assert run(*command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL).strip()
