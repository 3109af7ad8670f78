"""``kvchat compare``: one question answered in several modes from the same K/V, as ``/compare`` does in the chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvchat.cli import options
from kvchat.cli.ask import INTERRUPTED, interrupt_cancels, opened
from kvchat.cli.chat import load_of, turns
from kvchat.cli.options import LOAD, SAMPLING, SYSTEM, Files, taking
from kvchat.cli.output import echo, note, progress, write
from kvchat.cli.profile import load_settings
from kvchat.conversations import comparison
from kvchat.errors import DoesNotFitError, EngineError
from kvchat.protocol.messages import Compared, Comparing, Load, Prefilled, Sampling, Turn, Variant

if TYPE_CHECKING:
    from kvchat import Session
    from kvchat.tui.state import RunningComparison


@dataclass(frozen=True)
class Asked:
    """The variants to compare, the model and where to write the result; ``out`` is a new file, None for none."""

    load: Load
    turns: tuple[Turn, ...]
    variants: tuple[Variant, ...]
    sampling: Sampling
    as_json: bool = False
    out: Path | None = None


@taking(LOAD, SYSTEM, SAMPLING)
def compare_command(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="what to ask; - reads it from stdin")],
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODE [KEY=VALUE]... MODE...", help="what to compare; the mode of the settings and full"
        ),
    ] = None,
    file: Files = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write it to a new .md or .json as well")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of lines")] = False,
) -> None:
    """Answer one prompt in several modes or budgets, with the same seed: where they part, and at what cost."""
    from kvchat.tui.comparisons import completed, parse_variants, seeded

    chosen = load_settings(options.flags(ctx.params)).settings
    named = completed(parse_variants(variants or ()), chosen.kv.mode)
    if out is not None:
        comparison.check(out)
    question = turns(None if prompt == "-" else prompt, file or (), chosen.model.system)
    asked = Asked(load_of(chosen), question, named, seeded(chosen.sampling.sampling()), as_json, out)
    raise typer.Exit(compare(asked))


def compare(asked: Asked) -> int:
    """Load, compare, print; the exit code is 3 where a mode cannot be entered.

    Raises:
        KvchatError: the model cannot be loaded, the question is refused, or nothing was answered before it was stopped.
    """
    session = opened(asked.load)
    for text in session.info.notes:
        note(text)
    from kvchat.models import compile_ahead  # imports torch, as the session has

    compile_ahead.finish(progress)  # or the modes that answer first would be the slower ones
    progress("")
    with interrupt_cancels(session) as interrupted:
        running = _run(session, asked, bool(interrupted))
    session.close()
    if running.result is None or not running.result.runs:
        raise EngineError("Stopped before a mode has answered.", hint="Run it again and let a mode end.")
    if asked.as_json:
        write(comparison.to_json(running.result))
    else:
        echo(comparison.to_text(running.result))
    if asked.out is not None:
        comparison.write(running.result, asked.out)
        note(f"written to {asked.out.absolute()}.")
    if interrupted:
        return INTERRUPTED
    return DoesNotFitError.exit_code if any(run.refusal for run in running.result.runs) else 0


def _run(session: Session, asked: Asked, is_stopped: bool) -> RunningComparison:
    """Note what comes until the result; how far it is stands on stderr."""
    from kvchat.tui.state import RunningComparison

    running = RunningComparison(asked.turns[-1].content, session.info.model, asked.variants, asked.sampling)
    events = session.compare(asked.turns, asked.variants, asked.sampling)
    if is_stopped:
        session.cancel()  # it came while nothing was asked yet
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
    return running
