"""Decode speed of the modes, with what they hold and move, against transformers' own caches in the same run.

Readings on a shared machine scatter by a quarter, so nothing is compared across runs: in each round every contender
decodes the same tokens after the same context, and ratios and differences are of one round's medians.

A change rate prescribes which share of the retrieved pages is new at each step. Recall is exposed as far as such a step
takes longer than one in which nothing changes, and hidden as far as the link needs more time than that for the bytes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvchat.bench import baselines, model_shapes, roofline
from kvchat.bench.corpus import prose
from kvchat.bench.environment import fingerprint
from kvchat.bench.mode_run import Own
from kvchat.bench.timing import Contender, Timing, current, warm_up
from kvchat.bench.variant import parsed
from kvchat.config.modes import ModeParameters
from kvchat.config.profiles import Measured
from kvchat.engine import calibration
from kvchat.engine.generate.runner import ModelRunner, geometry_of, traits_of
from kvchat.engine.model.load import LoadedModel, load_model
from kvchat.errors import DoesNotFitError, KvchatError, UsageError
from kvchat.kv.modes import build
from kvchat.kv.modes.base import Mode
from kvchat.kv.modes.sync_heads import Calibration

NATURAL = "natural"
Report = Callable[[str], None]
# A contender as it was named, its parameters, and the change rate prescribed.
Wanted = tuple[str, ModeParameters, float | None]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    ``modes`` are ``MODE[:KEY=VALUE,...]``, ``budget`` and ``contexts`` in tokens, ``steps`` those that count per round.
    ``geometry`` names a shape with random weights instead of ``model``; ``prefill`` reads a prompt there instead of
    drawing K/V. ``change_rates`` are "natural" or shares of 1; ``peers`` None is what makes sense on the device.
    """

    model: str = "bundled"
    geometry: str = ""
    device: str = "auto"
    dtype: str = "auto"
    contexts: tuple[int, ...] = (512, 8192)
    modes: tuple[str, ...] = ("full", "streaming", "speculative", "freeze", "sync")
    budget: int = 512
    change_rates: tuple[str, ...] = (NATURAL,)
    steps: int = 64
    rounds: int = 5
    peers: tuple[str, ...] | None = None
    prefill: bool = False


def run(settings: Settings, report: Report = lambda line: None) -> dict[str, Any]:
    """Measure; the result is plain data, ready for JSON. ``report`` is told each row.

    Raises:
        KvchatError: the model, a mode, a rate or a peer is refused. What fails while it runs is a row that says so.
    """
    wanted = [(text, parsed(text, settings.budget), rate) for text in settings.modes for rate in _rates(settings, text)]
    baselines.check(settings.peers or ())
    model = _model(settings, report)
    with current(model.device):
        return _measured(settings, wanted, model, report)


def _measured(settings: Settings, wanted: Sequence[Wanted], model: LoadedModel, report: Report) -> dict[str, Any]:
    chosen = _default_peers(settings, model) if settings.peers is None else settings.peers
    measured = roofline.measure(model.device, model.dtype)
    floor = floor_ms(model, measured)
    report(f"{model.name} on {model.device}" + (f": floor {floor:.3g} ms/token" if floor else ""))
    runner = ModelRunner(model, _smallest(settings, model, 0))
    rows = []
    for context in settings.contexts:
        ids = _store(runner, context, settings)
        heads = _calibration(settings, model, ids)
        own: list[Contender] = [Own(runner, *each, heads) for each in wanted]
        spare = settings.steps + warm_up(model.device) + 1
        others = [baselines.peer(who, model, runner.store, ids, spare) for who in chosen]
        rows += _Run(settings, context, [*others, *own], floor, measured, model).rows(report)
    used = {"model": model.name, "dtype": str(model.dtype).removeprefix("torch."), "peers": chosen}
    return {
        "what": "median ms per decoded token",
        "settings": asdict(settings) | used,
        "environment": fingerprint(model.device),
        "verbs": runner.store.ops.name,
        "fast": model.fused,
        "ceilings": measured.model_dump(),
        "floor_ms": floor,
        "rows": rows,
    }


def floor_ms(model: LoadedModel, measured: Measured) -> float | None:
    """What reading the weights of one token takes at the device's measured rate; None where experts are chosen."""
    config = model.model.config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if measured.read is None or any(getattr(config, name, None) for name in names):
        return None
    table = model.model.get_input_embeddings().weight
    tied = table is model.model.get_output_embeddings().weight
    # Of the embeddings one row is read; tied, they are the head as well.
    size = model.weight_bytes - (0 if tied else table.nbytes)
    return size / measured.read / 1e6


class _Run:
    """All contenders after one context, in turns."""

    def __init__(
        self,
        settings: Settings,
        context: int,
        contenders: Sequence[Contender],
        floor: float | None,
        measured: Measured,
        model: LoadedModel,
    ) -> None:
        self.settings = settings
        self.context = context
        self.contenders = contenders
        self.floor = floor
        self.measured = measured
        self.model = model
        self.times: dict[Contender, list[Timing]] = {contender: [] for contender in contenders}
        self.failed: dict[Contender, str] = {}

    def rows(self, report: Report) -> list[dict[str, Any]]:
        tokens = _tokens(self.settings, self.model, self.context)
        for _ in range(self.settings.rounds):
            for contender in self.contenders:
                if contender not in self.failed:
                    self._measure(contender, tokens)
        rows = [self._row(contender) for contender in self.contenders]
        for contender in self.contenders:
            contender.close()
        self._give_back()
        for row in rows:
            report(line(row))
        return rows

    def _measure(self, contender: Contender, tokens: Sequence[int]) -> None:
        """One that fails is left out from then on: the others' numbers are worth having."""
        try:
            self.times[contender].append(contender.measure(tokens))
        except Exception as error:  # noqa: BLE001  # a compiler, a driver, a cache: anything may fail in its own way
            reason = str(error) if isinstance(error, KvchatError) else f"{type(error).__name__}: {error}"
            self.failed[contender] = reason.strip().splitlines()[0][:300]
        if contender in self.failed:  # not before the error is gone: its frames hold tensors
            contender.close()
            self._give_back()

    def _give_back(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _row(self, contender: Contender) -> dict[str, Any]:
        row: dict[str, Any] = {"context": self.context, "who": contender.who}
        if isinstance(contender, Own):
            row["change_rate"] = NATURAL if contender.change_rate is None else contender.change_rate
        if contender in self.failed:
            return row | {"failed": self.failed[contender]}
        ms = statistics.median(timing.ms for timing in self.times[contender])
        row |= {
            "ms": ms,
            "wall_ms": statistics.median(timing.wall_ms for timing in self.times[contender]),
            "tokens_per_s": 1000 / ms,
            "times_floor": ms / self.floor if self.floor else None,
            "times_as_fast": self._ratios(contender),
        }
        recall = self._recall(contender) if isinstance(contender, Own) else {}
        return row | contender.facts | recall

    def _ratios(self, contender: Contender) -> dict[str, float]:
        """How many times as fast as each peer, the median of the rounds."""
        others = [c for c in self.contenders if not isinstance(c, Own) and c not in self.failed]
        return {
            other.who: statistics.median(
                theirs.ms / ours.ms for theirs, ours in zip(self.times[other], self.times[contender], strict=True)
            )
            for other in others
        }

    def _recall(self, contender: Own) -> dict[str, Any]:
        """Recall time a step in ms: what the link needs, and how much of it shows."""
        link = self.measured.gather
        link_ms = contender.facts["moved_bytes"] / link / 1e6 if link else None
        if contender.change_rate == 0:
            return {"recall_ms": link_ms, "exposed_ms": None, "hidden_ms": None}
        still = next(
            (c for c in self.times if isinstance(c, Own) and c.who == contender.who and c.change_rate == 0), None
        )
        if still is None or still in self.failed or link_ms is None:
            return {"recall_ms": link_ms, "exposed_ms": None, "hidden_ms": None}
        pairs = zip(self.times[contender], self.times[still], strict=True)
        exposed = statistics.median(moving.ms - resting.ms for moving, resting in pairs)
        return {"recall_ms": link_ms, "exposed_ms": exposed, "hidden_ms": max(0.0, link_ms - max(0.0, exposed))}


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    who = named(row)
    if "failed" in row:
        return f"{row['context']:>7} {who:<32} {row['failed']}"
    ratios = "".join(f"  {ratio:5.2f} x {peer}" for peer, ratio in row["times_as_fast"].items() if peer != row["who"])
    moved = f"  moves {row['moved_bytes'] / 1e6:.2f} MB" if row.get("moved_bytes") else ""
    shown = (
        f", exposed {row['exposed_ms']:.2f} of {row['recall_ms']:.2f} ms" if row.get("exposed_ms") is not None else ""
    )
    return f"{row['context']:>7} {who:<32} {row['ms']:8.2f} ms {row['tokens_per_s']:7.1f} tok/s{ratios}{moved}{shown}"


def named(row: Mapping[str, Any]) -> str:
    """The contender with its change rate."""
    rate = row.get("change_rate", NATURAL)
    return row["who"] if rate == NATURAL else f"{row['who']}, {100 * rate:g} % new"


# ---- settings --------------------------------------------------------------------------------------


def _rates(settings: Settings, mode: str) -> list[float | None]:
    """The change rates a mode is measured at; with one prescribed, 0 too, to compare with."""
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
        raise UsageError(f'The change rate "{text}" is refused.', "It is natural or a share between 0 and 1.")
    return rate


def _default_peers(settings: Settings, model: LoadedModel) -> tuple[str, ...]:
    return baselines.default_peers(model.device, random_weights=bool(settings.geometry))


def _smallest(settings: Settings, model: LoadedModel, context: int) -> Mode:
    """The mode asked for that holds least on the device: in it the context is stored.

    Raises:
        KvchatError: the model can run in none of them.
    """
    geometry, modes, refused = geometry_of(model), [], None
    for text in settings.modes:
        try:
            modes.append(build(parsed(text, settings.budget), geometry, traits_of(model)))
        except KvchatError as error:
            refused = error
    if refused is not None and not modes:
        raise refused
    return min(modes, key=lambda mode: mode.nbytes(geometry.grown(context)))


# ---- the model and what it reads -------------------------------------------------------------------


def _model(settings: Settings, report: Report) -> LoadedModel:
    if settings.geometry and settings.model != Settings.model:
        raise UsageError("Either a model or a geometry is measured, not both.")
    if settings.geometry:
        return model_shapes.build(settings.geometry, settings.device, settings.dtype)
    model = load_model(settings.model, settings.device, settings.dtype, report)
    needed = max(settings.contexts) + settings.steps + warm_up(model.device)
    if needed > model.context:
        raise DoesNotFitError(
            "The contexts do not fit the model.", f"{needed:,} tokens are needed, it was made for {model.context:,}."
        )
    return model


def _store(runner: ModelRunner, context: int, settings: Settings) -> list[int]:
    """Store ``context`` tokens and nothing else; their ids."""
    ids = _tokens(settings, runner.model, 0, context)
    with torch.inference_mode():
        runner.store.truncate(0)
        runner.store.switch(_smallest(settings, runner.model, context))
    if settings.geometry and not settings.prefill:
        model_shapes.fill(runner.store, context)
    else:
        for _ in runner.prefill(ids):
            pass
    return ids


def _tokens(settings: Settings, model: LoadedModel, start: int, n: int | None = None) -> list[int]:
    """``n`` tokens from ``start`` on (those of one round, where not given): prose, or drawn for random weights."""
    end = start + (settings.steps + warm_up(model.device) if n is None else n)
    if settings.geometry:
        draw = random.Random(0)
        return [draw.randrange(model.vocab) for _ in range(end)][start:]
    return prose(model.tokenizer, end)[start:]


def _calibration(settings: Settings, model: LoadedModel, ids: Sequence[int]) -> Calibration | None:
    """What sync mode has to know of the heads; None where it is not in question or cannot be had."""
    if not any(text.partition(":")[0] == "sync" for text in settings.modes):
        return None
    if settings.geometry:
        return model_shapes.calibration(model)
    return calibration.find(model.revision) or calibration.on_prompt(model, list(ids))
