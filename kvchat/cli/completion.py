"""Completion in a shell: the words that options take, from the settings' schema, the modes and the themes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvchat import paths
from kvchat.config import modes
from kvchat.config.validation_errors import choices

Offer = tuple[str, str]
Completer = Callable[[str], list[Offer]]
PROGRAM, VARIABLE = "kvchat", "_KVCHAT_COMPLETE"


def script(shell: str) -> str:
    """The script that a shell reads to complete kvchat's commands; ``shell`` is bash, zsh or fish."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # typer lists no exports

    return get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)


def one_of(words: Sequence[str]) -> Completer:
    """Make a completer for a setting that takes one of few words."""

    def complete(incomplete: str) -> list[Offer]:
        return [(word, "") for word in words if word.startswith(incomplete)]

    return complete


def complete_device(incomplete: str) -> list[Offer]:
    """The devices that every machine may have."""
    return [(word, "") for word in ("auto", "cpu", "cuda") if word.startswith(incomplete)]


def complete_mode(incomplete: str) -> list[Offer]:
    """The KV modes."""
    return [(name, mode.title) for name, mode in modes.registered().items() if name.startswith(incomplete)]


def complete_param(incomplete: str) -> list[Offer]:
    """``KEY=`` of all modes, and after it the words that the parameter takes in any mode."""
    name, equals, _ = incomplete.partition("=")
    if not equals:
        fields = {name: field for mode in modes.registered().values() for name, field in mode.model_fields.items()}
        return [(f"{name}=", field.description or "") for name, field in fields.items() if name.startswith(incomplete)]
    fields = {mode: modes.registered()[mode].model_fields[name] for mode in modes.having(name)}
    words = {f"{name}={word}": mode for mode, field in fields.items() for word in choices(field)}
    return [(word, mode) for word, mode in words.items() if word.startswith(incomplete)]


def complete_model(incomplete: str) -> list[Offer]:
    """The bundled model and those in the hub's cache; a path is completed by the shell."""
    from kvchat.models import catalog

    return [(model.name, model.kind) for model in catalog.find(()) if model.name.startswith(incomplete)]


def complete_profile(incomplete: str) -> list[Offer]:
    """The bundled profiles and the person's own."""
    return _files_in(paths.bundled_profiles_dir(), paths.user_profiles_dir(), incomplete)


def complete_theme(incomplete: str) -> list[Offer]:
    """The bundled themes and the person's own."""
    return _files_in(paths.bundled_themes_dir(), paths.user_themes_dir(), incomplete)


def _files_in(bundled: Path, own: Path, incomplete: str) -> list[Offer]:
    names = {path.stem for folder in (bundled, own) for path in folder.glob("*.toml")}
    return [(name, "") for name in sorted(names) if name.startswith(incomplete)]
