"""The models on this machine, and by the headers of their files whether their weights fit it.

They are the bundled one, folders, GGUF files, the cache of the Hugging Face hub, and what Ollama, LM Studio and
llama.cpp keep. The estimate needs neither torch nor a model's class; ``kvchat plan`` is exact.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from kvchat import nvml, paths
from kvchat.config import profiles
from kvchat.errors import ModelError
from kvchat.kv.memory import available
from kvchat.models import gguf_file, stored_tensors
from kvchat.models.stored_tensors import ITEM_BYTES, Elements, Weights, read_gguf, read_safetensors
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
# Bytes an element of quantized weights takes, with their constants.
NF4 = 0.5 + 4 / 64
QUANTIZED = {
    "cpu": {"int8": 1 + 2 / 32, "nf4": NF4, "int4": 0.5 + 4 / 32},
    "cuda": {"int8": 1.0, "nf4": NF4, "int4": 0.5 + 4 / 128},
}
# In what weights that loading unpacks are packed again by default, by their bits an element of the layers in the files:
# as in the engine's ``repacking``.
AT_MOST = {"int4": 5.0, "int8": 9.0}
# As in the engine: of a GPU that multiplies int4, and of the smallest matrix that is faster in bfloat16.
INT4_CAPABILITY, BFLOAT16_FROM = (8, 0), 2**24
OWN_DTYPE_ONLY = ("torchao", "int4")  # kinds of checkpoints that are multiplied in no other
OLLAMA = "ollama:"  # begins the names of Ollama's models
MODEL_LAYER = "application/vnd.ollama.image.model"
DEFAULT_HOST, DEFAULT_OWNER = "registry.ollama.ai", "library"  # which its names leave out
MAX_MANIFEST_BYTES, MAX_MANIFESTS = 2**20, 2000


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
    within = [model for folder in (*folders, *folders_of_others()) for model in in_folder(folder)]
    others = [_of_gguf(name, "Ollama", file) for name, file in ollama()]
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
    here = ollama_file(str(path)) if str(path).startswith(OLLAMA) else None
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


@dataclass(frozen=True)
class Room:
    """Free memory in bytes of the device that the settings name, "cpu" or "cuda", and the GPU's compute capability."""

    device: Literal["cpu", "cuda"]
    free: int
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Fit:
    """Bytes that the weights take once loaded. ``quantize`` is the least that makes them fit, None: nothing does."""

    needed: int
    quantize: str | None


def room(device: str, released: int = 0) -> Room:
    """Bytes free on ``device`` (as in the settings), with the ``released`` ones that the model in use takes."""
    if profiles.read_gpu(device) is not None:
        reader = nvml.visible_gpu(int(device.partition(":")[2] or 0))
        usage, info = (reader.usage(), reader.info()) if reader else (nvml.GpuUsage(), nvml.GpuInfo())
        if usage.total is not None and usage.used is not None:
            return Room("cuda", usage.total - usage.used + released, info.compute_capability)
    return Room("cpu", available.host_free() + released)


def fit(found: FoundModel, dtype: str, there: Room) -> Fit | None:
    """The fit of the weights, loaded in ``dtype`` (as in the settings); None where their headers could not be read."""
    if found.weights is None:
        return None
    usable, by_choice = available.usable(there.free), needs(found, found.weights, dtype, there)
    if not _is_unpacked(found, there):
        return _first(by_choice, usable)
    return _unpacked_fit(_default(found.weights, by_choice, there), by_choice, usable)


def needs(found: FoundModel, weights: Weights, dtype: str, there: Room) -> dict[str, int]:
    """Bytes that the weights take once loaded in ``dtype``, by quantization; "none" leaves them as they are."""
    chosen = _dtype(found, weights, dtype, there)
    item = ITEM_BYTES.get(chosen, 2)  # what is unpacked becomes bfloat16
    is_unpacked = _is_unpacked(found, there)
    if found.quantization and not is_unpacked:
        return {"none": _own_bytes(weights, found.quantization, item, there)}
    no_int4 = there.device != "cpu" and (
        chosen != "bfloat16" or (there.capability or INT4_CAPABILITY) < INT4_CAPABILITY
    )
    refused = {"int4"} if no_int4 else set()
    if is_unpacked:
        refused.add("nf4")  # is not made of what was packed
    chosen_from = [name for name in _quantized(there) if name not in refused]
    packed = {name: _packed_bytes(weights, name, item, there) for name in chosen_from}
    return {"none": weights.elements * item, **packed}


def _packed_bytes(weights: Weights, quantize: str, item: int, there: Room) -> int:
    """Bytes of weights whose Linears are packed; on a CPU experts too, and the head, which may be the embedding."""
    plain, each = weights.plain, _quantized(there)[quantize]
    linear, experts = _linear_and_experts(weights)
    packed, head = linear, 0
    if there.device == "cpu" and quantize != "nf4":
        packed += experts
        head = _packed_head(plain, item)
    return (weights.elements - packed) * item + int(packed * each) + head


def _quantized(there: Room) -> dict[str, float]:
    return QUANTIZED[there.device.partition(":")[0]]


def _packed_head(plain: Elements, item: int) -> int:
    """Bytes that a head in int8 adds."""
    each = QUANTIZED["cpu"]["int8"]
    return int(plain.embedding * each if plain.head is None else plain.head * (each - item))


def _own_bytes(weights: Weights, method: str, item: int, there: Room) -> int:
    """Bytes of a checkpoint that stays as it is quantized; what is not packed takes ``item`` bytes an element."""
    head = _packed_head(weights.plain, item) if method == "int8" and there.device == "cpu" else 0
    return weights.packed_bytes + (weights.elements - weights.packed_elements) * item + head


def _is_unpacked(found: FoundModel, there: Room) -> bool:
    """True if loading unpacks the weights, which are packed again."""
    return found.kind == "GGUF" or stored_tensors.is_unpacked(found.quantization, there.capability)


def _linear_and_experts(weights: Weights) -> tuple[int, int]:
    """Elements of the Linears but the head, and of a mixture's experts; what is packed in the files is of either."""
    experts = weights.plain.experts + weights.packed_experts
    return weights.plain.linear + weights.packed_elements - weights.packed_experts, experts


def _default(weights: Weights, by_choice: dict[str, int], there: Room) -> str:
    """In what small weights are packed again by default: not where most are experts, which a GPU's packers leave."""
    linear, experts = _linear_and_experts(weights)
    if there.device != "cpu" and experts >= linear:
        return "none"
    bits = weights.layer_bits
    return next((name for name, most in AT_MOST.items() if 0 < bits <= most and name in by_choice), "none")


def _unpacked_fit(default: str, by_choice: dict[str, int], usable: int) -> Fit:
    """The fit of weights that loading unpacks, and packs again in ``default``."""
    needed = by_choice[default]
    found = _first({default: needed} | {name: size for name, size in by_choice.items() if size < needed}, usable)
    return Fit(found.needed, "none") if found.quantize == default else found


def _first(by_choice: dict[str, int], usable: int) -> Fit:
    """The first that fits; the first of all is what is needed."""
    needed = next(iter(by_choice.values()))
    return Fit(needed, next((name for name, bytes_ in by_choice.items() if bytes_ <= usable), None))


def _dtype(found: FoundModel, weights: Weights, dtype: str, there: Room) -> str:
    """The dtype of the arithmetic, for the setting ``dtype``; on a CPU as the engine's ``description`` chooses."""
    own = weights.dtype if weights.dtype in ITEM_BYTES else "bfloat16"
    if dtype != "auto" or there.device != "cpu" or found.quantization in OWN_DTYPE_ONLY:
        return own if dtype == "auto" else dtype
    packed = found.quantization and not _is_unpacked(found, there)
    return "float32" if packed or own != "bfloat16" or 4 * weights.mlp < BFLOAT16_FROM else "bfloat16"


def folders_of_others() -> list[Path]:
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
        for place in islice(sorted(_files_below(manifests)), MAX_MANIFESTS):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                yield _name(place.relative_to(manifests)), _blob(folder, place)


def ollama_file(name: str) -> Path | None:
    """The file of one of Ollama's models by its name, in which ``:latest`` may be left out; None if it is not here."""
    wanted = name if ":" in name.removeprefix(OLLAMA) else f"{name}:latest"
    return next((file for known, file in ollama() if known == wanted), None)


def _files_below(folder: Path) -> Iterator[Path]:
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
