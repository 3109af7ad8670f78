"""``kvchat bench resume``: a conversation taken up again."""

from __future__ import annotations

from typing import Annotated

import typer

from kvchat.bench.model_choice import ModelChoice
from kvchat.cli.bench_options import Budget, Device, Dtype, HostPages, Json, Mode, Model, Out, Quantize, Shape
from kvchat.cli.bench_output import Run


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
