"""Decode speed, memory and traffic of the modes, compared with transformers' own caches in the same run.

In each round every variant decodes the same tokens after one context, and with a load does so again while other
processes are busy. The result includes the device's roofline: the bandwidth of its memory, of PCIe, and of scattered
pages of the host pool, each the best of several runs after a warm-up, over data larger than any cache. If another
process uses the device, the rates are too low, and a step can seem faster than its floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

import kvchat
from kvchat.bench import decoding, timing
from kvchat.bench.decoding import ModeRun, spills
from kvchat.bench.external import baselines
from kvchat.bench.frame import Cell, Frame, ModelChoice, Report, Result, Row, experiment, methods, parsed
from kvchat.bench.report import line
from kvchat.bench.settings import NATURAL, Decode
from kvchat.bench.timing import Timing, Variant, warm_up
from kvchat.config.modes import ModeParameters
from kvchat.config.profiles import Measured
from kvchat.engine.runner import ModelRunner, geometry_of
from kvchat.errors import KvchatError, UsageError, check_known
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import rates
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.choose import triton_refusal
from kvchat.models.load import LoadedModel
from kvchat.models.probe import has_experts
from kvchat.models.quantize.rows import SAMPLE_S, is_tied
from kvchat.models.reading import current

# A variant's notation, its parameters and its fixed change rate, or None.
Wanted = tuple[str, ModeParameters, float | None]
SETTLED_S = 5 * SAMPLE_S
Times = dict[Variant, list[Timing]]
DEFAULTS = {"cpu": ("generate",), "cuda": ("dynamic", "static", "offloaded")}
READ_BYTES = {"cuda": 2**30, "cpu": 2**27}
GATHER_TOKENS = {"cuda": 2**18, "cpu": 2**16}
# Elements per token that make a block of 32 tokens 16 KiB, the size of usual models' (page, head) pairs.
GATHER_ROW = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}


def run(settings: Decode, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each context and variant.

    Raises:
        KvchatError: the model, a mode, a rate or a baseline is refused. A later failure becomes a row.
    """
    _wanted(settings)  # raises for wrong settings before the model is loaded
    for name in settings.baselines or ():
        check_known(name, baselines.BASELINES, "baseline")
    frame = frame or Frame()
    model = decoding.open_model(settings, choice, frame.progress)
    settings = _without_spilled(settings, model, frame.report)
    with current(model.device):
        return _measured(settings, _wanted(settings), model, frame)


def _measured(settings: Decode, wanted: Sequence[Wanted], model: LoadedModel, frame: Frame) -> Result:
    chosen = settings.baselines
    if chosen is None:
        # ``generate`` would process a prompt of random tokens in every round.
        chosen = ("dynamic",) if model.device.type == "cpu" and settings.shape else DEFAULTS[model.device.type]
    measured = measure(model.device, model.dtype)
    floor = floor_ms(model, measured)
    frame.report(f"{model.name} on {model.device}" + (f": floor {floor:.3g} ms/token" if floor else ""))
    runner = ModelRunner(model, decoding.smallest(settings, model, 0))
    plain = baselines.in_ordinary_memory(model) if chosen else model

    def rows(cell: Cell) -> list[Row]:
        context = cell["context"]
        ids = decoding.store(settings, runner, context)
        heads = decoding.calibrated(settings, model, ids)
        mode_runs: list[Variant] = [ModeRun(runner, *each, heads) for each in wanted]
        spare = settings.steps + warm_up(model.device) + 1
        others = [baselines.BASELINES[name](plain, runner.kv.state, ids, spare) for name in chosen]
        measure = settings.rounds, settings.load, floor, measured, model.device, frame.report
        rounds = Rounds([*others, *mode_runs], *measure)
        return rounds.rows(decoding.decoded(settings, model, context))

    head = experiment(
        "decode",
        "median ms per decoded token",
        asdict(settings) | {"baselines": chosen},
        methods(settings.modes, settings.budget),
        model,
        ops=runner.kv.state.ops.name,
        fast=model.fused,
        roofline=measured.model_dump(),
        floor_ms=floor,
        fair_share=timing.fair_share(torch.get_num_threads(), settings.load) if settings.load else None,
    )
    return frame.measure(head, [{"context": context} for context in settings.contexts], rows, line)


def floor_ms(model: LoadedModel, measured: Measured) -> float | None:
    """Return the milliseconds to read one token's weights at the measured rate; None for mixtures of experts."""
    if has_experts(model.model) or measured.read is None:
        return None
    table = 0 if is_tied(model.model) else model.model.get_input_embeddings().weight.nbytes  # a token reads one row
    return (model.weight_bytes - table) / measured.read / 1e6


def _wanted(settings: Decode) -> list[Wanted]:
    return [(text, parsed(text, settings.budget), rate) for text in settings.modes for rate in _rates(settings, text)]


def _without_spilled(settings: Decode, model: LoadedModel, report: Report) -> Decode:
    """Leave out variants that stream from RAM if the device has no need for that."""
    spilled = [text for text in settings.modes if spills(parsed(text, settings.budget))]
    if not (spilled and geometry_of(model).unified):
        return settings
    reason = f"On {model.device} full mode reads the host pool in place: nothing is streamed."
    rest = tuple(text for text in settings.modes if text not in spilled)
    if not rest:
        raise UsageError(f"{', '.join(spilled)} cannot be measured here.", reason, "Use full.")
    report(f"{', '.join(spilled)} left out. {reason}")
    return replace(settings, modes=rest)


def _rates(settings: Decode, mode: str) -> list[float | None]:
    """Return the change rates of a mode; a fixed rate adds rate 0 for comparison."""
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
        raise UsageError(
            f'The change rate "{text}" is not valid.', hint="It must be natural or a share between 0 and 1."
        )
    return rate


@dataclass(eq=False)
class Rounds:
    """Measures ``variants`` in turn; a ratio compares medians of the same round.

    With ``load`` each variant has a second turn per round, while that many other processes are busy. Rows compare times
    with the ``floor`` in ms and with the device's ``measured`` rates.
    """

    variants: Sequence[Variant]
    rounds: int
    load: int
    floor: float | None
    measured: Measured
    device: torch.device
    report: Report = lambda line: None

    def __post_init__(self) -> None:
        self.times: Times = {variant: [] for variant in self.variants}
        self.loaded_times: Times = {variant: [] for variant in self.variants}
        self.others: dict[Variant, list[float]] = {variant: [] for variant in self.variants}
        self.failed: dict[Variant, str] = {}

    def rows(self, tokens: Sequence[int]) -> list[Row]:
        """Measure all rounds; return a row for each variant."""
        for number in range(self.rounds):
            if self.load and number:
                self._settle(tokens)
            for variant in self.variants:
                before = timing.sample_processors()
                self._measure(variant, tokens, self.times)
                result = self.failed.get(variant) or _timing_line(self.times[variant][-1])
                rate = getattr(variant, "change_rate", None)
                self.report(f"{variant.name}{'' if rate is None else f', {100 * rate:g} % new'}: {result}")
                self.others[variant] += timing.share_of_others(before, timing.sample_processors())
            if self.load:
                with timing.keep_busy(self.load):
                    self._settle(tokens)
                    for variant in self.variants:
                        self._measure(variant, tokens, self.loaded_times)
        rows = [self._row(variant) for variant in self.variants]
        for variant in self.variants:
            variant.close()
        self._release()
        return rows

    def _measure(self, variant: Variant, tokens: Sequence[int], times: Times) -> None:
        """Measure a turn; a variant that failed has no more turns."""
        if variant in self.failed:
            return
        try:
            times[variant].append(variant.measure(tokens))
        except Exception as error:  # noqa: BLE001  # compilers, drivers and caches raise anything
            reason = str(error) if isinstance(error, KvchatError) else f"{type(error).__name__}: {error}"
            self.failed[variant] = reason.strip().splitlines()[0][:300]
        if variant in self.failed:  # outside the handler, because the error's frames keep tensors alive
            variant.close()
            self._release()

    def _settle(self, tokens: Sequence[int]) -> None:
        """Decode for ``SETTLED_S`` while the runner adapts its thread count to the cores left free."""
        shared = next((each for each in self.variants if isinstance(each, ModeRun) and each not in self.failed), None)
        until = time.monotonic() + SETTLED_S
        while shared is not None and shared not in self.failed and time.monotonic() < until:
            self._measure(shared, tokens, {shared: []})

    def _release(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _row(self, variant: Variant) -> Row:
        row: Row = {"variant": variant.name}
        if isinstance(variant, ModeRun):
            row["change_rate"] = NATURAL if variant.change_rate is None else variant.change_rate
        if variant in self.failed:
            return row | {"failed": self.failed[variant]}
        ms = statistics.median(timing.ms for timing in self.times[variant])
        spent = [timing.processor_ms for timing in self.times[variant] if timing.processor_ms is not None]
        chat = [timing.chat_ms for timing in self.times[variant] if timing.chat_ms is not None]
        row |= {
            "ms": ms,
            "wall_ms": statistics.median(timing.wall_ms for timing in self.times[variant]),
            "processor_ms": statistics.median(spent) if spent else None,
            "chat_ms": statistics.median(chat) if chat else None,
            "ms_spread": [pick(timing.ms for timing in self.times[variant]) for pick in (min, max)],
            "tokens_per_s": 1000 / ms,
            "times_floor": ms / self.floor if self.floor else None,
            "times_as_fast": self._ratios(variant),
            "others": statistics.median(self.others[variant]) if self.others[variant] else None,
        }
        recall = self._recall(variant) if isinstance(variant, ModeRun) else {}
        return row | self._kept(variant) | variant.figures | recall

    def _ratios(self, variant: Variant) -> dict[str, float]:
        """Return the speed relative to each baseline, as the median over rounds."""
        others = [c for c in self.variants if not isinstance(c, ModeRun) and c not in self.failed]
        return {
            other.name: statistics.median(
                theirs.ms / ours.ms for theirs, ours in zip(self.times[other], self.times[variant], strict=True)
            )
            for other in others
        }

    def _kept(self, variant: Variant) -> Row:
        """Return the share of speed kept under load, by mean steps, because a median step may never be interrupted."""
        if not self.load:
            return {}
        pairs = list(zip(self.times[variant], self.loaded_times[variant], strict=True))
        return {
            "wall_ms_beside": statistics.median(loaded.wall_ms for _, loaded in pairs),
            "kept": statistics.median(quiet.wall_ms / loaded.wall_ms for quiet, loaded in pairs),
        }

    def _recall(self, variant: ModeRun) -> Row:
        """Return recall per step in ms: the time that the transfer needs, and its exposed and hidden parts.

        For what full mode streams, return ``link_ms``: the time of one large copy, a lower bound for a step.
        """
        if spills(variant.chosen):
            rate = self.measured.to_device
            return {"link_ms": variant.figures["moved_bytes"] / rate / 1e6 if rate else None}
        link = self.measured.gather
        link_ms = variant.figures["moved_bytes"] / link / 1e6 if link else None
        still = next(
            (c for c in self.times if isinstance(c, ModeRun) and c.name == variant.name and c.change_rate == 0), None
        )
        if variant.change_rate == 0 or still is None or still in self.failed or link_ms is None:
            return {"recall_ms": link_ms, "exposed_ms": None, "hidden_ms": None}
        pairs = zip(self.times[variant], self.times[still], strict=True)
        exposed = statistics.median(moving.ms - resting.ms for moving, resting in pairs)
        return {"recall_ms": link_ms, "exposed_ms": exposed, "hidden_ms": max(0.0, link_ms - max(0.0, exposed))}


def _timing_line(timing: Timing) -> str:
    """Return a turn as progress text, which is all that is left of a run interrupted before its file is written."""
    return f"{timing.ms:.2f} ms" + ("" if timing.chat_ms is None else f", as in a chat {timing.chat_ms:.2f} ms")


def measure(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Measured:
    """Measure ``device``, which must be the current one if CUDA, in GB/s; matrices and K/V have the ``dtype``.

    A CPU has no PCIe link, so those rates are None.
    """
    cuda = device.type == "cuda"
    by_programs = kernel_gather(device, dtype) if cuda else {}
    return Measured(
        read=_rounded(rates.read(device, dtype, READ_BYTES[device.type]) / 1e9),
        to_device=_rounded(rates.link(device, to_device=True) / 1e9) if cuda else None,
        to_host=_rounded(rates.link(device, to_device=False) / 1e9) if cuda else None,
        gather=_rounded(max(by_programs.values()) / 1e9 if by_programs else gather(device, dtype)),
        kvchat=kvchat.__version__,
        torch=torch.__version__,
    )


def gather(device: torch.device, dtype: torch.dtype) -> float:
    """Return the GB/s at which the device reads scattered pages of the host pool, as recall without kernels does."""
    geometry = Geometry(1, 1, 1, GATHER_ROW[dtype], GATHER_ROW[dtype], dtype)
    host = HostPool(geometry, device, context=GATHER_TOKENS[device.type])
    host.reserve(GATHER_TOKENS[device.type])
    blocks = host.blocks(0)
    held = 2 * host.capacity // geometry.page  # beyond that is address space without memory
    some = torch.randperm(held, device=blocks.device)[: held // 4]
    out = torch.empty((len(some), blocks.shape[1]), dtype=dtype, device=blocks.device)
    return out.nbytes / rates.seconds(lambda: torch.index_select(blocks, 0, some, out=out), device) / 1e9


def kernel_gather(device: torch.device, dtype: torch.dtype) -> dict[int, float]:
    """Return bytes/s at which the recall kernel reads pages of pinned RAM, by its number of programs.

    Returns {} without kernels. ``device`` must be the current CUDA device.
    """
    geometry = Geometry(1, 1, 1, 128, 128, dtype)
    if triton_refusal(geometry, device):
        return {}
    from kvchat.kv.ops.triton import recall

    shape = recall.MEASURED_PAGES, 2, geometry.page, geometry.d
    source = torch.zeros(shape, dtype=dtype, pin_memory=True)
    target = torch.empty((2, shape[0], *shape[2:]), dtype=dtype, device=device)
    return recall.recall_rates(source, target)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
