"""Decode speed, memory and traffic of the modes against transformers' own caches in the same run.

Readings on a shared machine scatter by a quarter, so nothing is compared across runs: in each round every variant
decodes the same tokens after the same context, and ratios and differences are of one round's medians.

A fixed change rate is the share of the selected pages that is new at each step. Exposed recall is the time by which
such a step exceeds a step at rate 0; hidden recall is the rest of the time that the link needs for the bytes.

Full mode with ``resident`` reads the rest over the link: its row has the time of one large copy of those bytes, which
bounds it. Where memory is unified it reads the host pool itself, like full without it, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from kvchat.bench import baselines, other_load, roofline
from kvchat.bench.decoding import Decoding
from kvchat.bench.environment import fingerprint
from kvchat.bench.frame import Cell, Frame, Report, Row
from kvchat.bench.identity import Experiment, Result, methods, model_identity
from kvchat.bench.mode_run import ModeRun, spills
from kvchat.bench.model_choice import ModelChoice
from kvchat.bench.rounds import Rounds
from kvchat.bench.rows import NATURAL, line
from kvchat.bench.timing import Variant, current, warm_up
from kvchat.bench.variant import parsed
from kvchat.config.modes import ModeParameters, SpeculativeParameters
from kvchat.config.profiles import Measured
from kvchat.engine.runner import ModelRunner, geometry_of
from kvchat.errors import UsageError
from kvchat.models.load import LoadedModel
from kvchat.models.quantize.weight_sizes import read_bytes

# A variant's notation, its parameters and its fixed change rate, or None.
Wanted = tuple[str, ModeParameters, float | None]


@dataclass(frozen=True)
class Settings(Decoding):
    """The measurement.

    ``change_rates`` are "natural" or shares of 1. For each of ``corrections``, shares of 1, every speculative mode is
    measured once more, with that share of heads corrected. ``baselines`` None takes those that suit the device.
    ``load`` is the number of busy processes beside which everything is measured a second time.
    """

    modes: tuple[str, ...] = ("full", "full:resident=512", "streaming", "speculative", "freeze", "sync")
    change_rates: tuple[str, ...] = (NATURAL,)
    corrections: tuple[float, ...] = ()
    baselines: tuple[str, ...] | None = None
    load: int = 0


def run(settings: Settings, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each context and variant.

    Raises:
        KvchatError: the model, a mode, a rate or a baseline is refused. A later failure becomes a row.
    """
    _wanted(settings)  # refuses before the model is loaded
    _check_corrections(settings)
    baselines.check(settings.baselines or ())
    frame = frame or Frame()
    model = settings.open(choice, frame.report)
    settings = _without_spilled(settings, model, frame.report)
    with current(model.device):
        return _measured(settings, _wanted(settings), model, frame)


def _measured(settings: Settings, wanted: Sequence[Wanted], model: LoadedModel, frame: Frame) -> Result:
    chosen = _default_baselines(settings, model) if settings.baselines is None else settings.baselines
    measured = roofline.measure(model.device, model.dtype)
    floor = floor_ms(model, measured)
    frame.report(f"{model.name} on {model.device}" + (f": floor {floor:.3g} ms/token" if floor else ""))
    runner = ModelRunner(model, settings.smallest(model, 0))
    plain = baselines.in_ordinary_memory(model) if chosen else model

    def rows(cell: Cell) -> list[Row]:
        context = cell["context"]
        ids = settings.store(runner, context)
        heads = settings.calibration(model, ids)
        mode_runs: list[Variant] = [ModeRun(runner, *each, heads) for each in wanted]
        mode_runs += [ModeRun(runner, text, chosen, None, heads, share) for text, chosen, share in _corrected(settings)]
        spare = settings.steps + warm_up(model.device) + 1
        others = [baselines.build(name, plain, runner.kv.state, ids, spare) for name in chosen]
        rounds = Rounds([*others, *mode_runs], settings.rounds, settings.load, floor, measured, model.device)
        return rounds.rows(settings.decoded(model, context))

    experiment = Experiment(
        "decode",
        "median ms per decoded token",
        asdict(settings) | {"baselines": chosen},
        methods(settings.modes, settings.budget),
        model_identity(model),
        fingerprint(model.device),
        {
            "ops": runner.kv.state.ops.name,
            "fast": model.fused,
            "roofline": measured.model_dump(),
            "floor_ms": floor,
            "fair_share": other_load.fair_share(torch.get_num_threads(), settings.load) if settings.load else None,
        },
    )
    result = frame.measure(experiment, [{"context": context} for context in settings.contexts], rows, line)
    return frame.finish(result, result["rows"])


def floor_ms(model: LoadedModel, measured: Measured) -> float | None:
    """Milliseconds to read the weights of one token at the measured rate; None for mixtures of experts."""
    size = read_bytes(model.model, model.weight_bytes)
    return None if size is None or measured.read is None else size / measured.read / 1e6


# ---- settings --------------------------------------------------------------------------------------


def _wanted(settings: Settings) -> list[Wanted]:
    return [(text, parsed(text, settings.budget), rate) for text in settings.modes for rate in _rates(settings, text)]


def _without_spilled(settings: Settings, model: LoadedModel, report: Report) -> Settings:
    """Leave out what is to be read over the link where there is none.

    Raises:
        UsageError: nothing else is wanted.
    """
    spilled = [text for text in settings.modes if spills(parsed(text, settings.budget))]
    if not (spilled and geometry_of(model).unified):
        return settings
    reason = f"On {model.device} full mode reads the host pool itself: nothing is read over a link."
    rest = tuple(text for text in settings.modes if text not in spilled)
    if not rest:
        raise UsageError(f"{', '.join(spilled)} cannot be measured here.", reason, "Take full.")
    report(f"{', '.join(spilled)} left out. {reason}")
    return replace(settings, modes=rest)


def _rates(settings: Settings, mode: str) -> list[float | None]:
    """Return the change rates of a mode; a fixed rate adds rate 0, which it is compared with."""
    rates = [_rate(text) for text in settings.change_rates]
    if mode.partition(":")[0] != "speculative" or rates == [None]:
        return [None]
    return [*([None] if None in rates else []), *sorted({0.0, *(rate for rate in rates if rate is not None)})]


def _rate(text: str) -> float | None:
    if text == NATURAL:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise UsageError(f'The change rate "{text}" is refused.', hint="It must be natural or a share between 0 and 1.")
    return rate


def _corrected(settings: Settings) -> list[tuple[str, ModeParameters, float]]:
    """Each speculative variant with each share of corrections."""
    parameters = [(text, parsed(text, settings.budget)) for text in settings.modes]
    return [
        (text, chosen, share)
        for text, chosen in parameters
        for share in settings.corrections
        if isinstance(chosen, SpeculativeParameters)
    ]


def _check_corrections(settings: Settings) -> None:
    """Refuse shares that are none, and those of no speculative mode.

    Raises:
        UsageError
    """
    for share in settings.corrections:
        if not 0 <= share <= 1:
            raise UsageError(f"A share of corrections of {share:g} is refused.", hint="Give a number between 0 and 1.")
    if settings.corrections and not _corrected(settings):
        raise UsageError("Only speculative mode corrects.", hint="Take --mode speculative, or no --corrections.")


def _default_baselines(settings: Settings, model: LoadedModel) -> tuple[str, ...]:
    return baselines.default_baselines(model.device, random_weights=bool(settings.shape))
