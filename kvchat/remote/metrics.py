"""A server's own figures, from the Prometheus metrics of vLLM, SGLang and llama-server.

Names are those of vLLM 0.32, SGLang 0.5.23 and llama.cpp of October 2026. The parser removes ``_total`` from some
counters' names and adds it to others, so samples are looked up without it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from kvchat.protocol.figures import ServerFigures
from kvchat.remote.servers import KVCHAT, LLAMA, SGLANG, VLLM, Address, whole

LEAST_S = 0.5  # least time between two readings of a counter to compute a rate
UNAVAILABLE = {
    LLAMA: "needs --metrics",
    SGLANG: "needs --enable-metrics",
}
NONE = "the server has no metrics"
SILENT = "the server does not answer"
UNREADABLE = "/metrics cannot be read"


class Samples:
    """The samples of one reading by name, without ``_total``; several engines or GPUs give several per name."""

    def __init__(self, text: str) -> None:
        """
        Raises:
            ValueError: it is not in Prometheus' format.
        """
        self._samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name.removesuffix("_total")].append((sample.labels, sample.value))

    def of(self, name: str, **labels: str) -> list[float]:
        found = self._samples.get(name.removesuffix("_total"), [])
        return [value for own, value in found if labels.items() <= own.items() and 0 <= value < 2**63]

    def sum(self, *names: str, **labels: str) -> float | None:
        """Return the sum of the samples of the first name that has any, or None."""
        return next((sum(values) for name in names if (values := self.of(name, **labels))), None)

    def mean(self, *names: str) -> float | None:
        """Return the mean of the samples of the first name that has any, or None."""
        return next((mean(values) for name in names if (values := self.of(name))), None)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [labels for labels, _ in self._samples.get(name, [])]


class MetricsReader:
    """Reads a server's figures; a rate needs two readings. ``clock`` is in seconds."""

    def __init__(
        self, kind: str, address: Address, http: httpx2.AsyncClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kind, self._address, self._http, self._clock = kind, address, http, clock
        self._last: tuple[float, float] | None = None  # the time of the last reading, and its generated tokens
        self._rate: float | None = None

    async def read(self) -> ServerFigures:
        """Return the current figures; if they cannot be read, ``missing`` says why."""
        empty = ServerFigures(self._kind, self._address.place)
        if self._kind not in FIGURES:
            return replace(empty, missing=NONE)
        try:
            reply = await self._http.get(f"{self._address.root}/metrics")
            if not reply.is_success:
                return replace(empty, missing=UNAVAILABLE.get(self._kind, f"/metrics returned {reply.status_code}"))
            figures, generated = FIGURES[self._kind](Samples(reply.text), empty)
            if self._kind == LLAMA:
                reply = await self._http.get(f"{self._address.root}/slots")
                slots = [slot for slot in (reply.json() if reply.is_success else []) if isinstance(slot, dict)]
                capacity, used = (sum(whole(slot.get(of)) for slot in slots) for of in ("n_ctx", "n_prompt_tokens"))
                figures = replace(figures, capacity=capacity or None, used_share=_share(used, capacity))
        except httpx2.HTTPError:
            return replace(empty, missing=SILENT)
        except ValueError:  # of a parser
            return replace(empty, missing=UNREADABLE)
        speed = self._speed(generated) if figures.tokens_per_s is None else figures.tokens_per_s
        return replace(figures, tokens_per_s=speed)

    def _speed(self, generated: float | None) -> float | None:
        """Return tokens per second for all users since the last reading; None at the first reading."""
        now = self._clock()
        if generated is None:
            return None
        if self._last is None or generated < self._last[1]:  # the first reading, or the server was restarted
            self._last, self._rate = (now, generated), None
        elif (seconds := now - self._last[0]) >= LEAST_S:
            self._last, self._rate = (now, generated), (generated - self._last[1]) / seconds
        return self._rate


def _of_vllm(samples: Samples, figures: ServerFigures) -> tuple[ServerFigures, float | None]:
    queries, hits = samples.sum("vllm:prefix_cache_queries"), samples.sum("vllm:prefix_cache_hits")
    drafted, accepted = (samples.sum(f"vllm:spec_decode_num_{one}_tokens") for one in ("draft", "accepted"))
    host_hits = samples.sum("vllm:external_prefix_cache_hits") or samples.sum("vllm:hisparse_cache_hits")
    return replace(
        figures,
        capacity=_blocks(samples.labels("vllm:cache_config_info")),
        used_share=samples.mean("vllm:kv_cache_usage_perc"),
        prefix_share=_share(hits, queries),
        prefix_tokens=_count(hits),
        host_share=samples.mean("vllm:kv_offload_cpu_cache_usage_perc", "vllm:hisparse_host_cache_usage_perc"),
        host_tokens=_count(host_hits) or None,
        host_loaded_bytes=_count(samples.sum("vllm:kv_offload_load_bytes", "vllm:hisparse_host_to_device_bytes")),
        host_stored_bytes=_count(samples.sum("vllm:kv_offload_store_bytes")),
        running=_count(samples.sum("vllm:num_requests_running")),
        waiting=_count(samples.sum("vllm:num_requests_waiting")),
        drafts_share=_share(accepted, drafted),
    ), samples.sum("vllm:generation_tokens")


def _blocks(caches: Iterable[dict[str, Any]]) -> int | None:
    """Return how many tokens the blocks of all of vLLM's engines can hold."""
    sizes = [(cache.get("num_gpu_blocks", ""), cache.get("block_size", "")) for cache in caches]
    return sum(int(blocks) * int(size) for blocks, size in sizes if blocks.isdecimal() and size.isdecimal()) or None


def _of_sglang(samples: Samples, figures: ServerFigures) -> tuple[ServerFigures, float | None]:
    host_used, host_all = (samples.sum(f"sglang:hicache_host_{one}_tokens") for one in ("used", "total"))
    return replace(
        figures,
        capacity=_count(samples.sum("sglang:max_total_num_tokens")),
        used_share=samples.mean("sglang:token_usage"),
        prefix_share=samples.mean("sglang:cache_hit_rate"),
        prefix_tokens=_count(samples.sum("sglang:cached_tokens")),
        host_capacity=_count(host_all),
        host_share=_share(host_used, host_all),
        host_tokens=_count(samples.sum("sglang:cached_tokens", cache_source="host")),
        running=_count(samples.sum("sglang:num_running_reqs")),
        waiting=_count(samples.sum("sglang:num_queue_reqs")),
        tokens_per_s=samples.sum("sglang:gen_throughput"),
        drafts_share=samples.mean("sglang:spec_accept_rate"),
    ), None


def _of_llama(samples: Samples, figures: ServerFigures, prefix: str = "llamacpp") -> tuple[ServerFigures, float | None]:
    processed, hits = samples.sum(f"{prefix}:prompt_tokens"), samples.sum(f"{prefix}:prompt_tokens_cached")
    drafted, accepted = (samples.sum(f"{prefix}:spec_decode_num_{one}_tokens") for one in ("draft", "accepted"))
    return replace(
        figures,
        prefix_share=None if processed is None or hits is None else _share(hits, processed + hits),
        prefix_tokens=_count(hits),
        running=_count(samples.sum(f"{prefix}:requests_processing")),
        waiting=_count(samples.sum(f"{prefix}:requests_deferred")),
        drafts_share=_share(accepted, drafted),
    ), None


FIGURES: dict[str, Callable[[Samples, ServerFigures], tuple[ServerFigures, float | None]]] = {
    VLLM: _of_vllm,
    SGLANG: _of_sglang,
    LLAMA: _of_llama,
    KVCHAT: partial(_of_llama, prefix="kvchat"),
}
"""Functions that return the figures in the samples, and how many tokens the server has generated."""


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
