"""Where a model's files come from, and whether they are all there.

"bundled" is the model that ships with kvchat, an existing folder is taken as it is, anything else is a repository on
the Hugging Face hub. Everything is looked at before the first weight is read, and only the hub needs the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvchat.errors import ModelError
from kvchat.paths import bundled_model_dir

Progress = Callable[[str], None]

BUNDLED = "bundled"
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
NOT_DOWNLOADED = ["*/*", "consolidated*"]  # the same weights once more, in other layouts
TAIL_BYTES = 2**16


@dataclass(frozen=True)
class Source:
    """A folder with a model's files; ``revision`` changes when they do."""

    name: str
    folder: Path
    revision: str
    weights: tuple[Path, ...]
    weight_bytes: int


def find(name: str, progress: Progress) -> Source:
    """The checked folder of the model ``name``, downloaded if it is on the hub and not here.

    Raises:
        ModelError: there is no such model, or its files are not complete.
    """
    if name == BUNDLED:
        return _checked(name, bundled_model_dir())
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return _checked(name, folder)
    if folder.is_file():
        raise ModelError(f"{name} is a file.", "A model is a folder with config.json, weights and tokenizer.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise ModelError(f'There is no folder "{name}".', "", "Check the path.")
    downloaded = _download(name, progress)
    return _checked(name, downloaded, revision=downloaded.name)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: it is no JSON object.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read.", f"{file}: {error}.", "Download the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file.name} cannot be read.", f"{file} holds no JSON object.")
    return content


def _checked(name: str, folder: Path, revision: str = "") -> Source:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no model folder.", "It has no config.json.", _gguf_hint(folder))
    weights = _weights(folder)
    if not any((folder / tokenizer).is_file() for tokenizer in TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer.", f"None of {', '.join(TOKENIZERS)} is there.")
    for file in weights:
        _check_readable(file)
    size = sum(file.stat().st_size for file in weights)
    return Source(name, folder, revision or _digest(folder, weights), weights, size)


def _weights(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX
    if not index.is_file():
        found = tuple(sorted(folder.glob("model*.safetensors")))
        if not found:
            raise ModelError(f"{folder} has no weights.", "There is no model.safetensors.", _gguf_hint(folder))
        return found
    shards = sorted(set(read_json(index).get("weight_map", {}).values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"{folder} is incomplete.",
            f"{len(missing)} of {len(shards)} weight files are missing: {', '.join(missing[:3])}.",
            "Download the model again.",
        )
    return tuple(folder / shard for shard in shards)


def _gguf_hint(folder: Path) -> str:
    other = any(folder.glob("*.gguf")) or any(folder.glob("*.bin"))
    return "kvchat reads safetensors only, not GGUF or .bin files." if other else ""


def _check_readable(file: Path) -> None:
    """Reads the header only: it tells a truncated file too."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file.name} is damaged.", f"{file}: {error}.", "Download the model again.") from error


def _digest(folder: Path, weights: tuple[Path, ...]) -> str:
    """Of the configuration and of each weight file's size and end: tells two trainings apart without reading all."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weights:
        with file.open("rb") as stream:
            size = stream.seek(0, io.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            digest.update(f"{file.name} {size} ".encode() + stream.read())
    return digest.hexdigest()[:12]


# ---- the hub ---------------------------------------------------------------------------------------


def _download(name: str, progress: Progress) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    progress(f"Looking for {name} on the hub")
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=DOWNLOADED, ignore_patterns=NOT_DOWNLOADED, tqdm_class=_reporter(progress)
        )
    except errors.HFValidationError as error:
        raise ModelError(
            f'"{name}" is no model.', "It is neither a folder nor the name of a hub repository."
        ) from error
    except errors.GatedRepoError as error:
        hint = f"Accept its terms at https://huggingface.co/{name}, then log in with `hf auth login`."
        raise ModelError(f"{name} is gated.", "Its owner asks for an agreement first.", hint) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {name}.",
            "There is no folder of that name either.",
            "Check the spelling; a private model needs `hf auth login`.",
        ) from error
    except (errors.LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{name} cannot be downloaded.",
            f"The hub cannot be reached, and the model is not (completely) in the local cache: {_first_line(error)}",
            f'Check the network, or give a folder. The model "{BUNDLED}" needs neither.',
        ) from error
    return Path(folder)


def _reporter(progress: Progress) -> type:
    """A tqdm class that draws nothing and reports the bytes downloaded once a second."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Reporter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # only the hub's own class knows it
            super().__init__(*args, **(kwargs | {"file": io.StringIO(), "mininterval": 1.0}))

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                with contextlib.suppress(OSError):
                    progress(f"Downloading {self.n / 1e9:.1f} of {self.total / 1e9:.1f} GB")

    return Reporter


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
