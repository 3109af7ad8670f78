"""The command line: flags -> settings -> the application or a headless command.

This module imports neither torch nor transformers nor textual: each command imports what it needs.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvchat
from kvchat import files, paths
from kvchat.cli import bench, chats, config, models, options, profile
from kvchat.cli.ask import SwitchAt, ask
from kvchat.cli.chat import chat, load_of, replay, turns
from kvchat.cli.compare import compare_command
from kvchat.cli.output import echo, note, replace_unknown_characters, report
from kvchat.cli.profile import load_settings
from kvchat.config import modes
from kvchat.config.sources import Resolved
from kvchat.errors import DoesNotFitError, KvchatError
from kvchat.process import postpone_full_collections, spin_briefly, use_physical_cores

# Commands of other programs, such as ollama, and what to type instead.
MEANT = {"help": "--help", "version": "--version", "list": "models", "pull": "-m MODEL", "run": "-m MODEL"}


def main() -> None:
    """Run the program. Exit codes: 0 success, 2 usage or configuration, 3 does not fit, 130 interrupted, 1 others."""
    files.name_temporary_folder()
    postpone_full_collections()
    paths.name_home()
    spin_briefly()
    use_physical_cores()
    replace_unknown_characters()
    try:
        app(prog_name="kvchat")
    except KvchatError as error:
        note(str(error))
        sys.exit(error.exit_code)
    except MemoryError:
        note("Out of memory: the system, or a limit such as ulimit -v, allows this process no more.")
        sys.exit(DoesNotFitError.exit_code)
    except Exception as error:  # noqa: BLE001  # the message names the file with the traceback
        note(f"unexpected {type(error).__name__}: {error}".splitlines()[0] + f" {_log_traceback()}")
        sys.exit(1)


class Commands(TyperGroup):
    """Opens the chat if a question takes the place of a command; ends quietly if stdout is closed (``| head -1``)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``: a question and its options go to the chat, options before a command to the command."""
        _, words, _ = self.make_parser(ctx).parse_args(args=list(args))
        # Text that neither is nor resembles a command is a question.
        is_near = words and (words[0] in MEANT or get_close_matches(words[0], self.commands, n=1))
        is_question = words and (len(words[0].split()) > 1 or not is_near)
        if words and words[0] in self.commands:
            args = [words[0], *args[: len(args) - len(words)], *words[1:]]
        return super().parse_args(ctx, ["chat", *args] if is_question else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; refuse a misspelled one."""
        word = args[0]
        if word not in self.commands and not ctx.resilient_parsing:
            meant = MEANT.get(word) or get_close_matches(word, self.commands, n=1)[0]
            ctx.fail(f'There is no command "{word}". Did you mean {meant}? To ask it: kvchat chat "{" ".join(args)}"')
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python still flushes at exit
            raise typer.Exit(0) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise KvchatError(
                "The output cannot be written.", f"{error.strerror}.", "Free some disk space, or write elsewhere."
            ) from None


# Plain help is the same on every terminal, and faster than help with boxes.
app = typer.Typer(
    cls=Commands,
    subcommand_metavar="[PROMPT | COMMAND [ARGS]...]",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(chats.app, name="chats")
app.add_typer(profile.app, name="profile")


# ---- commands --------------------------------------------------------------------------------------
@app.callback(invoke_without_command=True)
@options.taking(options.LOAD, options.MODE, options.SYSTEM, options.UI)
def kvchat_command(
    ctx: typer.Context,
    resume: options.Resume = False,
    plain: options.Plain = False,
    record: options.Record = None,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Chat in the terminal with a local model, and switch how it reads its KV cache while it answers."""
    if version:
        typer.echo(f"kvchat {paths.with_commit(kvchat.__version__)}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        raise typer.Exit(chat(options.flags(ctx.params), resume, plain, record))


@app.command("chat")
@options.taking(options.LOAD, options.MODE, options.SYSTEM, options.UI)
def chat_command(
    ctx: typer.Context,
    prompt: options.Prompt = None,
    resume: options.Resume = False,
    plain: options.Plain = False,
    record: options.Record = None,
) -> None:
    """Start the chat, as kvchat alone does. PROMPT is its first question."""
    raise typer.Exit(chat(options.flags(ctx.params), resume, plain, record, " ".join(prompt or ())))


@app.command("ask")
@options.taking(options.LOAD, options.MODE, options.SYSTEM, options.SAMPLING)
def ask_command(
    ctx: typer.Context,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="what to ask; by default stdin")] = None,
    file: options.Files = None,
    switch_at: Annotated[
        list[str] | None,
        typer.Option(metavar="N:MODE[,KEY=VALUE...]", help="switch after N generated tokens; repeatable"),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="print tokens and times on stderr")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of the text")] = False,
) -> None:
    """Answer one prompt on stdout. Piped text is the prompt, or goes before PROMPT like a file."""
    resolved = load_settings(options.flags(ctx.params))
    chosen = resolved.settings
    switches = tuple(SwitchAt.read(text, chosen) for text in switch_at or ())
    _note_unused(resolved, [chosen.kv.mode, *(switch.mode for switch in switches)])
    _note_own(resolved, switches)
    asked = turns(" ".join(prompt or ()), file or (), chosen.model.system)
    raise typer.Exit(ask(load_of(chosen), asked, chosen.sampling.sampling(), switches, as_json, stats))


app.command("compare")(compare_command)


@app.command("serve")
@options.taking(options.LOAD, options.MODE, options.SYSTEM, options.SAMPLING, options.SERVED)
def serve_command(
    ctx: typer.Context,
    named: options.ModelArgument = None,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 for all interfaces")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port")] = 8000,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="KVCHAT_API_KEY",
            help="require this key; other users can see it in the process list, so prefer the variable",
        ),
    ] = "",
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="allow web pages from this origin, such as https://chat.example; repeatable"
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="maximum number of queued requests")] = 32,
) -> None:
    """Serve other programs through OpenAI's API."""
    from kvchat.cli.serve import serve

    serve(load_settings(options.flags(ctx.params)), host, port, api_key, tuple(cors or ()), queue)


@app.command("replay")
def replay_command(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="a recording; by default the demonstration")
    ] = None,
    plain: options.Plain = False,
) -> None:
    """Play a recorded chat without a model. `kvchat --record FILE` records one; neither torch nor a GPU is needed."""
    raise typer.Exit(replay(file, plain))


app.command("modes")(models.list_modes)
app.command("models")(models.list_models)
app.command("keys")(models.list_keys)


@app.command("plan")
@options.taking(
    {name: options.LOAD[name] for name in ("model", "device", "gpus", "dtype", "host_dtype")}, options.PARAMS
)
def plan_command(
    ctx: typer.Context,
    named: options.ModelArgument = None,
    context: Annotated[int | None, typer.Option(help="tokens to plan for; default: the model's context")] = None,
    card: Annotated[
        str,
        typer.Option(help='compute the time per token on a card you may not have, such as "RTX 3060"', metavar="NAME"),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Compute what memory a model needs, and what fits. For each quantization and mode; nothing is loaded."""
    load = load_of(load_settings(options.flags(ctx.params)).settings)
    if card:
        models.card_costs(load, card, context, as_json)
        return
    raise typer.Exit(models.plan(load, context, as_json))


app.command("calibrate")(models.calibrate)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False) -> None:
    """Check this machine: what works, what does not, and what to do."""
    from kvchat.doctor.report import doctor as run

    raise typer.Exit(run(as_json))


@app.command()
def locate() -> None:
    """Show where kvchat's files are."""
    places = {
        "settings": paths.config_file(),
        "your themes": paths.user_themes_dir(),
        "your profiles": paths.user_profiles_dir(),
        "data": paths.data_dir(),
        "conversations": paths.database(),
        "saved K/V": paths.saved_kv_dir(),
        "served K/V": paths.served_kv_dir(),
        "log": paths.log_file(),
        "prompt history": paths.history_file(),
        "calibrations": paths.calibration_dir(),
        "bundled model": paths.bundled_model_dir(),
        "bundled themes": paths.bundled_themes_dir(),
        "bundled profiles": paths.bundled_profiles_dir(),
    }
    for name, path in places.items():
        echo(f"{name:<17} {path}{'' if path.exists() else '   (does not exist yet)'}")


def _note_unused(resolved: Resolved, used: list[str]) -> None:
    """Print which mode parameters on the command line have no effect."""
    modes_of: dict[str, set[str]] = {}
    in_use = {*used, *(modes.ENTERED_BY_AUTO if modes.AUTO in used else ())}
    for key, origin in resolved.origins.items():
        if origin.startswith("--") and len(key) == 3:
            modes_of.setdefault(origin, set()).add(key[1])
    for origin, names in modes_of.items():
        if not names & in_use:
            spills = origin == "--budget" and "resident" in modes.choosable()[used[0]].model_fields
            hint = f" To set what {used[0]} keeps on a GPU: --param resident=N." if spills else ""
            own = [mode for mode in used if origin == "--budget" and "budget" in modes.choosable()[mode].own]
            hint = f" For {own[0]}: --param {own[0]}.budget=N." if own else hint
            note(f"{origin} has no effect in {used[0]} mode, only in {', '.join(sorted(names))}.{hint}")


def _note_own(resolved: Resolved, switches: Iterable[SwitchAt]) -> None:
    """Print the cost of each parameter on the command line that its mode lists in ``own``."""
    kv = resolved.settings.kv
    given = [
        (key[1], key[2], kv.params(key[1])[key[2]])
        for key, origin in resolved.origins.items()
        if origin.startswith("--") and len(key) == 3 and key[1] == kv.mode
    ]
    given += [(switch.mode, name, value) for switch in switches for name, value in switch.params.items()]
    for mode, name, value in given:
        if value is not None and name in modes.choosable()[mode].own:
            note(f"{mode}: {modes.choosable()[mode].own[name]}.")


def _log_traceback() -> str:
    """Append the traceback of the current exception to the log; return a remark that says where the log is."""
    log = paths.log_file()
    try:
        files.append(log, traceback.format_exc().encode("utf-8", "replace"))
    except OSError as error:
        report(traceback.format_exc())
        return f"(the log {log} cannot be written: {error.strerror})"
    return f"(the traceback is in {log})"
