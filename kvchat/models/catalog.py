"""List the models on this machine and tell from their files' headers whether the weights fit.

Covers the bundled model, folders, GGUF files, the cache of the Hugging Face hub, and the models of Ollama, LM Studio
and llama.cpp. Sizes are the same as in ``kvchat plan``; computing them needs no torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvchat import paths
from kvchat.config import profiles
from kvchat.errors import ModelError
from kvchat.kv.memory import available
from kvchat.models import gguf_file, weights
from kvchat.models.stored_tensors import is_packed_by_mlx, read_headers, read_json
from kvchat.models.weights import ITEM_BYTES, Place, Weights
from kvchat.paths import BUNDLED

CONFIG, WEIGHTS, GGUF = "config.json", "model*.safetensors", ".gguf"
MAX_MESSAGE = 200  # characters of an unexpected error
MAX_DEPTH = 3  # the folder itself, its publishers, their models
MAX_FOLDERS = 2000
HUB_NAME = re.compile(r"(?![.~])[\w.-]+/(?![.])[\w.-]+(:[\w./-]+)?")
ENCODER = "mmproj"  # start of the file name of a multimodal model's vision encoder
BFLOAT16_FROM = 2**24  # float32 bytes of the smallest matrix that is faster in bfloat16
OWN_DTYPE_ONLY = ("torchao", "int4")  # kinds of checkpoints that cannot be multiplied in another dtype
OLLAMA = "ollama:"  # prefix of the names of Ollama's models
MODEL_LAYER = "application/vnd.ollama.image.model"
DEFAULT_HOST, DEFAULT_OWNER = "registry.ollama.ai", "library"  # omitted in names


@dataclass(frozen=True)
class FoundModel:
    """A model on this machine or on a server.

    Attributes:
        name: value for ``-m``.
        kind: bundled, folder, GGUF, hub or Ollama; for a server's model the server program.
        weights: None for a model with a ``problem`` and for a server's.
        served: what the server says about its model.
    """

    name: str
    kind: str
    weights: Weights | None = None
    problem: str = ""
    served: str | None = None


def short_name(model: str) -> str:
    """Return a model's name (``Qwen3-4B``) without path, repository owner or cache folder."""
    cached = re.search(r"(?:^|/)models--([^/]+)", model)
    name = cached[1].rpartition("--")[2] if cached else model.rstrip("/").rpartition("/")[2]
    if not name.lower().endswith(GGUF):
        return name or model
    name = re.sub(r"-\d{5}-of-\d{5}$", "", name[: -len(GGUF)])
    return re.sub(r"(?i)[-._](i?q\d\w*|f16|f32|bf16|mxfp4\w*)$", "", name) or name


def find(folders: Iterable[Path]) -> list[FoundModel]:
    """List the bundled model, installed models with short names, those in ``folders``, the hub's and other programs'.

    A model that cannot be read has a ``problem``.
    """
    bundled = _of_folder(BUNDLED, "bundled", paths.bundled_model_dir())
    named = [_of_gguf(name, "GGUF", file) for name in paths.NAMED if (file := paths.named_model(name))]
    within = [model for folder in (*folders, *folders_of_others()) for model in in_folder(folder)]
    others = [_of_gguf(name, "Ollama", file) for name, file in ollama()]
    found = [bundled, *named, *within, *in_hub_cache(), *others]
    return list({model.name: model for model in found}.values())


def in_folder(folder: Path) -> Iterator[FoundModel]:
    """Yield the models in a folder and its subfolders; none if it cannot be read."""
    top = Path(os.path.expanduser(folder))
    for visited, (place, inner, files) in enumerate(os.walk(top), 1):
        here = Path(place)
        for name in sorted(files):  # other programs store GGUF files without a suffix
            if is_chat_model(name) or ("." not in name and gguf_file.is_gguf(here / name)):
                yield _of_gguf(str(here / name), "GGUF", here / name)
        is_model = CONFIG in files and any(here.glob(WEIGHTS))
        if is_model:
            yield _of_folder(str(here), "folder", here)
        deep = len(here.relative_to(top).parts) >= MAX_DEPTH or visited >= MAX_FOLDERS
        inner[:] = [] if deep or is_model else sorted(name for name in inner if not name.startswith("."))


def in_hub_cache() -> Iterator[FoundModel]:
    """Yield the models in the Hugging Face hub's cache, whose location its library's environment variables set."""
    from huggingface_hub import constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except Exception:  # noqa: BLE001  # there is no cache, or it is damaged
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id.lower()):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
        here = newest.snapshot_path
        if (here / CONFIG).exists():
            yield _of_folder(repository.repo_id, "hub", here)
        for name in sorted(str(file.file_path.relative_to(here)) for file in newest.files):
            if is_chat_model(name):
                yield _of_gguf(f"{repository.repo_id}:{name}", "hub", here / name)


def at(path: Path) -> FoundModel | None:
    """Return the model in the folder or GGUF file that the user typed, named as typed; None if there is none."""
    here = ollama_file(str(path)) if str(path).startswith(OLLAMA) else None
    here = here or Path(os.path.expanduser(path))
    try:
        if (here.suffix.lower() == GGUF and here.exists()) or gguf_file.is_gguf(here):
            return _of_gguf(str(path), "GGUF", here)
        return _of_folder(str(path), "folder", here) if (here / CONFIG).exists() else None
    except (OSError, ValueError):
        return None


def is_here(name: str) -> bool:
    """Return True if the model ``name`` needs no download; a path never does, even if nothing is there."""
    return not is_hub_name(name) or any(model.name == name and not model.problem for model in in_hub_cache())


def is_hub_name(name: str) -> bool:
    """Return True if ``name`` is a repository on the hub, or a GGUF file of one as REPOSITORY:FILE or :Q4_K_M."""
    return name != BUNDLED and bool(HUB_NAME.fullmatch(name)) and not os.path.lexists(os.path.expanduser(name))


def is_chat_model(file: str) -> bool:
    """Return True if, by its name, a file is a GGUF file of a chat model, or the first of its parts."""
    is_gguf, name = file.lower().endswith(GGUF), Path(file).name
    return is_gguf and not name.startswith(ENCODER) and gguf_file.part(Path(name)) < 2


def _with_problem(read: Callable[[str, str, Path], FoundModel]) -> Callable[[str, str, Path], FoundModel]:
    """Make ``read`` return a model with a ``problem`` instead of raising, so that other models are still listed."""

    def read_safely(name: str, kind: str, path: Path) -> FoundModel:
        try:
            return read(name, kind, path)
        except ModelError as error:
            return FoundModel(name, kind, problem=str(error))
        except Exception as error:  # noqa: BLE001  # the files may contain anything
            message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
            return FoundModel(name, kind, problem=f"It cannot be read ({message}). Download the model again.")

    return read_safely


@_with_problem
def _of_folder(name: str, kind: str, folder: Path) -> FoundModel:
    config = read_json(folder / CONFIG)
    if is_packed_by_mlx(config):
        raise ModelError("Its weights are packed by MLX.", hint="Use a GGUF file of it, or the unquantized model.")
    return FoundModel(name, kind, weights.of_checkpoint(config, read_headers(folder, "It")))


@_with_problem
def _of_gguf(name: str, kind: str, file: Path) -> FoundModel:
    return FoundModel(name, kind, weights.of_gguf(gguf_file.read_model(file)))


@dataclass(frozen=True)
class Room:
    """Free bytes on the device that the settings name, and the GPU's compute capability."""

    device: Literal["cpu", "cuda"]
    free: int
    capability: tuple[int, int] | None = None

    @property
    def place(self) -> Place:
        return Place(self.device, self.capability)


@dataclass(frozen=True)
class Fit:
    """Bytes of the loaded weights. ``quantize`` is the mildest quantization in which they fit, or None."""

    needed: int
    quantize: str | None


def room(device: str, released: int = 0) -> Room:
    """Return the free bytes on ``device`` (as in the settings), including ``released`` bytes of the model in use."""
    gpu = profiles.read_gpu(device)
    if gpu and gpu.memory is not None and gpu.memory_used is not None:
        return Room("cuda", gpu.memory - gpu.memory_used + released, gpu.compute_capability)
    return Room("cpu", available.host_free() + released)


def fit(found: FoundModel, dtype: str, there: Room) -> Fit | None:
    """Return how the weights fit in ``dtype`` (as in the settings); None if their headers could not be read."""
    if found.weights is None:
        return None
    usable, by_choice = available.usable(there.free), needs(found.weights, dtype, there)
    default = found.weights.by_default(dtype_of(found.weights, dtype, there), there.place)
    first = next(iter(by_choice)) if default == "none" else default
    needed = by_choice[first]
    if needed <= usable:
        return Fit(needed, "none")
    smaller = (name for name, nbytes in by_choice.items() if nbytes < needed and nbytes <= usable)
    return Fit(needed, next(smaller, None))


def needs(found: Weights, dtype: str, there: Room) -> dict[str, int]:
    """Return the bytes of the weights if loaded in ``dtype`` (as in the settings), by quantization."""
    return found.by_quantization(dtype_of(found, dtype, there), there.place)


def dtype_of(found: Weights, dtype: str, there: Room) -> str:
    """Return the dtype to compute in for the setting ``dtype``; on a CPU the choice of ``description``."""
    own = found.dtype if found.dtype in ITEM_BYTES else "bfloat16"
    if dtype != "auto" or there.device != "cpu" or found.quantization in OWN_DTYPE_ONLY:
        return own if dtype == "auto" else dtype
    is_slow = own != "bfloat16" or 4 * found.mlp < BFLOAT16_FROM
    return "float32" if is_slow or found.stays_packed(there.place) else "bfloat16"


def folders_of_others() -> list[Path]:
    """Return the existing folders in which people and other programs usually store models."""
    cache = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    llama = os.environ.get("LLAMA_CACHE") or f"{cache}/llama.cpp"
    usual = ["~/models", "~/.lmstudio/models", "~/.cache/lm-studio/models", llama]
    return [path for path in (Path(os.path.expanduser(name)) for name in usual) if path.is_dir()]


def ollama() -> Iterator[tuple[str, Path]]:
    """Yield Ollama's models: the name with the prefix ``OLLAMA``, and the GGUF file, which has no suffix."""
    given = os.environ.get("OLLAMA_MODELS")
    for name in [given] if given else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]:
        folder = Path(os.path.expanduser(name))
        manifests = folder / "manifests"
        for place in sorted(Path(below, file) for below, _, files in os.walk(manifests) for file in files):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                yield _name(place.relative_to(manifests)), _blob(folder, place)


def ollama_file(name: str) -> Path | None:
    """Return the file of Ollama's model ``name`` (``:latest`` may be omitted); None if there is none."""
    wanted = name if ":" in name.removeprefix(OLLAMA) else f"{name}:latest"
    return next((file for found, file in ollama() if found == wanted), None)


def _name(place: Path) -> str:
    host, owner, *rest, tag = place.parts
    named = [host, owner, *rest]
    if host == DEFAULT_HOST:
        named = rest if owner == DEFAULT_OWNER else [owner, *rest]
    return f"{OLLAMA}{'/'.join(named)}:{tag}"


def _blob(folder: Path, manifest: Path) -> Path:
    """Return the weights file that a manifest names.

    Raises:
        OSError: one of the two cannot be read.
        ValueError, KeyError, TypeError, AttributeError: the file is not a manifest.
    """
    layers = json.loads(manifest.read_bytes())["layers"]
    digest = next((str(layer["digest"]) for layer in layers if layer["mediaType"] == MODEL_LAYER), "")
    blob = folder / "blobs" / Path(digest.replace(":", "-")).name
    if not digest or not blob.is_file():
        raise ValueError(manifest)
    return blob
