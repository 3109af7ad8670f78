"""The command line: flags -> settings -> the application or a headless command.

Imports neither torch nor transformers nor textual; what a command needs is imported inside it.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvchat
from kvchat import paths
from kvchat.cli import bench
from kvchat.cli.ask import Question, SwitchAt, ask, compose, note
from kvchat.config import modes, profiles, schema
from kvchat.config.modes import PARAMETERS
from kvchat.config.schema import Key, Layer, Resolved
from kvchat.errors import KvchatError, UsageError, did_you_mean
from kvchat.protocol.messages import Load, ModeInfo, Turn


def main() -> None:
    """The program. Exit codes: 0, 2 usage or configuration, 3 does not fit, 130 interrupted, 1 otherwise."""
    try:
        app(prog_name="kvchat")
    except KvchatError as error:
        note(str(error))
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001  # a person is told where the traceback is instead of seeing it
        note(f"unexpected {type(error).__name__}: {error}".splitlines()[0] + f" {_log_traceback()}")
        sys.exit(1)


class Commands(TyperGroup):
    """Ends quietly when nobody reads stdout any more (``| head -1``)."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still flushes at its exit
            raise typer.Exit(0) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise KvchatError("The output cannot be written.", f"{error.strerror}.") from None


# Plain help: the same on every terminal, and quicker than with boxes.
app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config = typer.Typer(rich_markup_mode=None, help="Show, check or write the settings.", no_args_is_help=True)
app.add_typer(config, name="config")
app.add_typer(bench.app, name="bench")


# ---- flags -----------------------------------------------------------------------------------------


def _keys_of(parameter: str) -> tuple[Key, ...]:
    """Where a mode parameter is set: in every mode that has it."""
    return tuple(
        ("kv", n, parameter) for n, cls in PARAMETERS.items() if cls.available and parameter in cls.model_fields
    )


SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
FLAGS: dict[str, tuple[Key, ...]] = {
    "model": (("model", "name"),),
    "device": (("model", "device"),),
    "dtype": (("model", "dtype"),),
    "quantize": (("model", "quantize"),),
    "system": (("model", "system"),),
    "mode": (("kv", "mode"),),
    "budget": _keys_of("budget"),
    "theme": (("ui", "theme"),),
    **{name: (("sampling", name),) for name in SAMPLING},
}

Model = Annotated[str | None, typer.Option("-m", "--model", help="bundled, a folder, or a model's id on the hub")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16")]
Quantize = Annotated[str | None, typer.Option(help="none, or 4bit for weights in 4 bits (needs kvchat[bnb])")]
Mode = Annotated[str | None, typer.Option(help="KV mode, see `kvchat modes`")]
Budget = Annotated[int | None, typer.Option(help="tokens per KV head a decoded token may attend to")]
Param = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="a mode's parameter; repeatable")]
System = Annotated[str | None, typer.Option(help="system prompt")]


def _flags(params: Mapping[str, Any]) -> Layer:
    """The settings among a command's options."""
    given = {name: None if params.get(name) == [] else params.get(name) for name in FLAGS}
    flags = {f"--{name.replace('_', '-')}": (keys, given[name]) for name, keys in FLAGS.items()}
    return schema.flag_layer({**flags, **_params(params.get("param") or ())})


def _params(given: Iterable[str]) -> dict[str, tuple[tuple[Key, ...], str]]:
    flags = {}
    for text in given:
        name, equals, value = text.partition("=")
        known = {key for cls in PARAMETERS.values() if cls.available for key in cls.model_fields}
        if not equals:
            raise UsageError(f'--param "{text}" is not KEY=VALUE.')
        if name not in known:
            raise UsageError(f'No mode has a parameter "{name}".', did_you_mean(name, known))
        flags[f"--param {name}"] = (_keys_of(name), value)
    return flags


# ---- commands --------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def chat(  # typer reads the options from the signature, the settings read them from the context
    ctx: typer.Context,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    mode: Mode = None,
    budget: Budget = None,
    param: Param = None,
    system: System = None,
    theme: Annotated[str | None, typer.Option(help="name of a theme")] = None,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Chat in the terminal with a local model, and switch how its K/V is kept while it answers."""
    flags = _flags(ctx.params)
    if version:
        typer.echo(f"kvchat {kvchat.__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        raise typer.Exit(_run_application(flags))
    for flag in flags.origins.values():
        raise UsageError(f"{flag} stands before the command; put it behind: kvchat {ctx.invoked_subcommand} {flag} ...")


@app.command("ask")
def ask_command(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="what to ask; stdin where it is left out")] = None,
    file: Annotated[list[Path] | None, typer.Option("-f", "--file", help="put before the prompt; repeatable")] = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    mode: Mode = None,
    budget: Budget = None,
    param: Param = None,
    switch_at: Annotated[
        list[str] | None,
        typer.Option(metavar="N:MODE[,KEY=VALUE...]", help="switch after N generated tokens; repeatable"),
    ] = None,
    system: System = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="length of the answer at most")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token")] = None,
    top_k: Annotated[int | None, typer.Option(help="draw among the k likeliest tokens; 0 for all")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw among the likeliest with this probability together")] = None,
    min_p: Annotated[float | None, typer.Option(help="draw among tokens this fraction as likely as the best")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="over 1: what is there becomes less likely")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="a string that ends the answer; repeatable")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="print what the answer cost on stderr")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of the text")] = False,
) -> None:
    """Answer one prompt on stdout. Piped text is the prompt, or is added to PROMPT."""
    resolved = schema.load(_flags(ctx.params), profiles=profiles.layers)
    chosen = resolved.settings
    switches = tuple(_switch_at(text, chosen) for text in switch_at or ())
    _note_unused(resolved, [chosen.kv.mode, *(switch.mode for switch in switches)])
    text = compose(prompt, file or (), _piped())
    turns = (Turn("system", chosen.model.system),) if chosen.model.system else ()
    question = Question(
        _load(chosen), (*turns, Turn("user", text)), chosen.sampling.sampling(), switches, as_json, stats
    )
    raise typer.Exit(ask(question))


@app.command("modes")
def list_modes(as_json: Annotated[bool, typer.Option("--json", help="print a JSON list")] = False) -> None:
    """List the KV modes, their parameters and defaults."""
    infos = modes.mode_infos()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(info) for info in infos], indent=2))
    else:
        typer.echo("\n".join(_describe(info) for info in infos))


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="bundled, a folder, or a model's id on the hub")] = "bundled",
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="read this file instead of generated text; repeatable"),
    ] = None,
    clusters: Annotated[int | None, typer.Option(help="representative heads a layer; a quarter of the heads")] = None,
    representatives: Annotated[str, typer.Option(help="retrieval or centroid; which ones are shown")] = "retrieval",
    out: Annotated[Path | None, typer.Option(help="write here instead of kvchat's data folder")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the overlap of the heads to .svg or .png")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Measure which KV heads of a model attend alike, for the sync mode."""
    from kvchat.cli.calibrate import calibrate as run

    run(model, text or (), clusters, representatives, device, out, plot)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False) -> None:
    """Look at this machine: what kvchat would use, what is wrong, and what to do about it."""
    from kvchat.doctor.report import doctor as run

    raise typer.Exit(run(as_json))


@app.command()
def locate() -> None:
    """Show where kvchat's files lie."""
    places = {
        "settings": paths.config_file(),
        "own themes": paths.user_themes_dir(),
        "own profiles": paths.user_profiles_dir(),
        "data": paths.data_dir(),
        "log": paths.log_file(),
        "prompt history": paths.history_file(),
        "calibrations": paths.calibration_dir(),
        "bundled model": paths.bundled_model_dir(),
        "bundled themes": paths.bundled_themes_dir(),
        "bundled profiles": paths.bundled_profiles_dir(),
    }
    for name, path in places.items():
        typer.echo(f"{name:<17} {path}{'' if path.exists() else '   (not there yet)'}")


@config.command()
def show() -> None:
    """Print every setting with where it was set."""
    typer.echo("\n".join(schema.load(profiles=profiles.layers).lines()))


@config.command()
def validate(file: Annotated[Path | None, typer.Argument(help="instead of the settings in force")] = None) -> None:
    """Check the settings file; exit code 2 if it is wrong."""
    path = file or paths.config_file()
    if file and not file.exists():
        raise UsageError(f"There is no file {file}.")
    schema.resolve(schema.file_layer(path))
    typer.echo(f"{path}: {'good' if path.exists() else 'not there; the defaults hold'}")


@config.command()
def init() -> None:
    """Write a settings file in which every setting is explained."""
    path = paths.config_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(schema.template())
    except FileExistsError:
        raise UsageError(f"{path} is there already and stays as it is.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    typer.echo(path)


@config.command("schema")
def print_schema() -> None:
    """Print the JSON schema of the settings file."""
    typer.echo(json.dumps(schema.Settings.model_json_schema(), indent=2))


# ---- pieces ----------------------------------------------------------------------------------------


def _run_application(flags: Layer) -> int:
    problems: list[UsageError] = []

    def tolerant(device: str) -> Iterable[Layer]:
        """A wrong profile is no reason not to chat."""
        found = profiles.find(device)
        problems.extend(found.problems)
        return found.layers

    resolved = schema.load(flags, profiles=tolerant)
    if not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)) or os.environ.get("TERM") == "dumb":
        raise UsageError(
            "The chat needs a terminal.",
            "Stdin or stdout is none, or it can only print.",
            "One answer without a screen: kvchat ask PROMPT",
        )
    from kvchat.tui.app import run
    from kvchat.tui.config import AppConfig

    chosen = resolved.settings
    application = AppConfig(
        load=_load(chosen),
        sampling=chosen.sampling.sampling(),
        system=chosen.model.system or None,
        theme=chosen.ui.theme,
        theme_dirs=(paths.user_themes_dir(),),
        log_file=paths.log_file(),
        history_file=paths.history_file() if chosen.ui.history else None,
        problems=tuple(map(str, problems)),
    )
    return run(application)


def _load(chosen: schema.Settings) -> Load:
    model, kv = chosen.model, chosen.kv
    mode_params = {mode: params for mode in modes.PARAMETERS if (params := kv.params(mode))}
    return Load(
        model.name,
        model.device,
        model.dtype,
        kv.mode,
        mode_params=mode_params,
        quantize=model.quantize,
        fast=model.fast,
    )


def _switch_at(text: str, chosen: schema.Settings) -> SwitchAt:
    """``N:MODE[,KEY=VALUE...]``; the settings give the parameters that are not named."""
    match = re.fullmatch(r"(\d+):(\w+)((?:,\w+=[^,=]*)*)", text)
    if not match:
        raise UsageError(f'--switch-at "{text}" is not N:MODE.', hint="For example: 64:speculative,budget=512")
    after, mode, pairs = match.groups()
    given = dict(pair.split("=") for pair in pairs.split(",") if pair)
    checked = modes.parse(mode, {**chosen.kv.params(mode), **given})
    return SwitchAt(int(after), mode, checked.model_dump(exclude_unset=True))


def _note_unused(resolved: Resolved, used: list[str]) -> None:
    """Say which mode parameters on the command line have no effect."""
    having: dict[str, set[str]] = {}
    for key, origin in resolved.origins.items():
        if origin.startswith("--") and len(key) == 3:
            having.setdefault(origin, set()).add(key[1])
    for origin, names in having.items():
        if not names & set(used):
            note(f"{origin} has no effect in the {used[0]} mode, only in {', '.join(sorted(names))}.")


def _piped() -> bytes:
    return b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _describe(info: ModeInfo) -> str:
    rows = [f"{info.name:<12} {info.title}" + ("" if info.available else "   (not available yet)")]
    cells = [(p.name, "auto" if p.default is None else str(p.default), p.doc) for p in info.params]
    wide = [max(len(row[column]) for row in cells) for column in (0, 1)]
    rows += [f"  {name:<{wide[0]}} {default:<{wide[1]}} {doc}" for name, default, doc in cells]
    return "\n".join(rows)


def _log_traceback() -> str:
    """Append the exception being handled to the log; the sentence that says so."""
    log = paths.log_file()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8", errors="replace") as file:
            traceback.print_exc(file=file)
    except OSError as error:
        traceback.print_exc()
        return f"(the log {log} cannot be written: {error.strerror})"
    return f"(the traceback is in {log})"
