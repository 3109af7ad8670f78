"""``kvchat bench WHAT``: measurements. Progress goes to stderr, results to stdout.

Imports no torch: every command imports what it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvchat import files
from kvchat.cli.output import echo, report
from kvchat.errors import UsageError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure speed, memory and quality of the modes.")

Model = Annotated[str, typer.Option("-m", "--model", help="bundled, a folder, or a model's id on the hub")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]
Shape = Annotated[
    str, typer.Option(help="random weights in the shape of llama-3.1-8b, qwen2.5-7b, ... instead of a model")
]
Variants = Annotated[list[str] | None, typer.Option(metavar="MODE[:KEY=VALUE,...]", help="a variant; repeatable")]
Mode = Annotated[str, typer.Option(help="the KV mode")]
Budget = Annotated[int, typer.Option(help="tokens per KV head")]
Out = Annotated[Path | None, typer.Option(help="write the JSON object to this file")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object, with what was run on")]


@app.command("passkey")
def passkey_command(
    mode: Variants = None,
    cases: Annotated[int, typer.Option(min=1, help="conversations")] = 40,
    tokens: Annotated[int, typer.Option(min=64, help="tokens of a conversation, about")] = 3000,
    inside: Annotated[int, typer.Option(min=0, help="tokens of an answer before the question, in the same turn")] = 0,
    seed: Annotated[int, typer.Option(help="the same seed gives the same conversations")] = 0,
    model: Model = "bundled",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Recall of a number told in an earlier turn, mode against mode."""
    from kvchat.bench import passkey

    variants = mode or passkey.STANDARD
    result = passkey.run(
        variants, model=model, device=device, seed=seed, n=cases, tokens=tokens, inside=inside, report=report
    )
    _print(result, as_json)


@app.command("perplexity")
def perplexity_command(
    mode: Variants = None,
    text: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="a text file, UTF-8; repeatable")
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, help="decoded tokens of a passage")] = 1000,
    passages: Annotated[int | None, typer.Option(min=1, help="passages at most (default: all)")] = None,
    model: Model = "bundled",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Perplexity of book text, tokens read and time, mode against full."""
    from kvchat.bench import perplexity

    variants = mode or perplexity.STANDARD
    result = perplexity.run(
        variants, texts=text or (), model=model, device=device, tokens=tokens, limit=passages, report=report
    )
    _print(result, as_json)


@app.command("decode")
def decode_command(
    mode: Variants = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="tokens before the measured ones; repeatable")
    ] = None,
    budget: Budget = 512,
    change_rate: Annotated[
        list[str] | None,
        typer.Option(help="share of speculative's pages that is new at each step, or natural; repeatable"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="tokens of a round that count")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="rounds in which every variant has its turn")] = 5,
    baselines: Annotated[
        str | None, typer.Option(help="transformers' dynamic, static, compile, offloaded, generate; by commas, or none")
    ] = None,
    model: Model = "bundled",
    shape: Shape = "",
    prefill: Annotated[bool, typer.Option("--prefill", help="read a prompt with random weights too")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
    out: Out = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="draw the times to .svg or .png (needs kvchat[plot])")
    ] = None,
    save_profile: Annotated[
        bool, typer.Option("--save-profile", help="keep the device's measured roofline as your GPU profile")
    ] = False,
) -> None:
    """Time per decoded token, memory and traffic, against transformers' caches in the same run."""
    from kvchat.bench import plot as plots

    _check_folder(out)
    if plot:
        plots.check(plot)
    from kvchat.bench import decode  # imports torch, so after the checks
    from kvchat.config import profiles

    standard = decode.Settings()
    settings = decode.Settings(
        model=model,
        shape=shape,
        device=device,
        dtype=dtype,
        contexts=tuple(context or standard.contexts),
        modes=tuple(mode or standard.modes),
        budget=budget,
        change_rates=tuple(change_rate or standard.change_rates),
        steps=steps,
        rounds=rounds,
        baselines=_names(baselines),
        prefill=prefill,
    )
    result = decode.run(settings, report)
    _print(result, as_json)
    _save(result, out)
    if plot:
        plots.decode(result, plot)
        report(str(plot))
    if save_profile:
        report(f"profile {profiles.save(profiles.Measured(**result['roofline']), device)}")


@app.command("prefill")
def prefill_command(
    length: Annotated[list[int] | None, typer.Option(min=1, help="tokens of a prompt; repeatable")] = None,
    turn: Annotated[int, typer.Option(min=1, help="tokens of a second prompt after it")] = 64,
    mode: Mode = "streaming",
    rounds: Annotated[int, typer.Option(min=1, help="rounds in which both have their turn")] = 3,
    model: Model = "bundled",
    shape: Shape = "",
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Time and peak memory of reading a prompt, against transformers' one forward in the same run."""
    _check_folder(out)
    from kvchat.bench import prefill  # imports torch, so after the check

    lengths = tuple(length or prefill.Settings().lengths)
    result = prefill.run(prefill.Settings(model, shape, device, dtype, lengths, turn, mode, rounds), report)
    _print(result, as_json)
    _save(result, out)


@app.command("long-run")
def long_run_command(
    tokens: Annotated[int, typer.Option(min=10, help="tokens to generate")] = 20_000,
    mode: Mode = "streaming",
    budget: Budget = 512,
    as_json: Json = False,
) -> None:
    """Device memory and time per step over a long generation."""
    from kvchat.bench import long_run

    _print(long_run.run(tokens, mode, budget, report), as_json)


def _names(baselines: str | None) -> tuple[str, ...] | None:
    """The baselines named, by commas; None where nothing was said."""
    return None if baselines is None else tuple(name for name in baselines.split(",") if name not in ("", "none"))


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        echo(json.dumps(result, indent=2))


def _check_folder(file: Path | None) -> None:
    """Check before a long measurement that the folder of ``file`` exists."""
    if file and not file.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {file.absolute().parent}.")


def _save(result: dict[str, Any], file: Path | None) -> None:
    if file is None:
        return
    try:
        files.write(file, (json.dumps(result, indent=2) + "\n").encode())
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from None
    report(str(file))
