"""``kvchat config``: show, check or write the settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvchat import files, paths
from kvchat.cli.output import echo
from kvchat.cli.profile import load_settings
from kvchat.config import profiles, schema, sources
from kvchat.config.sources import Resolved
from kvchat.errors import UsageError, did_you_mean

app = typer.Typer(rich_markup_mode=None, help="Show, check or write the settings.", no_args_is_help=True)


@app.command()
def show() -> None:
    """Print every setting with where it was set."""
    resolved = load_settings()
    echo("\n".join((f"# profiles: {profiles.find(resolved.settings.model.device).describe()}", *resolved.lines())))


@app.command()
def validate(file: Annotated[Path | None, typer.Argument(help="instead of the settings in force")] = None) -> None:
    """Check the settings and your profiles, or one FILE of either kind; exit code 2 if something is wrong."""
    path = file or paths.config_file()
    if file and not file.exists():
        raise UsageError(f"There is no file {file}.", hint="Check the path.")
    source = sources.file_source(path)
    if file and (profiles.is_profile(source) or _is_among_profiles(file)):
        profiles.read_file(file, None)
    else:
        _check_application(path, sources.resolve(source))
    echo(f"{path}: {'good' if path.exists() else 'not there; the defaults hold'}")
    if not file:
        for profile in sorted(paths.user_profiles_dir().glob("*.toml")):
            profiles.read_file(profile, None)
            echo(f"{profile}: good")


@app.command()
def init() -> None:
    """Write a settings file in which every setting is explained."""
    path = paths.config_file()
    if os.path.lexists(path):
        raise UsageError(f"{path} is there already and stays as it is.", hint="Edit it, or delete it first.")
    try:
        files.write(path, sources.template().encode())
    except OSError as error:
        raise files.unwritable(path, error, "Check the folder's permissions.") from None
    echo(str(path))


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of the settings file."""
    echo(json.dumps(schema.Settings.model_json_schema(), indent=2))


def _check_application(path: Path, resolved: Resolved) -> None:
    """Check what only the application knows: the names of themes and keys.

    Raises:
        UsageError: there is no such theme, action or key, or a key would do two things; with its line.
    """
    from kvchat.tui import actions, themes

    wanted, origins = resolved.settings, resolved.origins
    known, _ = themes.load_all((paths.user_themes_dir(),))
    if wanted.ui.theme not in known:
        where = origins["ui", "theme"]
        raise UsageError(f'{where}: there is no theme "{wanted.ui.theme}".', did_you_mean(wanted.ui.theme, known))
    try:
        actions.check_keys(wanted.keys.given())
    except UsageError as refused:
        raise UsageError(f"{path.name}: [keys]: {refused.title}", refused.detail, refused.hint) from None


def _is_among_profiles(file: Path) -> bool:
    return file.resolve().parent == paths.user_profiles_dir().resolve()
