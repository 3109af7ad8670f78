"""Models that other programs keep on this machine: Ollama's by their names, folders of LM Studio and llama.cpp."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

OLLAMA = "ollama:"  # begins the names of Ollama's models
MODEL_LAYER = "application/vnd.ollama.image.model"
DEFAULT_HOST, DEFAULT_OWNER = "registry.ollama.ai", "library"  # which its names leave out
MAX_MANIFEST_BYTES, MAX_MANIFESTS = 2**20, 2000


def folders() -> list[Path]:
    """The folders that are there in which people and programs keep models."""
    cache = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    named = [
        "~/models",
        *("~/.lmstudio/models", "~/.cache/lm-studio/models"),
        os.environ.get("LLAMA_CACHE") or f"{cache}/llama.cpp",
    ]
    return [path for path in map(_expanded, named) if path.is_dir()]


def ollama() -> Iterator[tuple[str, Path]]:
    """Ollama's models: the name with ``OLLAMA`` before it, and the GGUF file, which has no suffix."""
    given = os.environ.get("OLLAMA_MODELS")
    for folder in map(_expanded, [given] if given else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]):
        manifests = folder / "manifests"
        for place in islice(sorted(_files(manifests)), MAX_MANIFESTS):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                yield _name(place.relative_to(manifests)), _blob(folder, place)


def ollama_file(name: str) -> Path | None:
    """The file of one of Ollama's models by its name, in which ``:latest`` may be left out; None if it is not here."""
    wanted = name if ":" in name.removeprefix(OLLAMA) else f"{name}:latest"
    return next((file for known, file in ollama() if known == wanted), None)


def _files(folder: Path) -> Iterator[Path]:
    """The files in a folder and in those below it; none where it cannot be read."""
    return (Path(place, file) for place, _, files in os.walk(folder) for file in files)


def _name(place: Path) -> str:
    host, owner, *rest, tag = place.parts
    named = [host, owner, *rest]
    if host == DEFAULT_HOST:
        named = rest if owner == DEFAULT_OWNER else [owner, *rest]
    return f"{OLLAMA}{'/'.join(named)}:{tag}"


def _blob(folder: Path, manifest: Path) -> Path:
    """The file of weights that a manifest names.

    Raises:
        OSError: one of them cannot be read; ValueError, KeyError, TypeError, AttributeError: it is no manifest.
    """
    if not manifest.is_file() or manifest.stat().st_size > MAX_MANIFEST_BYTES:
        raise ValueError(manifest)
    layers = json.loads(manifest.read_bytes())["layers"]
    digest = next((str(layer["digest"]) for layer in layers if layer["mediaType"] == MODEL_LAYER), "")
    blob = folder / "blobs" / Path(digest.replace(":", "-")).name
    if not digest or not blob.is_file():
        raise ValueError(manifest)
    return blob


def _expanded(name: str) -> Path:
    return Path(os.path.expanduser(name))
