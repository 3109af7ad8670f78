"""``kvchat bench WHAT``: measurements. Progress goes to stderr, results to stdout.

Each keeps its finished rows in a file, that of ``--out`` or one of its own until it is complete, and goes on from
there. Imports no torch: every command imports what it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvchat.bench.model_choice import ModelChoice
from kvchat.bench.variant import with_budgets
from kvchat.cli import bench_data, bench_report, bench_speed
from kvchat.cli.bench_options import (
    Budgets,
    Cases,
    Device,
    Dtype,
    HostPages,
    Json,
    Model,
    Out,
    Parts,
    Plot,
    Quantize,
    Seed,
    StudySizes,
    Texts,
    Variants,
    file_names,
    standard_variants,
)
from kvchat.cli.bench_output import Run

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure speed, memory and quality of the modes.")


@app.command("agreement")
def agreement_command(
    mode: Variants = None,
    budget: Budgets = None,
    context: Annotated[int, typer.Option(min=1, help="tokens before the decoded ones")] = 2048,
    tokens: Annotated[int, typer.Option(min=1, help="decoded tokens of a passage")] = 400,
    passages: Annotated[int | None, typer.Option(min=1, help="passages at most (default: all)")] = None,
    text: Texts = None,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    host_dtype: HostPages = "model",
    as_json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """KL divergence from full attention, top-1 agreement and attention mass covered, token by token."""
    variants = with_budgets(mode or (), budget or ())  # refused before torch is imported
    from kvchat.bench import agreement

    chosen = variants or standard_variants(agreement.STANDARD, budget)
    settings = agreement.Settings(chosen, context, tokens, passages, file_names(text))
    run = Run("agreement", settings, ModelChoice(model, device, dtype, quantize, host_dtype), out, as_json, plot)
    run.done(agreement.run(settings, run.choice, run.frame))


@app.command("coverage")
def coverage_command(
    mode: Variants = None,
    budget: Budgets = None,
    context: Annotated[int, typer.Option(min=1, help="tokens before the decoded ones")] = 3072,
    tokens: Annotated[int, typer.Option(min=1, help="decoded tokens of a passage")] = 32,
    passages: Annotated[int, typer.Option(min=0, help="passages of books at most")] = 3,
    facts: Annotated[int, typer.Option(min=0, help="questions about what such a text tells")] = 6,
    text: Texts = None,
    seed: Seed = 0,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Share of the full softmax mass on what each mode reads, beside the best pages and tokens; the worst head."""
    variants = with_budgets(mode or (), budget or ())  # refused before torch is imported
    from kvchat.bench import coverage

    chosen = variants or with_budgets(coverage.STANDARD, budget or coverage.BUDGETS)
    settings = coverage.Settings(chosen, context, tokens, passages, facts, file_names(text), seed)
    run = Run("coverage", settings, ModelChoice(model, device, dtype, quantize), out, as_json)
    run.done(coverage.run(settings, run.choice, run.frame))


@app.command("recall")
def recall_command(
    mode: Variants = None,
    budget: Budgets = None,
    task: Annotated[
        list[str] | None, typer.Option(help="passkey keys values all chain name rule system told pinned; repeatable")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=16, help="tokens of a text, about; repeatable")] = None,
    depth: Annotated[list[float] | None, typer.Option(help="where the fact stands, 0 to 1; repeatable")] = None,
    cases: Annotated[int, typer.Option(min=1, help="conversations of each length and depth")] = 4,
    keys: Annotated[int, typer.Option(help="facts told where several are")] = 4,
    seed: Seed = 0,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Facts found in long texts: tasks by lengths, depths, modes and budgets."""
    variants = with_budgets(mode or (), budget or ())  # refused before torch is imported
    from kvchat.bench import recall

    standard = recall.Settings(())
    settings = recall.Settings(
        variants or standard_variants(recall.STANDARD, budget),
        tuple(task or standard.tasks),
        tuple(length or standard.lengths),
        tuple(depth or standard.depths),
        cases,
        keys,
        seed,
    )
    run = Run("recall", settings, ModelChoice(model, device, dtype, quantize), out, as_json, plot)
    run.done(recall.run(settings, run.choice, run.frame))


@app.command("turns")
def turns_command(
    mode: Variants = None,
    budget: Budgets = None,
    cases: Cases = 4,
    tokens: Annotated[int, typer.Option(min=64, help="tokens of a text, about")] = 3000,
    seed: Seed = 0,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Ten questions over one text, scored by turn."""
    variants = with_budgets(mode or (), budget or ())  # refused before torch is imported
    from kvchat.bench import turns

    settings = turns.Settings(variants or standard_variants(turns.STANDARD, budget), cases, tokens, seed)
    run = Run("turns", settings, ModelChoice(model, device, dtype, quantize), out, as_json)
    run.done(turns.run(settings, run.choice, run.frame))


@app.command("switches")
def switches_command(
    mode: Variants = None,
    budget: Budgets = None,
    cases: Cases = 4,
    tokens: Annotated[int, typer.Option(min=64, help="tokens of a conversation, about")] = 1400,
    inside: Annotated[int, typer.Option(min=1, help="tokens decoded in the mode in which the fact is told")] = 128,
    seed: Seed = 0,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Told in one mode, asked in another, all pairs."""
    variants = with_budgets(mode or (), budget or ())  # refused before torch is imported
    from kvchat.bench import turns

    settings = turns.SwitchSettings(variants or standard_variants(turns.STANDARD, budget), cases, tokens, seed, inside)
    run = Run("switches", settings, ModelChoice(model, device, dtype, quantize), out, as_json)
    run.done(turns.switches(settings, run.choice, run.frame))


@app.command("passkey")
def passkey_command(
    mode: Variants = None,
    cases: Cases = 40,
    tokens: Annotated[int, typer.Option(min=64, help="tokens of a conversation, about")] = 3000,
    inside: Annotated[int, typer.Option(min=0, help="tokens of an answer before the question, in the same turn")] = 0,
    seed: Seed = 0,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Recall of a number told in an earlier turn, mode against mode."""
    from kvchat.bench import passkey

    settings = passkey.Settings(tuple(mode or passkey.STANDARD), cases, tokens, inside, seed)
    run = Run("passkey", settings, ModelChoice(model, device, dtype, quantize), out, as_json)
    run.done(passkey.run(settings, run.choice, run.frame))


@app.command("perplexity")
def perplexity_command(
    mode: Variants = None,
    text: Texts = None,
    tokens: Annotated[int, typer.Option(min=16, help="decoded tokens of a passage")] = 1000,
    passages: Annotated[int | None, typer.Option(min=1, help="passages at most (default: all)")] = None,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    host_dtype: HostPages = "model",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Perplexity of book text, tokens read and time, mode against full."""
    from kvchat.bench import perplexity

    settings = perplexity.Settings(tuple(mode or perplexity.STANDARD), tokens, passages, file_names(text))
    run = Run("perplexity", settings, ModelChoice(model, device, dtype, quantize, host_dtype), out, as_json)
    run.done(perplexity.run(settings, run.choice, run.frame))


@app.command("paper")
def paper_command(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="asr-kf-egr, lazy-pruning, synckv or freekv")],
    part: Parts = None,
    set_: StudySizes = None,
    text: Texts = None,
    model: Model = "bundled",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    as_json: Json = False,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """The tables and figures of a mode's paper, published beside measured."""
    from kvchat.bench.paper import studies

    study, settings = studies.chosen(paper, set_ or ())
    study.check(part or (), drawn=plot is not None)
    named = {"settings": settings, "part": part or [], "text": file_names(text)}
    run = Run(f"paper {paper}", named, ModelChoice(model, device, dtype, quantize), out, as_json, plot)
    run.done(study.run(settings, run.choice, run.frame, part or (), file_names(text)))


app.command("decode")(bench_speed.decode_command)
app.command("lengths")(bench_speed.lengths_command)
app.command("prefill")(bench_speed.prefill_command)
app.command("long-run")(bench_speed.long_run_command)
app.command("resume")(bench_speed.resume_command)
app.command("data")(bench_data.data_command)
app.command("report")(bench_report.report_results)
app.command("compare")(bench_report.compare_results)
