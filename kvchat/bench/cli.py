"""``kvchat bench WHAT``: measurements. Progress goes to stderr, results to stdout.

Imports no torch: every command imports what it runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure speed, memory and quality of the modes.")

Model = Annotated[str, typer.Option("-m", "--model", help="bundled, a folder, or a model's id on the hub")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object, with what was run on")]


@app.command("passkey")
def passkey_command(
    mode: Annotated[
        list[str] | None, typer.Option(metavar="MODE[:KEY=VALUE,...]", help="a contender; repeatable")
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="conversations")] = 40,
    tokens: Annotated[int, typer.Option(min=64, help="tokens of a conversation, about")] = 3000,
    seed: Annotated[int, typer.Option(help="the same seed gives the same conversations")] = 0,
    model: Model = "bundled",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Recall of a number told in an earlier turn, mode against mode."""
    from kvchat.bench import passkey

    contenders = mode or passkey.STANDARD
    result = passkey.run(contenders, model=model, device=device, seed=seed, n=cases, tokens=tokens, report=_report)
    _print(result, as_json)


@app.command("perplexity")
def perplexity_command(
    mode: Annotated[
        list[str] | None, typer.Option(metavar="MODE[:KEY=VALUE,...]", help="a contender; repeatable")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="a text file, UTF-8; repeatable")
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, help="decoded tokens of a passage")] = 1000,
    passages: Annotated[int | None, typer.Option(min=1, help="passages at most (default: all)")] = None,
    model: Model = "bundled",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity of book text, active tokens and time, mode against full."""
    from kvchat.bench import perplexity

    contenders = mode or perplexity.STANDARD
    result = perplexity.run(
        contenders, texts=text or (), model=model, device=device, tokens=tokens, limit=passages, report=_report
    )
    _print(result, as_json)


@app.command("decode")
def decode_command(
    mode: Annotated[list[str] | None, typer.Option(help="a mode; repeatable")] = None,
    context: Annotated[list[int] | None, typer.Option(help="tokens before the measured ones; repeatable")] = None,
    budget: Annotated[int, typer.Option(help="tokens per KV head")] = 512,
    model: Model = "bundled",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time per decoded token against transformers' ``generate``."""
    from kvchat.bench import decode

    standard = decode.Settings()
    settings = decode.Settings(
        model,
        device,
        contexts=tuple(context or standard.contexts),
        modes=tuple(mode or standard.modes),
        budget=budget,
    )
    _print(decode.run(settings, _report), as_json)


@app.command("endurance")
def endurance_command(
    tokens: Annotated[int, typer.Option(min=10, help="tokens to generate")] = 20_000,
    mode: Annotated[str, typer.Option(help="the KV mode")] = "streaming",
    budget: Annotated[int, typer.Option(help="tokens per KV head")] = 512,
    as_json: Json = False,
) -> None:
    """A long generation: is device memory flat, are steps flat?"""
    from kvchat.bench import endurance

    _print(endurance.run(tokens, mode, budget, _report), as_json)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
