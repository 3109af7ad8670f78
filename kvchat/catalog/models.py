"""The models on this machine: the bundled one, folders, GGUF files and the cache of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvchat import gguf_file, other_models, paths, stored_tensors
from kvchat.catalog.headers import ITEM_BYTES, Weights, read_gguf, read_safetensors
from kvchat.errors import ModelError
from kvchat.paths import BUNDLED, INDEX

PARTS = {"text_config", "vision_config", "audio_config"}  # a multimodal model's sections of its configuration
WITHOUT_LINEARS = {"gpt2", "openai-gpt"}  # whose matrices are Conv1Ds, which nothing packs
OWN_EXPERTS = {"dbrx", "llama4", "llama4_text", "longcat_flash"}  # run in a way of their own, and never packed
CONFIG, WEIGHTS, GGUF = "config.json", "model*.safetensors", ".gguf"
MAX_CONFIG_BYTES, MAX_INDEX_BYTES = 2**22, 2**26
MOST_COUNTED = 2**31  # of what a configuration counts
MAX_SAID = 200  # characters of an error that nobody expected
MAX_DEPTH = 3  # the folder given, its publishers, their models
MAX_FOLDERS = 2000
HUB_NAME = re.compile(r"(?![.~])[\w.-]+/(?![.])[\w.-]+(:[\w.-]+\.(?:gguf|GGUF))?")
TOWER = "mmproj"  # begins the name of a GGUF file that is part of a multimodal model


@dataclass(frozen=True)
class FoundModel:
    """A model on this machine. ``name`` is what loads it, ``kind`` is bundled, folder, GGUF or hub.

    ``quantization`` is the kind by which the checkpoint is quantized, and ``weights.dtype`` then that of its
    arithmetic; of a GGUF file ``weights.dtype`` names both.
    ``weights`` is None where there is a ``problem``.
    """

    name: str
    kind: str
    weights: Weights | None = None
    quantization: str = ""
    problem: str = ""


def short_name(model: str) -> str:
    """A model's name without its place: of a file or folder, of the hub's cache, of a repository (``Qwen3-4B``)."""
    cached = re.search(r"(?:^|/)models--([^/]+)", model)
    name = cached[1].rpartition("--")[2] if cached else model.rstrip("/").rpartition("/")[2]
    if not name.lower().endswith(GGUF):
        return name or model
    name = re.sub(r"-\d{5}-of-\d{5}$", "", name[: -len(GGUF)])
    return re.sub(r"(?i)[-._](i?q\d\w*|f16|f32|bf16|mxfp4\w*)$", "", name) or name


def find(folders: Iterable[Path]) -> list[FoundModel]:
    """The bundled model, those with short names that are here, those in ``folders``, the hub's and other programs'.

    One that is damaged has a ``problem``, whatever its files lead to.
    """
    bundled = _of_folder(BUNDLED, "bundled", paths.bundled_model_dir())
    named = [_of_gguf(name, "GGUF", file) for name in paths.NAMED if (file := paths.named_model(name))]
    within = [model for folder in (*folders, *other_models.folders()) for model in in_folder(folder)]
    others = [_of_gguf(name, "Ollama", file) for name, file in other_models.ollama()]
    found = [bundled, *named, *within, *in_hub_cache(), *others]
    return list({model.name: model for model in found}.values())


def in_folder(folder: Path) -> Iterator[FoundModel]:
    """The models in a folder and in those below it; nothing where it cannot be read."""
    top = Path(os.path.expanduser(folder))
    for visited, (place, inner, files) in enumerate(os.walk(top), 1):
        here = Path(place)
        names = (name for name in sorted(files) if _is_model(name) or _has_no_suffix(here / name))
        yield from (_of_gguf(str(here / name), "GGUF", here / name) for name in names)
        is_model = CONFIG in files and any(here.glob(WEIGHTS))
        if is_model:
            yield _of_folder(str(here), "folder", here)
        deep = len(here.relative_to(top).parts) >= MAX_DEPTH or visited >= MAX_FOLDERS
        inner[:] = [] if deep or is_model else sorted(name for name in inner if not name.startswith("."))


def in_hub_cache() -> Iterator[FoundModel]:
    """The models that the Hugging Face hub's library has downloaded, to the folder that its variables name."""
    from huggingface_hub import constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except Exception:  # noqa: BLE001  # there is none, or whatever is in it
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id.lower()):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
        here = newest.snapshot_path
        if (here / CONFIG).exists():
            yield _of_folder(repository.repo_id, "hub", here)
        for name in sorted(file.file_name for file in newest.files if _is_model(file.file_name)):
            yield _of_gguf(f"{repository.repo_id}:{name}", "hub", here / name)


def at(path: Path) -> FoundModel | None:
    """The model in a folder or GGUF file that was typed, under the name as typed; None where there is nothing."""
    here = other_models.ollama_file(str(path)) if str(path).startswith(other_models.OLLAMA) else None
    here = here or Path(os.path.expanduser(path))
    try:
        if (here.suffix.lower() == GGUF and here.exists()) or gguf_file.is_gguf(here):
            return _of_gguf(str(path), "GGUF", here)
        return _of_folder(str(path), "folder", here) if (here / CONFIG).exists() else None
    except (OSError, ValueError):
        return None


def is_here(name: str) -> bool:
    """True if the model ``name`` needs no download; a path needs none, even if nothing is there."""
    return not is_hub_name(name) or any(model.name == name and not model.problem for model in in_hub_cache())


def is_hub_name(name: str) -> bool:
    """True if ``name`` is that of a repository on the hub, or REPOSITORY:FILE for a GGUF file of one."""
    return name != BUNDLED and bool(HUB_NAME.fullmatch(name)) and not os.path.lexists(os.path.expanduser(name))


def _is_model(file: str) -> bool:
    return file.lower().endswith(GGUF) and not file.startswith(TOWER) and gguf_file.part(Path(file)) < 2


def _has_no_suffix(file: Path) -> bool:
    """True for a GGUF file without a suffix, as other programs keep them."""
    return "." not in file.name and gguf_file.is_gguf(file)


def _whatever_it_leads_to(look: Callable[[str, str, Path], FoundModel]) -> Callable[[str, str, Path], FoundModel]:
    """``look``, where an error of one model is its ``problem``: the others are listed."""

    def looked(name: str, kind: str, place: Path) -> FoundModel:
        try:
            return look(name, kind, place)
        except ModelError as error:
            return FoundModel(name, kind, problem=str(error))
        except Exception as error:  # noqa: BLE001  # its files may be anything
            said = f"{type(error).__name__}: {error}"[:MAX_SAID]
            return FoundModel(name, kind, problem=f"It cannot be read ({said}). Download the model again.")

    return looked


@_whatever_it_leads_to
def _of_folder(name: str, kind: str, folder: Path) -> FoundModel:
    config = _config(folder)
    own = config.get("quantization_config")
    quantized = own if isinstance(own, dict) else {}
    weights = read_safetensors(_files(folder), quantized, is_multimodal=not PARTS.isdisjoint(config))
    weights = replace(weights, mlp=_count(config, "intermediate_size") * _count(config, "hidden_size"))
    if config.get("model_type") in WITHOUT_LINEARS:
        weights = replace(weights, plain=replace(weights.plain, linear=0))
    if config.get("model_type") in OWN_EXPERTS:
        weights = replace(weights, plain=replace(weights.plain, experts=0))
    if quantized:
        weights = replace(weights, dtype=_own_dtype(config))
    return FoundModel(name, kind, weights, stored_tensors.kind_of(quantized))


@_whatever_it_leads_to
def _of_gguf(name: str, kind: str, file: Path) -> FoundModel:
    return FoundModel(name, kind, read_gguf(file))


def _own_dtype(config: dict[str, Any]) -> str:
    """The dtype in which a quantized checkpoint computes, of a multimodal one its text; the engine takes it too."""
    named = (section.get(key) for section in (_text(config), config) for key in ("dtype", "torch_dtype"))
    return next((name for name in named if isinstance(name, str) and name in ITEM_BYTES), "float32")


def _count(config: dict[str, Any], key: str) -> int:
    found = _text(config).get(key)
    return found if isinstance(found, int) and 0 < found < MOST_COUNTED else 0


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The text's section of a multimodal model's configuration; that of others, and of older ones, is all there is."""
    section = config.get("text_config")
    return section if isinstance(section, dict) else config


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        if not file.is_file() or file.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(CONFIG)
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError("Its config.json cannot be read.", hint="Download the model again.") from error
    return config if isinstance(config, dict) else {}


def _files(folder: Path) -> list[Path]:
    """The weight files, all of those that an index names.

    Raises:
        ModelError: some are missing.
    """
    try:
        index = folder / INDEX
        if index.is_file() and index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(INDEX)
        named = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else ()
        files = sorted({folder / Path(str(name)).name for name in named}) or sorted(folder.glob(WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"Its {INDEX} cannot be read.", hint="Download the model again.") from error
    missing = [file for file in files if not file.exists()]
    if missing or not files:
        raise ModelError(f"{len(missing) or 'All'} of its weight files are missing.", hint="Download the model again.")
    return files
