"""Turns counters of the KV manager, torch and NVML into the snapshots on screen and the receipt of an answer.

The ribbon shows where stored tokens are: one letter and one digit per cell. Details by layer and KV head, a histogram
of recall times and PCIe traffic are read only while the user looks at them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from kvchat.kv.inspect import ENOUGH_COVERED, CoverageWatch, attended_counts, held_per_head, read_per_head, read_tokens
from kvchat.kv.manager import KVManager, is_out_of_memory
from kvchat.kv.modes.base import Mode, ModeReport, TokenState
from kvchat.kv.transfer import RecallTime
from kvchat.models.recurrent import RecurrentState
from kvchat.nvml import GpuReader, PcieTraffic
from kvchat.process import resident_bytes
from kvchat.protocol.figures import LOW_COVERAGE, MAX_RIBBON_CELLS, Gpu, Params, Snapshot, Stats
from kvchat.protocol.messages import RECALL_EDGES_MS, Details, RecallBin
from kvchat.units import percent, size

RATE_TOKENS = 32  # tokens over which the displayed rate is averaged
SETTLING = 4  # first tokens in a mode, which capture a CUDA graph or wait for modules to load
GPU_S = 0.3  # least interval between NVML readings
LETTERS = {
    TokenState.SINK: "S",
    TokenState.WINDOW: "W",
    TokenState.RESIDENT: "D",
    TokenState.RECALLED: "R",
    TokenState.ON_HOST: "H",
    TokenState.FROZEN: "F",
    TokenState.UNREACHABLE: "X",
    TokenState.PINNED: "P",
}


@dataclass
class Counts:
    """The KV manager's running counts at one moment."""

    moved: int
    wanted: int
    corrections: int
    read: float
    steps: int
    moved_bytes: int
    timed_steps: int
    recall_s: float

    @staticmethod
    def of(kv: KVManager) -> Counts:
        state, timer = kv.state, kv.state.transfer.timer
        moved, wanted, corrections, moved_bytes = state.transfer.totals
        read, steps = read_tokens(state), state.steps
        return Counts(moved, wanted, corrections, read, steps, moved_bytes, timer.timed, timer.seconds)


@dataclass
class AnswerMetrics:
    """Measurements of one answer in progress; times are ``perf_counter`` seconds.

    ``mode`` is the mode in which it began, ``cosine`` the sum that this mode had reported by then. ``drawn`` are the
    indices in ``token_times`` of tokens that were not accepted drafts.
    """

    before: Counts
    mode: Mode
    cosine: float
    prompt_tokens: int
    reused_tokens: int
    began: float = field(default_factory=time.perf_counter)
    prefilled: float | None = None
    token_times: list[float] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    switches: list[Params] = field(default_factory=list)
    recoveries: int = 0
    withdrawn: int = 0
    recovery: str = ""

    def token(self, is_draft: bool = False) -> None:
        if not is_draft:
            self.drawn.append(len(self.token_times))
        self.token_times.append(time.perf_counter())

    def rate(self) -> float | None:
        """Return tokens per second, excluding the first token, which the prefill produced."""
        return _rate(self.token_times)

    def present_rate(self) -> float | None:
        """Return tokens per second of the last ``RATE_TOKENS`` tokens, or of those since the last switch."""
        since = self.switches[-1]["at"] if self.switches else 0
        return _rate(self.token_times[since:][-RATE_TOKENS - 1 :])

    def typical_s(self, least: int) -> float | None:
        """Return seconds per token over the last ``RATE_TOKENS`` rounds, excluding the two longest.

        A round is one step: a sampled token and the accepted drafts after it. Tokens that warm up a mode are excluded.
        Returns None if there were fewer than ``least`` rounds since the last switch.
        """
        since = (self.switches[-1]["at"] if self.switches else 0) + SETTLING
        begun = [at for at in self.drawn if at >= since][-RATE_TOKENS - 1 :]
        rounds = sorted((self.token_times[end] - self.token_times[at], end - at) for at, end in pairwise(begun))
        if len(rounds) < least:
            return None
        return sum(taken for taken, _ in rounds[:-2]) / sum(tokens for _, tokens in rounds[:-2])

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.began if self.token_times else None


class MetricsCollector:
    """Reads a KV manager and the recurrent state; ``weight_bytes`` and ``context`` are the model's.

    ``elsewhere`` maps the names of the other GPUs, which hold no K/V, to the bytes of weights on them.
    """

    def __init__(
        self,
        kv: KVManager,
        recurrent: RecurrentState,
        weight_bytes: int,
        context: int,
        elsewhere: Mapping[str, int] | None = None,
    ) -> None:
        self._kv = kv
        self._recurrent = recurrent
        self._weight_bytes = weight_bytes
        self._context = context
        self._elsewhere = dict(elsewhere or {})
        self._home = str(kv.state.device)
        devices = [kv.state.device, *map(torch.device, self._elsewhere)]
        gpus = {str(one): torch.cuda.get_device_properties(one) for one in devices if one.type == "cuda"}
        # By UUID, because NVML ignores CUDA_VISIBLE_DEVICES.
        self._gpu_readers = {device: (GpuReader(str(gpu.uuid)), gpu.name) for device, gpu in gpus.items()}
        self._gpus: dict[str, Gpu] = {}
        self._gpu_read = float("-inf")
        self._last = Counts.of(kv)
        self._step_bytes = 0.0
        self._hit_rate: float | None = None
        self._recall_rate: float | None = None
        self._excluded_bytes = self._excluded_corrections = 0
        self._ribbon = Ribbon(kv)
        self._pcie = PcieReading(self._gpu_readers[self._home][0] if self._gpu_readers else None)
        self._coverage, self._covered_in = CoverageWatch(kv.state), kv.mode
        self.answer: AnswerMetrics | None = None

    def begin(self, prompt_tokens: int, reused_tokens: int) -> AnswerMetrics:
        self._kv.state.transfer.timer.steps.clear()
        watch = self._watch()
        (watch.begin if 2 * reused_tokens > prompt_tokens else watch.restart)()  # any two prompts share a prefix
        mode = self._kv.mode
        self.answer = AnswerMetrics(Counts.of(self._kv), mode, mode.report().cosine, prompt_tokens, reused_tokens)
        return self.answer

    def leave(self) -> None:
        """Forget the last answer's figures, because another conversation follows."""
        self.answer = None
        self._forget_fetches()
        self._coverage.restart()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the block's work from the conversation's figures."""
        timer = self._kv.state.transfer.timer
        kept, steps = (self.answer, self._step_bytes, self._hit_rate, self._recall_rate), list(timer.steps)
        coverage, self._coverage = self._coverage, CoverageWatch(self._kv.state)
        before = Counts.of(self._kv)
        self._note_steps(before)
        try:
            yield
        finally:
            self.answer, self._step_bytes, self._hit_rate, self._recall_rate = kept
            self._coverage, self._covered_in = coverage, self._kv.mode  # a new object: the mode was entered again
            self._last = Counts.of(self._kv)
            self._excluded_bytes += self._last.moved_bytes - before.moved_bytes
            self._excluded_corrections += self._last.corrections - before.corrections
            timer.steps.clear()
            timer.steps.extend(steps)

    def note_switch(self, before: str, mode: str, moved_bytes: int) -> None:
        """Record a switch, perhaps during an answer; the recall times so far belong to the old mode, so drop them."""
        self._forget_fetches()
        if self.answer:
            at = len(self.answer.token_times)
            self.answer.switches.append({"at": at, "before": before, "mode": mode, "moved_bytes": moved_bytes})

    def _forget_fetches(self) -> None:
        self._last, self._step_bytes = Counts.of(self._kv), 0.0
        self._hit_rate = self._recall_rate = None
        self._kv.state.transfer.timer.steps.clear()

    def sample_coverage(self) -> None:
        """Measure now and then, between two steps, how much of the last step's attention the mode covered.

        Skip a step that read everything, and steps beyond the context, where no mode does and positions differ. If
        memory runs out, the answer continues without this measurement.
        """
        kv, watch = self._kv, self._watch()
        if kv.step.exact or kv.mode.context_policy.limits_prompt(kv.total):
            return
        try:
            watch.sample()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def stats(self, answer: AnswerMetrics) -> Stats:
        """Return the receipt of an answer."""
        kv, now, before = self._kv, Counts.of(self._kv), answer.before
        new_tokens = answer.prompt_tokens - answer.reused_tokens
        prefill_s = answer.prefilled - answer.began if answer.prefilled else None
        steps, corrections = now.steps - before.steps, now.corrections - before.corrections
        read, stored = now.read - before.read, steps * (kv.total - (steps - 1) / 2)  # summed over all steps
        report = kv.mode.report()
        head_steps = 0 if answer.switches else steps * report.correctable
        return Stats(
            prompt_tokens=answer.prompt_tokens,
            reused_tokens=answer.reused_tokens,
            generated_tokens=len(answer.token_times) - answer.withdrawn,
            total_tokens=kv.total,
            active_tokens=read / steps if steps else None,
            read_share=min(read / stored, 1.0) if steps else None,
            ttft_s=answer.ttft_s,
            prefill_tokens_per_s=new_tokens / prefill_s if prefill_s else None,
            decode_tokens_per_s=answer.rate(),
            kv_device_bytes=kv.device_bytes + self._recurrent.nbytes,
            kv_host_bytes=kv.state.host.nbytes + self._recurrent.snapshot_bytes,
            recalled_bytes=now.moved_bytes - before.moved_bytes,
            recall_hit_rate=_hit_rate(before, now),
            recall_bytes_per_s=_recall_rate(before, now),
            corrections=corrections,
            corrected_share=corrections / head_steps if head_steps else None,
            mean_cosine=(report.cosine - answer.cosine) / steps if head_steps and kv.mode is answer.mode else None,
            coverage=self._watch().share,
            lowest_coverage=self._watch().lowest,
            **self._recall_times(),
            recoveries=answer.recoveries,
            withdrawn_tokens=answer.withdrawn,
            switches=tuple(answer.switches),
            extras=report.stats,
        )

    def snapshot(self, reduced_tokens: int) -> Snapshot:
        kv, now = self._kv, Counts.of(self._kv)
        counts = attended_counts(kv.state)
        self._note_steps(now)
        report = kv.mode.report()
        cell, letters, shares = self._ribbon.cells(counts, report)
        cuda = kv.state.device.type == "cuda"
        if time.monotonic() - self._gpu_read >= GPU_S:
            self._gpus = {device: reader.usage(name) for device, (reader, name) in self._gpu_readers.items()}
            self._gpu_read = time.monotonic()
        return Snapshot(
            mode=kv.mode.name,
            params=report.params,
            active=float(counts.sum()) / (kv.state.geometry.layers * kv.state.geometry.kv_heads),
            is_prompt=not kv.state.after_step and not (self.answer and self.answer.token_times),
            total=kv.total,
            context=self._context,
            kv_device_bytes=kv.device_bytes + self._recurrent.nbytes,
            kv_host_bytes=kv.state.host.nbytes + self._recurrent.snapshot_bytes,
            state_bytes=self._recurrent.nbytes,
            preamble=self._kv.mode.system_tokens,
            pins=len(self._kv.mode.pins),
            device_room=kv.state.capacity,
            exact_room=kv.state.host.capacity,
            rounded_room=kv.state.host.room - kv.state.host.capacity,
            snapshot_bytes=self._recurrent.snapshot_bytes,
            weight_bytes=self._weight_bytes,
            process_bytes=resident_bytes(),
            torch_allocated=torch.cuda.memory_allocated(kv.state.device) if cuda else None,
            torch_reserved=torch.cuda.memory_reserved(kv.state.device) if cuda else None,
            gpu=self._gpus.get(self._home),
            elsewhere=self._elsewhere,
            other_gpus={name: self._gpus[name] for name in self._elsewhere},
            tokens_per_s=self.answer.present_rate() if self.answer else None,
            ttft_s=self.answer.ttft_s if self.answer else None,
            step_bytes=self._step_bytes,
            recalled_bytes=now.moved_bytes - self._excluded_bytes,
            recall_hit_rate=self._hit_rate,
            recall_bytes_per_s=self._recall_rate,
            corrections=now.corrections - self._excluded_corrections,
            coverage=self._watch().share,
            **self._recall_times(),
            reduced_tokens=reduced_tokens,
            badges=(*report.badges, *self._uncovered()),
            cell_tokens=cell,
            ribbon=letters,
            attended=shares,
            extras=report.stats | self._extras(),
        )

    def details(self) -> Details:
        """Return tokens read and held by layer and KV head, and recall times, as of now."""
        state, pcie = self._kv.state, self._pcie.latest()
        read, held = (tuple(map(tuple, counts.tolist())) for counts in (read_per_head(state), held_per_head(state)))
        return Details(state.total, read, held, histogram(state.transfer.timer.steps), pcie.to_device, pcie.to_host)

    def _watch(self) -> CoverageWatch:
        """Return the coverage watch, restarted if the mode has changed."""
        if self._kv.mode is not self._covered_in:
            self._coverage.restart()
            self._covered_in = self._kv.mode
        return self._coverage

    def _uncovered(self) -> Iterator[str]:
        watch = self._watch()
        lowest = watch.lowest if watch.has_seen_enough else None
        if lowest is not None and lowest < ENOUGH_COVERED:
            yield (
                f"{LOW_COVERAGE}: at its lowest, {percent(lowest)} of the attention fell on what was read, so facts "
                "may be missed. Try a larger /budget, or /mode full"
            )

    def _recall_times(self) -> Params:
        """Return the median and 95th percentile of recall per step in ms, in total and exposed."""
        recalls = self._kv.state.transfer.timer.steps
        p50, p95 = _percentiles_ms([step.total for step in recalls])
        exposed_p50, exposed_p95 = _percentiles_ms([step.exposed for step in recalls])
        return {
            "recall_ms_p50": p50,
            "recall_ms_p95": p95,
            "exposed_ms_p50": exposed_p50,
            "exposed_ms_p95": exposed_p95,
        }

    def _extras(self) -> Params:
        """Return figures that only some models and conversations have, in any mode."""
        mode, recurrent, found = self._kv.mode, self._recurrent, dict[str, str]()
        system = min(mode.pinned, self._kv.total)
        if pinned := system + sum(position >= system for position in self._kv.state.pins):
            beyond = min(mode.extra_sinks, system) + len(mode.pins)
            found["pinned"] = f"{pinned:,} tok, {beyond:,} beyond"
        if recurrent.exists:
            found["recurrent state"] = f"{size(recurrent.nbytes)} + {size(recurrent.snapshot_bytes)} in RAM"
        if self.answer and self.answer.recovery:
            found["recovery"] = self.answer.recovery
        return found

    def _note_steps(self, now: Counts) -> None:
        """Update the per-step figures if there were steps since they were last updated."""
        steps = now.steps - self._last.steps
        if steps > 0:
            self._step_bytes = (now.moved_bytes - self._last.moved_bytes) / steps
            self._hit_rate = _hit_rate(self._last, now)
            self._recall_rate = _recall_rate(self._last, now)
            self._last = now


def _rate(times: list[float]) -> float | None:
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None


def _percentiles_ms(seconds: list[float]) -> tuple[float | None, float | None]:
    """Return the median and 95th percentile in milliseconds, or None for both."""
    if not seconds:
        return None, None
    ordered, last = sorted(seconds), len(seconds) - 1
    return 1000 * ordered[last // 2], 1000 * ordered[int(0.95 * last)]


def _hit_rate(before: Counts, now: Counts) -> float | None:
    wanted = now.wanted - before.wanted
    # More tokens can move than are wanted: a choice made one step ahead may be replaced before it is read.
    return max(0.0, 1 - (now.moved - before.moved) / wanted) if wanted else None


def _recall_rate(before: Counts, now: Counts) -> float | None:
    """Return bytes per second of recall, extrapolated from the timed steps."""
    steps, timed = now.steps - before.steps, now.timed_steps - before.timed_steps
    moved, seconds = now.moved_bytes - before.moved_bytes, now.recall_s - before.recall_s
    return moved / steps * timed / seconds if moved and steps and seconds else None


class PcieReading:
    """Measures PCIe traffic on its own thread, because NVML takes 40 ms for it."""

    def __init__(self, reader: GpuReader | None) -> None:
        self._reader = reader
        self._latest = PcieTraffic()
        self._thread: threading.Thread | None = None

    def latest(self) -> PcieTraffic:
        """Return the last measurement and start the next one."""
        latest = self._latest
        if self._reader and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._measure, args=(self._reader,), daemon=True)
            self._thread.start()
        return latest

    def _measure(self, reader: GpuReader) -> None:
        self._latest = reader.pcie()


def histogram(steps: Iterable[RecallTime]) -> tuple[RecallBin, ...]:
    """Count steps by the time of their recall; no bins without steps."""
    binned: list[list[RecallTime]] = [[] for _ in (*RECALL_EDGES_MS, None)]
    for step in steps:
        binned[bisect_right(RECALL_EDGES_MS, 1000 * step.total)].append(step)
    if not any(binned):
        return ()
    return tuple(
        RecallBin(
            len(steps), 1000 * sum(step.total - step.exposed for step in steps), 1000 * sum(s.exposed for s in steps)
        )
        for steps in binned
    )


class Ribbon:
    """Reads a KV manager; remembers how many heads read each token, to detect recalled tokens."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._counts = torch.zeros(0)

    def cells(self, counts: Tensor, report: ModeReport) -> tuple[int, str, str]:
        """Return tokens per cell, the cells' letters, and their read shares as digits.

        ``counts [total]`` says in how many (layer, KV head) pairs the last token read each token.
        """
        total, g = self._kv.total, self._kv.state.geometry
        cell = g.page * max(1, -(-g.pages(total) // MAX_RIBBON_CELLS))
        shares = _shares(counts.double() / (g.layers * g.kv_heads), cell)
        recalled = self._recalled_cells(counts, cell)
        pinned = {position // cell for position in (*range(self._kv.mode.pinned), *self._kv.state.pins)}
        states = (
            TokenState.PINNED
            if i in pinned
            else TokenState.RECALLED
            if i in recalled
            else self._state((i * cell + min((i + 1) * cell, total)) // 2, s, report)
            for i, s in enumerate(shares)
        )
        letters = "".join(LETTERS[state] for state in states)
        return cell, letters, "".join(str(min(9, int(share * 10))) for share in shares)

    def _state(self, position: int, share: float, report: ModeReport) -> TokenState:
        """Return the state of a cell with the middle ``position``, of which a ``share`` was read."""
        mode = self._kv.mode
        if mode.sink > position:
            return TokenState.SINK
        if mode.window and position >= self._kv.total - mode.window:
            return TokenState.WINDOW
        if position < report.on_host:
            return TokenState.ON_HOST
        return TokenState.RESIDENT if share >= report.resident_share else report.absent

    def _recalled_cells(self, counts: Tensor, cell: int) -> set[int]:
        """Return cells with a token that more (layer, KV head) pairs read now than at the last call."""
        before, self._counts = self._counts, counts.cpu()
        known = min(len(before), len(counts))
        came = (self._counts[:known] > before[:known]).nonzero().flatten()
        return set(torch.bincount(came // cell).nonzero().flatten().tolist())


def _shares(shares: Tensor, cell: int) -> list[float]:
    """Return the mean of ``shares [total]`` over each cell."""
    if not len(shares):
        return []
    means: list[float] = torch.nn.functional.avg_pool1d(shares[None], cell, ceil_mode=True)[0].tolist()
    return means
