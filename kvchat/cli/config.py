"""``kvchat config``: show, check or write the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvchat import paths
from kvchat.config import profiles, schema, sources
from kvchat.errors import UsageError

app = typer.Typer(rich_markup_mode=None, help="Show, check or write the settings.", no_args_is_help=True)


@app.command()
def show() -> None:
    """Print every setting with where it was set."""
    typer.echo("\n".join(sources.load(profiles=profiles.sources).lines()))


@app.command()
def validate(file: Annotated[Path | None, typer.Argument(help="instead of the settings in force")] = None) -> None:
    """Check the settings file; exit code 2 if it is wrong."""
    path = file or paths.config_file()
    if file and not file.exists():
        raise UsageError(f"There is no file {file}.")
    sources.resolve(sources.file_source(path))
    typer.echo(f"{path}: {'good' if path.exists() else 'not there; the defaults hold'}")


@app.command()
def init() -> None:
    """Write a settings file in which every setting is explained."""
    path = paths.config_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(sources.template())
    except FileExistsError:
        raise UsageError(f"{path} is there already and stays as it is.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    typer.echo(path)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of the settings file."""
    typer.echo(json.dumps(schema.Settings.model_json_schema(), indent=2))
