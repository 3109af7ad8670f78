"""``kvchat bench WHAT``: measurements. Progress goes to stderr, results to stdout.

Imports no torch: every command imports what it runs.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvchat.bench import plots
from kvchat.bench import report as reports
from kvchat.bench.frame import Frame, ModelChoice, Result, with_budgets
from kvchat.bench.report import tables
from kvchat.bench.texts import check
from kvchat.cli.options import NamedDevice, complete_model, setting
from kvchat.cli.output import echo, report
from kvchat.config.schema import KvSection, ModelSettings
from kvchat.errors import UsageError
from kvchat.protocol.messages import HostDtype

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure speed, memory and quality of the modes.")
BUDGET = 512  # of modes where neither they nor it are named
Model = Annotated[str, setting(ModelSettings, "name", "-m", "--model", complete=complete_model)]
Device = NamedDevice
Dtype = Annotated[str, setting(ModelSettings, "dtype")]
HostPages = Annotated[HostDtype, setting(KvSection, "host_dtype")]
Quantize = Annotated[str, setting(ModelSettings, "quantize")]
Shape = Annotated[
    str, typer.Option(help="random weights in the shape of llama-3.1-8b, qwen2.5-7b, ... instead of a model")
]
Variants = Annotated[list[str] | None, typer.Option(metavar="MODE[:KEY=VALUE,...]", help="a variant; repeatable")]
Mode = Annotated[str, typer.Option(metavar="MODE[:KEY=VALUE,...]", help="the KV mode")]
Budget = Annotated[int, typer.Option(help="tokens per KV head")]
Budgets = Annotated[
    list[int] | None, typer.Option(help="tokens per KV head, for modes that name no budget; repeatable")
]
Texts = Annotated[list[Path] | None, typer.Option(exists=True, dir_okay=False, help="a text file, UTF-8; repeatable")]
Seed = Annotated[int, typer.Option(help="the same seed gives the same cases")]
Cases = Annotated[int, typer.Option(min=1, help="conversations")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="draw it to .svg or .png (needs matplotlib)")]
Out = Annotated[
    Path | None, typer.Option(help="keep the rows in this file as they come, as JSON; one that is there is replaced")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object, with what was run on")]
# Of bench paper alone.
Parts = Annotated[list[str] | None, typer.Option(help="only this table or figure, as table-1; repeatable")]
StudySizes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="one of the study's sizes; repeatable")
]
# Of bench decode alone.
Contexts = Annotated[list[int] | None, typer.Option(min=1, help="tokens before the measured ones; repeatable")]
ChangeRates = Annotated[
    list[str] | None,
    typer.Option(help="share of speculative's pages that is new at each step, or natural; repeatable"),
]
Corrections = Annotated[
    list[float] | None,
    typer.Option(
        min=0, max=1, help="share of heads that speculative corrects at each step, as one row more; repeatable"
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="tokens of a round that count")]
Rounds = Annotated[int, typer.Option(min=1, help="rounds in which every variant has its turn")]
Baselines = Annotated[
    str | None, typer.Option(help="dynamic, static, compile, offloaded, generate, llama.cpp; by commas, or none")
]
ReadsPrompt = Annotated[bool, typer.Option("--prefill", help="read a prompt with random weights too")]
OtherLoad = Annotated[int, typer.Option(min=0, help="busy processes beside which all is measured once more")]
SaveProfile = Annotated[
    bool, typer.Option("--save-profile", help="keep the device's measured roofline as your GPU profile")
]


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
    run = Run(ModelChoice(model, device, dtype, quantize, host_dtype), out, as_json, plot)
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
    run = Run(ModelChoice(model, device, dtype, quantize), out, as_json)
    run.done(coverage.run(settings, run.choice, run.frame))


@app.command("recall")
def recall_command(
    mode: Variants = None,
    budget: Budgets = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="passkey keys values all chain fact name rule system told pinned turns switches; repeatable"),
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=16, help="tokens of a text, about; repeatable")] = None,
    depth: Annotated[list[float] | None, typer.Option(help="where the fact stands, 0 to 1; repeatable")] = None,
    cases: Annotated[int, typer.Option(min=1, help="conversations of each length and depth")] = 4,
    keys: Annotated[int, typer.Option(help="facts told where several are")] = 4,
    inside: Annotated[int, typer.Option(min=0, help="tokens of an answer before the question, in the same turn")] = 0,
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
        inside,
        seed,
    )
    run = Run(ModelChoice(model, device, dtype, quantize), out, as_json, plot)
    run.done(recall.run(settings, run.choice, run.frame))


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
    run = Run(ModelChoice(model, device, dtype, quantize), out, as_json, plot)
    run.done(study.run(settings, run.choice, run.frame, part or (), file_names(text)))


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
    run = Run(ModelChoice(model, device, dtype, quantize), out, as_json, plot)
    result = run.done(decode.run(settings, run.choice, run.frame))
    if save_profile:
        report(f"profile {profiles.save(profiles.Measured(**result['roofline']), device)}")


class Run:
    """One measurement of the command line: what is wrong with its files is said before it begins.

    Raises:
        UsageError: on making, the folder of ``out`` or the plot's file is wrong.
    """

    def __init__(
        self,
        choice: ModelChoice,
        out: Path | None = None,
        as_json: bool = False,
        plot: Path | None = None,
    ) -> None:
        if out and not out.absolute().parent.is_dir():
            raise UsageError(f"There is no folder {out.absolute().parent}.", hint="Make it first.")
        if out and out.is_dir():
            raise UsageError(f"{out} is a folder.", "", "Give --out the name of a file.")
        if plot:
            plots.check(plot)
        self.choice = choice
        self.frame = Frame(out, report, command=_command(sys.argv[1:]), drawn=plot is not None)
        self._out, self._as_json, self._plot = out, as_json, plot

    def done(self, result: Result) -> Result:
        """Print the complete result, and draw it where that was asked for."""
        if self._as_json:
            echo(json.dumps(result, indent=2))
        else:
            echo("\n\n".join(table.markdown() for table in tables(result)))
        if self._plot:
            plots.draw(result, self._plot)
            report(str(self._plot))
        if self._out:
            report(str(self._out))
        return result


def _command(arguments: Sequence[str]) -> str:
    """The command line without what says where results go."""
    words, ignored = ["kvchat"], False
    for word in arguments:
        if not ignored and word.partition("=")[0] not in ("--out", "--plot", "--json"):
            words.append(word)
        ignored = word in ("--out", "--plot")
    return shlex.join(words)


def baseline_names(baselines: str | None) -> tuple[str, ...] | None:
    """The baselines named, by commas; None where nothing was said."""
    return None if baselines is None else tuple(name for name in baselines.split(",") if name not in ("", "none"))


app.command("decode")(decode_command)


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
    run = Run(ModelChoice(model, device, dtype, quantize), out, as_json)
    run.done(prefill.run(settings, run.choice, run.frame))


app.command("prefill")(prefill_command)


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
    """Scores of a published data set, or agreement on its texts, mode against full."""
    from kvchat.bench import data_sets, recall

    modes = tuple(mode or ()) or standard_variants(recall.STANDARD, budget)
    choice = ModelChoice(model, device, dtype, quantize)
    settings = data_sets.Settings(name, str(folder), modes, rows, samples, tokens, seed)
    run = Run(choice, out, as_json)
    run.done(data_sets.run(settings, run.choice, run.frame))


def standard_variants(modes: Sequence[str], budgets: list[int] | None) -> tuple[str, ...]:
    """The modes that are measured where none is named."""
    return with_budgets(modes, budgets or (BUDGET,))


app.command("data")(data_command)


def report_results(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="files that --out wrote")],
    latex: Annotated[bool, typer.Option("--latex", help="LaTeX instead of Markdown")] = False,
    plot: Plot = None,
) -> None:
    """The tables of results, and with --plot their pictures; refuses to mix environments or models."""
    if plot:
        plots.check(plot)
    read = reports.read(results)
    echo(reports.rendered(read, latex))
    if plot:
        for result, file in zip(read, _numbered(plot, len(read)), strict=True):
            plots.draw(result, file)
            report(str(file))


def _numbered(file: Path, count: int) -> list[Path]:
    """One file for each of several pictures: ``a.png``, ``a-2.png``."""
    return [file, *(file.with_stem(f"{file.stem}-{number}") for number in range(2, count + 1))]


app.command("report")(report_results)


def compare_results(
    before: Annotated[Path, typer.Argument(metavar="A.json")],
    after: Annotated[Path, typer.Argument(metavar="B.json")],
) -> None:
    """Print the changes from one result to another of the same experiment, and possible reasons for them."""
    echo(reports.compared(before, after).markdown())


app.command("compare")(compare_results)


def file_names(texts: list[Path] | None) -> tuple[str, ...]:
    """Files as a result names them.

    Raises:
        UsageError: one cannot be read, or is empty.
    """
    names = tuple(str(path) for path in texts or ())
    check(names)
    return names
