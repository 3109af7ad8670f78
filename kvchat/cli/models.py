"""The commands ``models``, ``modes``, ``keys``, ``plan`` and ``calibrate``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvchat import files, libraries, paths
from kvchat.cli import options
from kvchat.cli.options import LOAD, ModelArgument, taking
from kvchat.cli.output import echo, note, progress
from kvchat.cli.profile import load_settings
from kvchat.config import modes
from kvchat.config.modes import ModeParameters, SyncParameters, parse
from kvchat.models import catalog
from kvchat.models.catalog import fit, room
from kvchat.protocol.messages import Load
from kvchat.units import count, figure, size

if TYPE_CHECKING:
    from kvchat.engine.cards import CardCosts
    from kvchat.tui.actions import Action


AsList = Annotated[bool, typer.Option("--json", help="print a JSON list")]
# For choosing the budget: tokens of context and tokens decoded after it; numbers of books and of questions about facts.
CONTEXT, STEPS, BOOKS, FACTS = 3072, 16, 1, 3


@dataclass(frozen=True)
class Row:
    """A model in the list. ``type`` is the weights' quantization or dtype, ``needed_bytes`` their size once loaded.

    ``quantize`` is the mildest quantization that fits, None if none does or there is a ``problem``. For a model on a
    server only ``type`` is known, as the server describes it.
    """

    name: str
    kind: str
    file_bytes: int | None = None
    type: str = ""
    needed_bytes: int | None = None
    quantize: str | None = None
    problem: str = ""


@taking({name: LOAD[name] for name in ("device", "dtype")})
def list_models(
    ctx: typer.Context,
    as_json: AsList = False,
    asks_servers: Annotated[bool, typer.Option("--servers", help="also list servers on the usual ports")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="remove the packed weights that make loading faster")] = False,
) -> None:
    """List the models on this machine, and whether they fit."""
    packed = {file: file.stat().st_size for file in paths.packed_dir().glob("*")}
    if clear:
        for file in packed:
            file.unlink(missing_ok=True)
        note(f"Removed {size(sum(packed.values()))} of packed weights. The next load of a model packs them again.")
        return
    chosen = load_settings(options.flags(ctx.params)).settings.model
    memory = room(chosen.device)
    found = catalog.find(map(Path, chosen.folders))
    if chosen.servers or asks_servers:
        import asyncio  # 30 ms that no other command needs

        from kvchat.tui.models import of_servers

        served = asyncio.run(of_servers(chosen.servers, asks_servers))
        found += served
        if not served:
            note("No server was found on the usual ports. `kvchat doctor` has commands to start one.")
    rows = []
    for model in found:
        weights, fitting = model.weights, fit(model, chosen.dtype, memory)
        if weights is None or fitting is None:
            rows.append(Row(model.name, model.kind, type=model.served or "", problem=model.problem))
        else:
            facts = weights.nbytes, weights.type, fitting.needed, fitting.quantize
            rows.append(Row(model.name, model.kind, *facts))
    if as_json:
        echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    width = max(len(row.name) for row in rows)
    for row in rows:
        echo(f"{row.name:<{width}}  {row.kind:<7}  {row.problem or _facts(row)}")
    where = "of this machine's memory" if memory.device == "cpu" else "on the GPU"
    note(f"{size(memory.free)} {where} are free. `kvchat plan MODEL` computes exactly what a model needs.")
    if packed:
        total = size(sum(packed.values()))
        note(f"{total} of packed weights make loading faster. `kvchat models --clear` removes them.")


def _facts(row: Row) -> str:
    if row.file_bytes is None:
        return row.type
    file, needed = size(row.file_bytes), size(row.needed_bytes)
    fits = {"none": f"fits, takes {needed}", None: f"too large, takes {needed}"}
    return f"{file:>9}  {row.type:<9} {fits.get(row.quantize, f'{row.quantize} fits, takes {needed} without it')}"


def plan(load: Load, context: int | None, as_json: bool) -> int:
    """Print the plan; return 0, or 3 if nothing fits.

    Raises:
        KvchatError: the model or an option is refused.
    """
    libraries.check(load.quantize, load.device)
    from kvchat.engine.plan import memory_plan  # imports torch, which takes seconds

    made = memory_plan(load, context, progress)
    progress("")
    from kvchat.tui.models import plan_lines

    echo(json.dumps(asdict(made), indent=2) if as_json else "\n".join(plan_lines(made)))
    return 0 if made.proposal else 3


def card_costs(load: Load, card: str, context: int | None, as_json: bool) -> None:
    """Print the computed time per token on a card, which this machine need not have.

    Raises:
        KvchatError: the card, the model or an option is refused.
    """
    from kvchat.engine import cards  # imports torch, which takes seconds

    made = cards.card_costs(load, card, cards.CONTEXTS if context is None else [context], progress)
    progress("")
    if as_json:
        echo(json.dumps([asdict(costs) for costs in made], indent=2))
        return
    echo("\n".join(line for costs in made for line in _card_lines(costs)))
    echo("Computed from the bytes a token reads and data-sheet rates; - does not fit. Last column: the same ratio")
    echo("for an 8B model on an H200. `kvchat bench decode` measures this machine's card.")
    ram = cards.CARDS[made[0].card].ram
    echo(f"In full mode the CPU helps to read K/V in RAM (assumed: {ram} GB/s) if that is faster; cpu=0: never.")


def _card_lines(made: CardCosts) -> Iterator[str]:
    quantized = made.quantize.replace("none", "not quantized")
    yield f"{made.model} in {made.dtype}, weights {quantized}, {size(made.weights)}, on a card {made.card}"
    contexts = sorted({tokens for row in made.computed_ms.values() for tokens in row})
    name = max(map(len, made.computed_ms))
    yield f"{'ms a token after':<{name}} {''.join(f'{count(tokens):>10}' for tokens in contexts)}   measured / computed"
    yield f"{'weights alone':<{name}} {figure(made.floor_ms, digits=1):>10}"
    for variant, row in made.computed_ms.items():
        cells = "".join(f"{'-' if row.get(n) is None else figure(row[n], digits=1):>10}" for n in contexts)
        yield f"{variant:<{name}} {cells}   {figure(made.measured.get(variant), digits=2):>19}".rstrip()
    yield ""


def list_modes(as_json: AsList = False) -> None:
    """List the KV modes, their parameters and defaults."""
    if as_json:
        echo(json.dumps([_info(parameters) for parameters in modes.choosable().values()], indent=2))
    else:
        for group, members in modes.grouped().items():
            if group:
                echo(f"\n{group}: methods from other papers, skipped by F6")
            for info in map(_info, members):
                cells = [(p["name"], _default(p["default"]), p["doc"]) for p in info["params"]]
                widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
                echo(f"{info['name']:<12} {info['title']}")
                for name, default, doc in cells:
                    echo(f"  {name:<{widths[0]}} {default:<{widths[1]}} {doc}")
    for problem in modes.problems():
        note(problem)


def _info(parameters: type[ModeParameters]) -> dict[str, Any]:
    """Return one mode as plain data; a ``default`` of None means that kvchat chooses the value."""
    fields, defaults = parameters.model_fields, parameters().model_dump()
    return {
        "name": parameters.name,
        "title": parameters.title,
        "for_comparison": parameters.for_comparison,
        "params": [{"name": name, "default": defaults[name], "doc": fields[name].description or ""} for name in fields],
        "figures": dict(parameters.figures),
    }


def _default(value: Any) -> str:
    """Return the default as a user types it."""
    return "auto" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def list_keys(as_json: AsList = False) -> None:
    """List the chat's keys and commands. Their ids rebind keys in config.toml."""
    from kvchat.tui.actions import ACTIONS  # imports textual
    from kvchat.tui.rebinding import check_keys, describe_keys

    rebound = load_settings().settings.keys.given()
    check_keys(rebound)
    if as_json:
        echo(json.dumps([_as_json(action, rebound) for action in ACTIONS], indent=2, ensure_ascii=False))
        return
    rows = [(describe_keys(action, rebound), action.id, action.line if action.command else "") for action in ACTIONS]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row, action in zip(rows, ACTIONS, strict=True):
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        echo("  ".join([*cells, action.doc]))
    echo('\nTo change a key, set it under [keys] in config.toml, as in mode.next = "f12"; built-in keys are fixed.')


def _as_json(action: Action, rebound: Mapping[str, str]) -> dict[str, object]:
    from kvchat.tui.rebinding import keys_of

    return {
        "id": action.id,
        "keys": keys_of(action, rebound),
        "default_keys": keys_of(action, {}),
        "can_be_changed": action.is_bindable,
        "command": action.line if action.command else None,
        "where": action.scope,
        "doc": action.doc,
    }


@taking({name: LOAD[name] for name in ("model", "device")})
def calibrate(
    ctx: typer.Context,
    named: ModelArgument = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help="find the heads on this text file instead of generated text; repeatable"
        ),
    ] = None,
    clusters: Annotated[int | None, typer.Option(help="representative heads per layer; by default a quarter")] = None,
    representatives: Annotated[str, typer.Option(help="heads that represent: retrieval or centroid")] = "retrieval",
    coverage: Annotated[
        float, typer.Option(min=0, max=1, help="share of the attention that speculative mode's budget should cover")
    ] = 0.9,
    out: Annotated[Path | None, typer.Option(help="write to this file instead of kvchat's data folder")] = None,
) -> None:
    """Measure a model for sync and speculative mode. Finds which heads attend alike, and how many tokens to read."""
    if out:
        files.check_folder(out)
    parse(SyncParameters.name, {"representatives": representatives, "clusters": clusters})
    chosen = load_settings(options.flags(ctx.params)).settings.model
    # These import torch, so they come after the checks.
    from kvchat.bench.coverage import choose
    from kvchat.bench.settings import Coverage
    from kvchat.engine import calibration as engine
    from kvchat.kv.inspect import BUDGETS
    from kvchat.models.load import load_model

    loaded = load_model(Load(chosen.name, chosen.device), progress)
    samples = engine.file_samples(loaded, text) if text else engine.default_samples(loaded)
    names = ", ".join(t.name for t in text or ())
    read = f"{count(len(samples), 'part')} of {names}" if text else count(len(samples), "generated text")
    measured = engine.calibrate(
        loaded, samples, read, clusters, lambda done, total: progress(f"Reading text {done} of {total}")
    )
    engine.save(measured, out)  # the heads, in case choosing the budget fails or is interrupted
    texts = Coverage((), min(CONTEXT, loaded.context // 2), STEPS, BOOKS, FACTS)
    choice = choose(loaded, texts, coverage, progress)
    measured = replace(measured, choice=choice)
    progress("")
    heads_of = engine.representatives(measured, representatives)
    file = engine.save(measured, out)
    for layer, (heads, scores) in enumerate(zip(heads_of, measured.retrieval, strict=True)):
        listed = ", ".join(f"{head} ({scores[head]:.3f})" for head in heads)
        echo(f"layer {layer:>3}: representative KV heads {listed}")
    given = ", ".join(f"{name}={value}" for name, value in choice.params.items())
    echo(f"speculative covers {choice.covered:.1%} of the attention in {choice.measured_on} with {given}")
    if choice.covered < coverage:
        note(f"No budget up to {max(BUDGETS):,} covers {coverage:.0%}: facts may be missed in speculative mode.")
    echo(f"calibration {file}")
    if out and file != paths.calibration_dir() / f"{measured.revision}.json":
        note(f"sync mode reads only calibrations in {paths.calibration_dir()}, named by the model's revision.")
