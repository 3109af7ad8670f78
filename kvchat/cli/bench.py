"""``kvchat bench WHAT``: measurements. Progress goes to stderr, results to stdout.

This module does not import torch: each command imports its experiment.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kvchat import files
from kvchat.bench import report as reports
from kvchat.bench import settings
from kvchat.bench.frame import Frame, ModelChoice
from kvchat.bench.texts import check
from kvchat.cli.options import NamedDevice, complete_model, parameter, setting, signed
from kvchat.cli.output import echo, progress, report
from kvchat.config import profiles
from kvchat.config.schema import KvSection, ModelSettings
from kvchat.errors import UsageError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure speed, memory and quality of the modes.")
MODEL: dict[str, Any] = {
    "model": Annotated[str, setting(ModelSettings, "name", "-m", "--model", complete=complete_model)],
    "device": NamedDevice,
    "dtype": Annotated[str, setting(ModelSettings, "dtype")],
    "quantize": Annotated[str, setting(ModelSettings, "quantize")],
    "host_dtype": Annotated[str, setting(KvSection, "host_dtype")],
}
Out = Annotated[Path | None, typer.Option(help="write the rows to this file as they come, as JSON; overwrites it")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object, with the environment")]
SaveProfile = Annotated[
    bool, typer.Option("--save-profile", help="save the device's measured roofline as your GPU profile")
]


def experiment(
    name: str,
    module: str,
    kind: type,
    host_dtype: bool = False,
    saves_profile: bool = False,
    standard: ModelChoice = ModelChoice(),
) -> None:
    """Add the command ``name``: ``run`` of ``kvchat.bench.MODULE``, with the fields of ``kind`` as options.

    ``saves_profile`` adds an option to save the device's roofline. ``standard`` is the default model.
    """
    hints = get_type_hints(kind, include_extras=True)
    own = {_parameter(each, hints[each.name]): each for each in fields(kind) if get_args(hints[each.name])[1:]}
    model = {option: hint for option, hint in MODEL.items() if host_dtype or option != "host_dtype"}
    parameters = [
        *(_option(option, each, hints[each.name]) for option, each in own.items()),
        *(parameter(option, hint, getattr(standard, option)) for option, hint in model.items()),
        parameter("as_json", Json, False),
        parameter("out", Out, None),
        *([parameter("save_profile", SaveProfile, False)] if saves_profile else []),
    ]

    def command(**given: Any) -> None:
        chosen = kind(**{each.name: _value(each, given[option]) for option, each in own.items()})
        check(getattr(chosen, "texts", ()))
        choice = ModelChoice(**{option: given[option] for option in model})
        if out := given["out"]:
            files.check_folder(out)
            if out.is_dir():
                raise UsageError(f"{out} is a folder.", "", "Use a file name for --out.")
        frame = Frame(out, report, progress, command=_command(sys.argv[1:]))
        result = import_module(f"kvchat.bench.{module}").run(chosen, choice, frame)
        echo(json.dumps(result, indent=2) if given["as_json"] else reports.rendered([result]))
        if out:
            report(str(out))
        if given.get("save_profile"):
            report(f"profile {profiles.save(profiles.Measured(**result['roofline']), choice.device)}")

    app.command(name)(signed(command, (kind.__doc__ or "").partition("\n")[0], parameters))


def _parameter(each: Field[Any], hint: Any) -> str:
    """Return the name of a field's parameter: that of its option, or else the field's own."""
    flag = getattr(get_args(hint)[1], "default", ...)
    return flag.lstrip("-").replace("-", "_") if isinstance(flag, str) else each.name


def _option(name: str, each: Field[Any], hint: Any) -> inspect.Parameter:
    """Return the parameter ``name`` of a field; a tuple becomes a repeatable option."""
    kind, option = get_args(hint)
    default = inspect.Parameter.empty if each.default is MISSING else each.default
    if getattr(option, "parser", None):
        return parameter(name, Annotated[str | None, option], default)
    if get_origin(kind) is tuple:
        return parameter(name, Annotated[list[get_args(kind)[0]] | None, option], None)  # type: ignore[misc]
    return parameter(name, hint, default)


def _value(each: Field[Any], given: Any) -> Any:
    """Return the value of a field: its default if a repeatable option was not given."""
    if isinstance(each.default, tuple) and not given:
        return each.default
    return tuple(given) if isinstance(given, list) else given


def _command(arguments: Sequence[str]) -> str:
    """Return the command line without the options that choose where results go."""
    words, ignored = ["kvchat"], False
    for word in arguments:
        if not ignored and word.partition("=")[0] not in ("--out", "--json"):
            words.append(word)
        ignored = word == "--out"
    return shlex.join(words)


experiment("decode", "decode", settings.Decode, saves_profile=True)
experiment("prefill", "prefill", settings.Prefill)
experiment("peers", "peers", settings.Peers, standard=ModelChoice(quantize="auto"))
experiment("draft", "draft", settings.Draft)
experiment("agreement", "agreement", settings.Agreement, host_dtype=True)
experiment("coverage", "coverage", settings.Coverage)
experiment("recall", "recall", settings.Recall)
experiment("paper", "paper.studies", settings.Paper)


@app.command("report")
def report_results(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="files that --out wrote")],
) -> None:
    """Print tables of results. All must be of one environment and one model."""
    echo(reports.rendered(reports.read(results)))
