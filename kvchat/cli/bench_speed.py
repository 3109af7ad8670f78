"""``kvchat bench``: measurements of time and memory. Each command imports what it runs, as in ``bench.py``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvchat.bench.model_choice import ModelChoice
from kvchat.cli.bench_options import (
    Baselines,
    Budget,
    ChangeRates,
    Contexts,
    Corrections,
    Device,
    Dtype,
    HostPages,
    Json,
    Mode,
    Model,
    OtherLoad,
    Out,
    Plot,
    Quantize,
    ReadsPrompt,
    Rounds,
    SaveProfile,
    Shape,
    Steps,
    Variants,
    baseline_names,
)
from kvchat.cli.bench_output import Run
from kvchat.cli.output import report


def decode_command(
    mode: Variants = None,
    context: Contexts = None,
    budget: Budget = 512,
    change_rate: ChangeRates = None,
    corrections: Corrections = None,
    steps: Steps = 64,
    rounds: Rounds = 5,
    baselines: Baselines = None,
    model: Model = "bundled",
    shape: Shape = "",
    prefill: ReadsPrompt = False,
    load: OtherLoad = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
    plot: Plot = None,
    save_profile: SaveProfile = False,
) -> None:
    """Time per decoded token, memory and traffic, against transformers' caches in the same run."""
    from kvchat.bench import decode
    from kvchat.config import profiles

    settings = decode.Settings(
        shape=shape,
        contexts=tuple(context or decode.Settings.contexts),
        modes=tuple(mode or decode.Settings.modes),
        budget=budget,
        change_rates=tuple(change_rate or decode.Settings.change_rates),
        corrections=tuple(corrections or ()),
        steps=steps,
        rounds=rounds,
        baselines=baseline_names(baselines),
        prefill=prefill,
        load=load,
    )
    run = Run("decode", settings, ModelChoice(model, device, dtype, quantize), out, as_json, plot)
    result = run.done(decode.run(settings, run.choice, run.frame))
    if save_profile:
        report(f"profile {profiles.save(profiles.Measured(**result['roofline']), device)}")


def lengths_command(
    mode: Variants = None,
    context: Contexts = None,
    budget: Budget = 512,
    steps: Steps = 64,
    rounds: Rounds = 9,
    model: Model = "bundled",
    shape: Shape = "",
    prefill: ReadsPrompt = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Time per decoded token after conversations of several lengths, in turns."""
    from kvchat.bench import lengths

    settings = lengths.Settings(
        shape=shape,
        contexts=tuple(context or lengths.Settings.contexts),
        modes=tuple(mode or lengths.Settings.modes),
        budget=budget,
        steps=steps,
        rounds=rounds,
        prefill=prefill,
    )
    run = Run("lengths", settings, ModelChoice(model, device, dtype, quantize), out, as_json, plot)
    run.done(lengths.run(settings, run.choice, run.frame))


def prefill_command(
    length: Annotated[list[int] | None, typer.Option(min=1, help="tokens of a prompt; repeatable")] = None,
    turn: Annotated[int, typer.Option(min=1, help="tokens of a second prompt after it")] = 64,
    mode: Mode = "streaming",
    rounds: Annotated[int, typer.Option(min=1, help="rounds in which both have their turn")] = 3,
    model: Model = "bundled",
    shape: Shape = "",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Time and peak memory of reading a prompt, against transformers' one forward in the same run."""
    from kvchat.bench import prefill

    settings = prefill.Settings(shape, tuple(length or prefill.Settings().lengths), turn, mode, rounds)
    run = Run("prefill", settings, ModelChoice(model, device, dtype, quantize), out, as_json)
    run.done(prefill.run(settings, run.choice, run.frame))


def long_run_command(
    tokens: Annotated[int, typer.Option(min=10, help="tokens to generate")] = 20_000,
    mode: Mode = "streaming",
    budget: Budget = 512,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Device memory and time per step over a long generation."""
    from kvchat.bench import long_run

    settings = long_run.Settings(mode, budget, tokens)
    run = Run("long-run", settings, ModelChoice(model, device, dtype, quantize), out, as_json)
    run.done(long_run.run(settings, run.choice, run.frame))


def resume_command(
    tokens: Annotated[int, typer.Option(min=64, help="tokens of the conversation, about")] = 8000,
    rounds: Annotated[int, typer.Option(min=1, help="times that each is measured")] = 3,
    mode: Mode = "full",
    budget: Budget = 512,
    shape: Shape = "",
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    host_dtype: HostPages = "model",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Time to take up a conversation again, from memory and from disk, against reading its prompt."""
    from kvchat.bench import resume

    settings = resume.Settings(tokens, rounds, mode, budget, shape)
    run = Run("resume", settings, ModelChoice(model, device, dtype, quantize, host_dtype), out, as_json)
    run.done(resume.run(settings, run.choice, run.frame))
