"""Counters of the store, torch and NVML -> the snapshots the screen draws and the receipt of an answer."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from kvchat.kv.manager import Store
from kvchat.nvml import GpuReader
from kvchat.protocol.messages import MAX_RIBBON_CELLS, Gpu, Params, Snapshot, Stats

RATE_TOKENS = 32  # the rate shown is that of the last so many tokens
GPU_S = 0.3  # NVML is asked at most this often


@dataclass
class Counts:
    """The store's running counts at one moment."""

    moved: int
    wanted: int
    corrections: int
    active: float
    steps: int

    @staticmethod
    def of(store: Store) -> Counts:
        moved, wanted, corrections = store.transfer.totals.tolist()
        return Counts(moved, wanted, corrections, store.active_sum(), store.steps)


@dataclass
class AnswerMetrics:
    """What is noted while one answer is made; times are ``perf_counter`` seconds."""

    before: Counts
    prompt_tokens: int
    reused_tokens: int
    began: float = field(default_factory=time.perf_counter)
    prefilled: float | None = None
    token_times: list[float] = field(default_factory=list)
    switches: list[Params] = field(default_factory=list)
    recoveries: int = 0
    withdrawn: int = 0
    recovery: str = ""

    def token(self) -> None:
        """A token was drawn."""
        self.token_times.append(time.perf_counter())

    def rate(self, tokens: int = 0) -> float | None:
        """Tokens per second of the last ``tokens`` tokens (0: of all), without the first, which the prefill made."""
        times = self.token_times[-tokens - 1 :] if tokens else self.token_times
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.token_times[0] - self.began if self.token_times else None


class MetricsCollector:
    """Reads a store; ``weight_bytes`` and ``context`` are the model's."""

    def __init__(self, store: Store, weight_bytes: int, context: int) -> None:
        self._store = store
        self._weight_bytes = weight_bytes
        self._context = context
        self._gpu_reader, self._gpu_name = _gpu_of(store.device)
        self._gpu: Gpu | None = None
        self._gpu_read = float("-inf")
        self._last = Counts.of(store)
        self._step_bytes = 0.0
        self._hit_rate: float | None = None
        self._resident: set[int] = set()
        self.answer: AnswerMetrics | None = None

    def begin(self, prompt_tokens: int, reused_tokens: int) -> AnswerMetrics:
        """An answer begins."""
        self.answer = AnswerMetrics(Counts.of(self._store), prompt_tokens, reused_tokens)
        return self.answer

    def stats(self, answer: AnswerMetrics) -> Stats:
        """The receipt of an answer."""
        store, now, before = self._store, Counts.of(self._store), answer.before
        new_tokens = answer.prompt_tokens - answer.reused_tokens
        prefill_s = answer.prefilled - answer.began if answer.prefilled else None
        steps = now.steps - before.steps
        return Stats(
            prompt_tokens=answer.prompt_tokens,
            reused_tokens=answer.reused_tokens,
            generated_tokens=len(answer.token_times) - answer.withdrawn,
            total_tokens=store.total,
            active_tokens=(now.active - before.active) / steps if steps else None,
            ttft_s=answer.ttft_s,
            prefill_tokens_per_s=new_tokens / prefill_s if prefill_s else None,
            decode_tokens_per_s=answer.rate(),
            kv_device_bytes=store.device_bytes,
            kv_host_bytes=store.host.nbytes,
            recalled_bytes=(now.moved - before.moved) * store.transfer.pair_bytes,
            recall_hit_rate=_hit_rate(before, now),
            corrections=now.corrections - before.corrections,
            recoveries=answer.recoveries,
            withdrawn_tokens=answer.withdrawn,
            switches=tuple(answer.switches),
        )

    def snapshot(self, reduced_tokens: int) -> Snapshot:
        """What the store holds and did, as of now."""
        store, now = self._store, Counts.of(self._store)
        counts = store.attended_counts()
        self._note_steps(now)
        cell, ribbon, attended = self._ribbon(counts)
        p50, p95 = self._recall_ms()
        cuda = store.device.type == "cuda"
        return Snapshot(
            mode=store.mode.name,
            params=store.mode.effective_params(),
            active=float(counts.sum()) / (store.geometry.layers * store.geometry.kv_heads),
            total=store.total,
            context=self._context,
            kv_device_bytes=store.device_bytes,
            kv_host_bytes=store.host.nbytes,
            weight_bytes=self._weight_bytes,
            torch_allocated=torch.cuda.memory_allocated(store.device) if cuda else None,
            torch_reserved=torch.cuda.memory_reserved(store.device) if cuda else None,
            gpu=self._read_gpu(),
            tokens_per_s=self.answer.rate(RATE_TOKENS) if self.answer else None,
            ttft_s=self.answer.ttft_s if self.answer else None,
            step_bytes=self._step_bytes,
            recalled_bytes=now.moved * store.transfer.pair_bytes,
            recall_hit_rate=self._hit_rate,
            corrections=now.corrections,
            recall_ms_p50=p50,
            recall_ms_p95=p95,
            reduced_tokens=reduced_tokens,
            cell_tokens=cell,
            ribbon=ribbon,
            attended=attended,
            extras=store.mode.stats() | self._recovery(),
        )

    def _recovery(self) -> Params:
        level = self.answer.recovery if self.answer else ""
        return {"recovery": level} if level else {}

    def _note_steps(self, now: Counts) -> None:
        """Per-step figures since the last snapshot in which there were steps."""
        steps = now.steps - self._last.steps
        if steps > 0:
            self._step_bytes = (now.moved - self._last.moved) * self._store.transfer.pair_bytes / steps
            self._hit_rate = _hit_rate(self._last, now)
            self._last = now

    def _recall_ms(self) -> tuple[float | None, float | None]:
        seconds = sorted(s for s in self._store.transfer.step_seconds if s > 0)
        if not seconds:
            return None, None
        return tuple(1000 * seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.95))  # type: ignore[return-value]

    def _read_gpu(self) -> Gpu | None:
        if self._gpu_reader and time.monotonic() - self._gpu_read >= GPU_S:
            self._gpu = Gpu(self._gpu_name, **asdict(self._gpu_reader.usage()))
            self._gpu_read = time.monotonic()
        return self._gpu

    def _ribbon(self, counts: Tensor) -> tuple[int, str, str]:
        """Tokens per cell, the cells' letters, and their attended shares as digits."""
        store = self._store
        page = store.geometry.page
        cell = page * max(1, -(-store.geometry.pages(store.total) // MAX_RIBBON_CELLS))
        pairs = store.geometry.layers * store.geometry.kv_heads
        cells = -(-store.total // cell)
        padded = torch.zeros(cells * cell, dtype=torch.float64, device=counts.device)
        padded[: store.total] = counts.double() / pairs
        tokens = torch.full((cells,), cell, dtype=torch.float64, device=counts.device)
        if cells:
            tokens[-1] = store.total - (cells - 1) * cell
        shares = (padded.view(cells, cell).sum(1) / tokens).tolist()
        fresh = self._fresh_cells(cell)
        letters = (
            self._letter(i * cell, min((i + 1) * cell, store.total), s, i in fresh) for i, s in enumerate(shares)
        )
        return cell, "".join(letters), "".join(str(min(9, int(share * 10))) for share in shares)

    def _letter(self, start: int, end: int, share: float, fresh: bool) -> str:
        mode, middle = self._store.mode, (start + end) // 2
        if fresh:
            return "R"
        if mode.sink > middle:
            return "S"
        if mode.window and middle >= self._store.total - mode.window:
            return "W"
        return mode.letter(share)

    def _fresh_cells(self, cell: int) -> set[int]:
        """Cells with a page that was recalled since the last snapshot."""
        store = self._store
        held = {page for slots in store.slots for page in slots.pages.flatten().tolist() if page >= 0}
        fresh, self._resident = held - self._resident, held
        return {page * store.geometry.page // cell for page in fresh}


def _gpu_of(device: torch.device) -> tuple[GpuReader | None, str]:
    """NVML's reader of a CUDA device, and the device's name; by UUID, because NVML ignores CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return None, ""
    properties = torch.cuda.get_device_properties(device)
    return GpuReader(str(properties.uuid)), properties.name


def _hit_rate(before: Counts, now: Counts) -> float | None:
    wanted = now.wanted - before.wanted
    return 1 - (now.moved - before.moved) / wanted if wanted else None
