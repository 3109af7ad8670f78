"""``kvchat compare``: one question answered in several modes from the same K/V, as ``/compare`` does in the chat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvchat.cli import options
from kvchat.cli.ask import INTERRUPTED, interrupt_cancels, opened
from kvchat.cli.chat import load_of, turns
from kvchat.cli.options import LOAD, SAMPLING, SYSTEM, Files, taking
from kvchat.cli.output import echo, note, progress, write
from kvchat.cli.profile import load_settings
from kvchat.conversations import comparison
from kvchat.conversations.comparison import Comparison
from kvchat.errors import DoesNotFitError, EngineError
from kvchat.protocol.messages import Compared, Comparing, Load, Prefilled, Sampling, Turn, Variant


@taking(LOAD, SYSTEM, SAMPLING)
def compare_command(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="what to ask; - reads it from stdin")],
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODE [KEY=VALUE]... MODE...", help="what to compare; default: full and the mode of your settings"
        ),
    ] = None,
    file: Files = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="also write it to a new .md or .json")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of lines")] = False,
) -> None:
    """Answer one prompt in several modes or budgets, and compare. Shows where answers differ, and what each costs."""
    from kvchat.tui.comparisons import completed, parse_variants

    chosen = load_settings(options.flags(ctx.params)).settings
    named = completed(parse_variants(variants or ()), chosen.kv.mode)
    if out is not None:
        comparison.check(out)
    question = turns(None if prompt == "-" else prompt, file or (), chosen.model.system)
    found, is_interrupted = compare(load_of(chosen), question, named, chosen.sampling.sampling().seeded())
    if as_json:
        write(comparison.to_json(found))
    else:
        echo(comparison.to_text(found))
    if out is not None:
        comparison.write(found, out)
        note(f"written to {out.absolute()}.")
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(DoesNotFitError.exit_code if any(run.refusal for run in found.runs) else 0)


def compare(
    load: Load, turns: tuple[Turn, ...], variants: tuple[Variant, ...], sampling: Sampling
) -> tuple[Comparison, bool]:
    """Load the model and compare; return the answers, and whether Ctrl+C stopped the comparison.

    Raises:
        KvchatError: the model cannot be loaded, the question is refused, or nothing was answered before it was stopped.
    """
    from kvchat.tui.state import RunningComparison

    session = opened(load)
    for text in session.info.notes:
        note(text)
    from kvchat.models import compile_ahead  # imports torch, which the session has imported already

    compile_ahead.finish(progress)  # compiling in the background would slow down the modes that answer first
    progress("")
    running = RunningComparison(turns[-1].content, session.info.model, variants, sampling)
    with interrupt_cancels(session) as interrupted:
        events = session.compare(turns, variants, sampling)
        if interrupted:
            session.cancel()  # Ctrl+C came before the comparison began
        try:
            for event in events:
                match event:
                    case Prefilled(done, total):
                        running.read(done, total)
                    case Comparing():
                        running.note(event)
                    case Compared():
                        running.finish(event)
                progress(running.stage)
        finally:
            progress("")
    session.close()
    if running.result is None or not running.result.runs:
        raise EngineError("Stopped before any mode answered.", hint="Run it again and let one mode finish.")
    return running.result, bool(interrupted)
