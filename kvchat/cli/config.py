"""``kvchat config``: show, check or write the settings."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvchat import files, paths
from kvchat.cli.output import echo, note
from kvchat.cli.profile import load_settings
from kvchat.config import profiles, schema, sources
from kvchat.config.sources import Key, SettingsSource
from kvchat.errors import UsageError, did_you_mean

app = typer.Typer(rich_markup_mode=None, help="Show, check or write the settings.", no_args_is_help=True)


@app.command()
def show() -> None:
    """Print every setting, and where it was set."""
    resolved = load_settings()
    found = profiles.find(resolved.settings.model.device)
    about = (f"profiles: {found.describe()}", *found.measured_lines())
    echo("\n".join((*(f"# {line}" for line in about), *resolved.lines())))


@app.command()
def validate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="instead of the current settings")] = None,
) -> None:
    """Check the settings and your profiles, or only FILE. The exit code is 2 if something is wrong."""
    path = file or paths.config_file()
    if file and not file.exists():
        raise UsageError(f"There is no file {file}.", hint="Check the path.")
    source = sources.file_source(path)
    is_among_profiles = path.resolve().parent == paths.user_profiles_dir().resolve()
    if file and (is_among_profiles or any(key[0] in profiles.HEAD for key in source.values)):
        profiles.read_file(file, None)
    elif file:
        _check(source)
    else:
        for unknown in sources.unknown_variables():
            note(unknown)
        sources.check_all(lambda: _check(source), lambda: _check(sources.environment_source(os.environ)))
    echo(f"{path}: {'valid' if path.exists() else 'does not exist; defaults apply'}")
    if not file:

        def check(profile: Path) -> None:
            profiles.read_file(profile, None)
            echo(f"{profile}: valid")

        sources.check_all(*(partial(check, each) for each in sorted(paths.user_profiles_dir().glob("*.toml"))))


@app.command()
def init() -> None:
    """Write a settings file in which every setting is explained."""
    path = paths.config_file()
    if os.path.lexists(path):
        raise UsageError(f"{path} already exists and was not changed.", hint="Edit it, or delete it first.")
    files.save(path, sources.template().encode(), "Check the folder's permissions.")
    echo(str(path))


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of the settings file."""
    echo(json.dumps(schema.Settings.model_json_schema(), indent=2))


def _check(source: SettingsSource) -> None:
    sources.check_all(*(partial(check, source) for check in (sources.check, _check_theme, _check_keys)))


def _check_theme(source: SettingsSource) -> None:
    """Check that the theme exists, which only the application knows; another check refuses a value that is not text."""
    from kvchat.tui import themes

    wanted = source.values.get(("ui", "theme"), themes.DEFAULT)
    known, _ = themes.load_all((paths.user_themes_dir(),))
    if isinstance(wanted, str) and wanted not in known:
        own = f"Your own themes are files in {paths.user_themes_dir()}."
        problem = f'there is no theme "{wanted}". {did_you_mean(wanted, known)} {own}'
        raise _refused(source, ("ui", "theme"), problem)


def _check_keys(source: SettingsSource) -> None:
    """Check that the actions and keys exist and that no key does two things, which only the application knows."""
    from kvchat.tui.rebinding import check_keys

    given = {key[1]: value for key, value in source.values.items() if key[0] == sources.KEYS and len(key) == 2}
    try:
        check_keys({id: key for id, key in given.items() if isinstance(key, str)})
    except UsageError as refused:
        # If a key has two actions, the title names both; only one of them may be in this source.
        id = max((id for id in given if id in refused.title), key=len)
        raise _refused(source, (sources.KEYS, id), f"[keys]: {refused}") from None


def _refused(source: SettingsSource, key: Key, problem: str) -> UsageError:
    """Return the error for a value, with its place in the file."""
    return UsageError(f"{source.origins[key]}: {problem}{source.excerpts.get(key, '')}")
