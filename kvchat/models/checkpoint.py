"""Locate the files of a model, download them from the hub, check that they are complete and read their sampling.

"bundled" is the model that ships with kvchat. A path names an existing folder or GGUF file. A name in ``NAMED`` is a
file in kvchat's cache or in an installed package. Anything else is a repository on the Hugging Face hub, or in one a
GGUF file (REPOSITORY:FILE) or the file in a quantization (REPOSITORY:Q4_K_M). The files are checked before any weight
is read, and only the hub needs the network. If one field of the recommended sampling is out of range, all of it is
ignored.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvchat import files, libraries
from kvchat.errors import ModelError, did_you_mean, nearest
from kvchat.models import catalog, gguf_file, stored_tensors
from kvchat.models.hub import Progress, download, remote_headers
from kvchat.models.stored_tensors import StoredTensor, format_hint, weight_files
from kvchat.paths import BUNDLED, NAMED, bundled_model_dir, is_server, models_dir, named_model, of_hub
from kvchat.protocol.messages import TEMPERATURE, Sampling

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
CONFIGURATION = ["config.json"]
GGUF = ".gguf"
DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
TAIL_BYTES = 2**16
MAX_TEMPERATURE = 2.0  # more is a mistake in the file
# The range of each field; transformers and kvchat use the same names.
LEAST_AND_MOST = {
    "temperature": (1e-5, MAX_TEMPERATURE),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 0.99),
    "repetition_penalty": (0.01, 100.0),
}
# Fields that would change answers but that kvchat does not apply; 0 and 1 have no effect.
UNKNOWN = (
    *("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_repetition_penalty"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "num_beams", "penalty_alpha"),
)
OF_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class ModelLocation:
    """A folder with a model's config.json, or its file ``gguf``; the weights may still be on the hub."""

    name: str
    folder: Path
    on_hub: bool = False
    gguf: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with all files of a model; ``revision`` changes whenever they do."""

    name: str
    folder: Path
    revision: str
    weights: tuple[Path, ...]
    weight_bytes: int
    gguf: str = ""


def locate(name: str, progress: Progress) -> ModelLocation:
    """Locate the model ``name``; of a hub repository (or its address) download config.json or a GGUF file.

    Raises:
        ModelError: there is no such model.
    """
    name = of_hub(name)
    if is_server(name):
        raise ModelError(f"{name} is a server.", "This needs a model on this machine.", "Ask it with `kvchat ask -m`.")
    try:
        location = _locate(name, progress)
    except (OSError, ValueError) as error:  # a name too long, a symlink loop, a null character
        raise ModelError(f'"{name[:80]}" cannot be opened.', f"{files.reason(error)}.", "Check the path.") from error
    if location.gguf and not (location.folder / location.gguf).is_file():
        why = f"The repository has no file {location.gguf}." if location.on_hub else f"{location.gguf} is not a file."
        raise ModelError(f"{name} does not exist.", why, "Check the spelling.")
    if not location.gguf and not (location.folder / "config.json").is_file():
        of_repository = f"If it has GGUF files, name one of them: {name}:FILE.gguf."
        hint = of_repository if location.on_hub else format_hint(location.folder)
        raise ModelError(f"{_where(location)} is not a model.", "It has no config.json.", hint)
    return location


def _where(location: ModelLocation) -> str:
    """Return the folder's path or the repository's name, for messages."""
    return location.name if location.on_hub else str(location.folder)


def complete(location: ModelLocation, progress: Progress) -> Checkpoint:
    """Download the missing files of a located model and check the headers of all of them.

    Raises:
        ModelError: a file is missing or damaged.
    """
    if location.gguf:
        return _complete_gguf(location)
    folder = download(location.name, DOWNLOADED, progress) if location.on_hub else location.folder
    weights = weight_files(folder, _where(location))
    if not any((folder / tokenizer).is_file() for tokenizer in TOKENIZERS):
        raise ModelError(
            f"{_where(location)} has no tokenizer.",
            f"None of {', '.join(TOKENIZERS)} was found.",
            "Download the model again, with its tokenizer.",
        )
    for file in weights:
        stored_tensors.tensors(file)  # refuses a truncated file
    revision = folder.name if location.on_hub else _digest(folder, weights)
    weight_bytes = sum(file.stat().st_size for file in weights)
    return Checkpoint(location.name, folder, revision, weights, weight_bytes)


def read_headers(location: ModelLocation) -> list[StoredTensor]:
    """Read a safetensors model's tensors from its headers, which come from the hub if the weights are not downloaded.

    Raises:
        ModelError: a file is missing or damaged, or the hub cannot be reached.
    """
    try:
        files = weight_files(location.folder, _where(location))
    except ModelError:
        if location.on_hub:
            return remote_headers(location.name, location.folder.name)
        raise
    return [tensor for file in files for tensor in stored_tensors.tensors(file)]


def _locate(name: str, progress: Progress) -> ModelLocation:
    if name == BUNDLED:
        return ModelLocation(name, bundled_model_dir())
    if name.startswith(catalog.OLLAMA):
        return _of_ollama(name)
    folder = Path(os.path.expanduser(name))
    if name and folder.is_dir():
        return ModelLocation(name, folder, gguf=_only_gguf(folder))
    if folder.is_file() and (folder.suffix.lower() == GGUF or gguf_file.is_gguf(folder)):
        return ModelLocation(name, folder.parent, gguf=folder.name)
    if folder.is_file():
        raise ModelError(
            f"{name} is a file.", hint="A model is a folder with config.json, weights and a tokenizer, or a GGUF file."
        )
    if name in NAMED:
        return _named(name)
    repository, colon, file = name.partition(":")
    is_file = name.lower().endswith(GGUF) and not colon
    if name.startswith((".", "/", "~")) or repository.count("/") > 1 or is_file or not name:
        kind = "file" if is_file else "file or folder"
        raise ModelError(f'There is no {kind} "{name}".', "", "Check the path.")
    if "/" not in name and (near := nearest(name, (BUNDLED, *NAMED))):
        raise ModelError(f'There is no model "{name}".', f'Did you mean "{near}"?', "`kvchat models` lists all here.")
    progress(f"Looking for {name} on the hub")
    if not colon or "/" not in repository:  # HOST:PORT is no model
        return ModelLocation(name, download(name, CONFIGURATION, progress), on_hub=True)
    patterns = [gguf_file.SPLIT.sub(r"-*-of-\2", file)] if file.lower().endswith(GGUF) else _named_for(file)
    downloaded = download(repository, patterns, progress)
    files = (str(path.relative_to(downloaded)) for path in downloaded.rglob("*"))
    found = (one for one in files if any(fnmatchcase(one, pattern) for pattern in patterns))
    return ModelLocation(name, downloaded, True, min(filter(catalog.is_chat_model, found), key=len, default=file))


def _named_for(quantization: str) -> list[str]:
    """Return patterns of the names of GGUF files in a ``quantization`` such as Q4_K_M, in one part or in several."""
    in_any_case = "".join(
        f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in quantization
    )
    return [f"*[-._]{in_any_case}{end}{GGUF}" for end in ("", "-0*-of-0*")]  # F16 is not BF16


def _named(name: str) -> ModelLocation:
    file, named = named_model(name), NAMED[name]
    if file is None:
        install = f"Run: {libraries.command('--no-deps', named.package)}\nOr put" if named.package else "Put"
        raise ModelError(f"{name} is not installed.", "", f"{install} {named.file} into {models_dir()}.")
    return ModelLocation(name, file.parent, gguf=file.name)


def _of_ollama(name: str) -> ModelLocation:
    file = catalog.ollama_file(name)
    if file is None:
        names = [model for model, _ in catalog.ollama()]
        own = name.removeprefix(catalog.OLLAMA)
        raise ModelError(f"Ollama has no model {own}.", did_you_mean(name, names), f"Download it: ollama pull {own}")
    return ModelLocation(name, file.parent, gguf=file.name)


def _only_gguf(folder: Path) -> str:
    """Return the name of a folder's GGUF file if it is the only one and there is no config.json, else ""."""
    files = gguf_file.models_in(folder)
    return files[0].name if len(files) == 1 and not (folder / "config.json").is_file() else ""


def _complete_gguf(location: ModelLocation) -> Checkpoint:
    file = location.folder / location.gguf
    parts = gguf_file.read_model(file).paths
    revision = location.folder.name if location.on_hub else _digest(location.folder, parts)
    nbytes = sum(part.stat().st_size for part in parts)
    return Checkpoint(location.name, location.folder, revision, parts, nbytes, location.gguf)


def _digest(folder: Path, weights: tuple[Path, ...]) -> str:
    """Return a digest of config.json and of each weight file's size and end, which another training run changes."""
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    for file in weights:
        with file.open("rb") as stream:
            size = stream.seek(0, io.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            digest.update(f"{file.name} {size} ".encode() + stream.read())
    return digest.hexdigest()[:12]


def sampling(generation_config: Any) -> Sampling:
    """Return the sampling that ``generation_config`` recommends; kvchat's own if it has none or an invalid field."""
    named = _values_named(generation_config)
    if any(not _is_within(name, value) for name, value in named.items()):
        named = {}
    temperature = 0.0 if _is_greedy(generation_config) else TEMPERATURE
    return Sampling(**{"temperature": temperature, **named}, stop=_stop(generation_config))


def note(generation_config: Any) -> str:
    """Describe recommended sampling beyond a temperature, or why it is ignored; return "" if there is none."""
    named = _values_named(generation_config)
    if wrong := [f"{name} {value}" for name, value in named.items() if not _is_within(name, value)]:
        return f"The sampling of its generation config is ignored: {', '.join(wrong)} is out of range."
    unknown = [name for name in UNKNOWN if getattr(generation_config, name, None) not in (None, 0, 1, [], {})]
    left_out = f" Its {', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} ignored." if unknown else ""
    listed = ", ".join(f"{name} {value:g}" for name, value in named.items())
    if _is_greedy(generation_config):
        listed = ", ".join(filter(None, ["always the likeliest token", listed]))
    elif not set(named) - {"temperature"}:
        return left_out.strip()
    advice = f"Answers are sampled as its generation config says: {listed}. A temperature you set replaces its own."
    return advice + left_out


def take_from_gguf(values: dict[str, Any], generation_config: Any) -> None:
    """Write the sampling that a GGUF file's metadata recommend into ``generation_config``."""
    for key, name in OF_GGUF.items():
        if type(values.get(key)) in (int, float):
            setattr(generation_config, name, values[key])
    if generation_config.temperature == 0:  # llama.cpp's notation for it
        generation_config.do_sample = False


def _values_named(generation_config: Any) -> dict[str, Any]:
    names = ["repetition_penalty"] if _is_greedy(generation_config) else LEAST_AND_MOST
    found = {name: getattr(generation_config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _is_greedy(generation_config: Any) -> bool:
    """Return True if the most likely token is always chosen; transformers then applies only the repetition penalty."""
    return getattr(generation_config, "do_sample", None) is False


def _stop(generation_config: Any) -> tuple[str, ...]:
    found = getattr(generation_config, "stop_strings", None)
    texts = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return tuple(text for text in texts if isinstance(text, str) and text)


def _is_within(name: str, value: Any) -> bool:
    least, most = LEAST_AND_MOST[name]
    is_number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most
