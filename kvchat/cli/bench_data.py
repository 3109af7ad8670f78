"""``kvchat bench data``: published data sets from a folder of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvchat.bench.model_choice import ModelChoice
from kvchat.cli.bench_options import (
    Budgets,
    Device,
    Dtype,
    Json,
    Model,
    Out,
    Quantize,
    Seed,
    Variants,
    standard_variants,
)
from kvchat.cli.bench_output import Run


def data_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="longbench, ruler, aime, pg19 or wikitext")],
    folder: Annotated[Path, typer.Option(help="the folder with its files")],
    mode: Variants = None,
    budget: Budgets = None,
    rows: Annotated[int | None, typer.Option(min=1, help="rows of a task, passages of texts (default: all)")] = None,
    samples: Annotated[int, typer.Option(min=1, help="answers to each row, sampled where there are several")] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of an answer or a passage (default: the data set's; 1000)")
    ] = None,
    seed: Seed = 0,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Scores of a published data set, or perplexity of its texts, mode against full."""
    from kvchat.bench import perplexity, recall
    from kvchat.bench.datasets import answers, long_texts

    modes = tuple(mode or ()) or standard_variants(recall.STANDARD, budget)
    choice = ModelChoice(model, device, dtype, quantize)
    if name in long_texts.ENDINGS:
        texts = long_texts.texts(name, folder)
        of_texts = perplexity.Settings(modes, tokens or perplexity.Settings.tokens, rows, texts)
        run = Run("perplexity", of_texts, choice, out, as_json)
        run.done(perplexity.run(of_texts, run.choice, run.frame))
        return
    settings = answers.Settings(name, str(folder), modes, rows, samples, tokens, seed)
    run = Run("data", settings, choice, out, as_json)
    run.done(answers.run(settings, run.choice, run.frame))
