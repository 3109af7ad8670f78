"""A server's own figures, from the text for Prometheus that vLLM, SGLang and llama-server give of themselves.

Names are those of vLLM 0.32, SGLang 0.5.23 and llama.cpp of October 2026. The parser takes ``_total`` off the names of
some counters and puts it onto others, so that a sample is looked up without it.
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
from kvchat.remote.servers import KVCHAT, LLAMA, SGLANG, VLLM, Address, slots_of, whole

LEAST_S = 0.5  # between two readings of a counter that a rate is made of
NOT_TOLD = {
    LLAMA: "needs llama-server --metrics",
    SGLANG: "needs SGLang's --enable-metrics",
}
NONE = "the server has no metrics"


class Samples:
    """The samples of one reading by name, without ``_total``; of several engines or GPUs each name has several."""

    def __init__(self, text: str) -> None:
        """
        Raises:
            ValueError: it is no such text.
        """
        self._samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name.removesuffix("_total")].append((sample.labels, sample.value))

    def of(self, name: str, **labels: str) -> list[float]:
        found = self._samples.get(name.removesuffix("_total"), [])
        return [value for given, value in found if labels.items() <= given.items() and 0 <= value < 2**63]

    def sum(self, *names: str, **labels: str) -> float | None:
        """The sum over the first of the names that there is; None without one."""
        return next((sum(values) for name in names if (values := self.of(name, **labels))), None)

    def mean(self, *names: str) -> float | None:
        """The mean over the first of the names that there is; None without one."""
        return next((mean(values) for name in names if (values := self.of(name))), None)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [labels for labels, _ in self._samples.get(name, [])]


class MetricsReader:
    """Reads a server's figures; a rate needs two readings. ``clock`` in seconds."""

    def __init__(
        self, kind: str, address: Address, http: httpx2.AsyncClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kind, self._address, self._http, self._clock = kind, address, http, clock
        self._written: tuple[float, float] | None = None  # when, and tokens
        self._rate: float | None = None

    async def read(self) -> ServerFigures:
        """The figures as they are now; where they cannot be read ``missing`` says why."""
        nothing = ServerFigures(self._kind, self._address.place)
        if self._kind not in FIGURES:
            return replace(nothing, missing=NONE)
        try:
            reply = await self._http.get(f"{self._address.root}/metrics")
            if not reply.is_success:
                return replace(nothing, missing=NOT_TOLD.get(self._kind, f"/metrics returned {reply.status_code}"))
            figures, written = FIGURES[self._kind](Samples(reply.text), nothing)
            if self._kind == LLAMA:
                slots = await slots_of(self._address, self._http)  # none where it does not list them
                capacity, used = (sum(whole(one.get(of)) for one in slots) for of in ("n_ctx", "n_prompt_tokens"))
                figures = replace(figures, capacity=capacity or None, used_share=_share(used, capacity))
        except (httpx2.HTTPError, ValueError) as error:
            return replace(nothing, missing=f"{type(error).__name__}: {error}"[:100])
        speed = self._speed(written) if figures.tokens_per_s is None else figures.tokens_per_s
        return replace(figures, tokens_per_s=speed)

    def _speed(self, written: float | None) -> float | None:
        """Tokens written a second for all users, since the reading before."""
        now = self._clock()
        if written is None:
            return None
        if self._written is None or written < self._written[1]:  # the first one, or the server was started again
            self._written, self._rate = (now, written), None
        elif (taken := now - self._written[0]) >= LEAST_S:
            self._written, self._rate = (now, written), (written - self._written[1]) / taken
        return self._rate


def _of_vllm(samples: Samples, figures: ServerFigures) -> tuple[ServerFigures, float | None]:
    asked, found = samples.sum("vllm:prefix_cache_queries"), samples.sum("vllm:prefix_cache_hits")
    drafted, accepted = (samples.sum(f"vllm:spec_decode_num_{one}_tokens") for one in ("draft", "accepted"))
    beyond = samples.sum("vllm:external_prefix_cache_hits") or samples.sum("vllm:hisparse_cache_hits")
    return replace(
        figures,
        capacity=_blocks(samples.labels("vllm:cache_config_info")),
        used_share=samples.mean("vllm:kv_cache_usage_perc"),
        prefix_share=_share(found, asked),
        prefix_tokens=_count(found),
        host_share=samples.mean("vllm:kv_offload_cpu_cache_usage_perc", "vllm:hisparse_host_cache_usage_perc"),
        host_tokens=_count(beyond) or None,
        host_loaded_bytes=_count(samples.sum("vllm:kv_offload_load_bytes", "vllm:hisparse_host_to_device_bytes")),
        host_stored_bytes=_count(samples.sum("vllm:kv_offload_store_bytes")),
        running=_count(samples.sum("vllm:num_requests_running")),
        waiting=_count(samples.sum("vllm:num_requests_waiting")),
        drafts_share=_share(accepted, drafted),
    ), samples.sum("vllm:generation_tokens")


def _blocks(caches: Iterable[dict[str, Any]]) -> int | None:
    """The tokens that vLLM's blocks hold, of all engines."""
    sizes = [(one.get("num_gpu_blocks", ""), one.get("block_size", "")) for one in caches]
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
    read, found = samples.sum(f"{prefix}:prompt_tokens"), samples.sum(f"{prefix}:prompt_tokens_cached")
    drafted, accepted = (samples.sum(f"{prefix}:spec_decode_num_{one}_tokens") for one in ("draft", "accepted"))
    return replace(
        figures,
        prefix_share=None if read is None or found is None else _share(found, read + found),
        prefix_tokens=_count(found),
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
"""The figures in the samples, and how many tokens the server has written."""


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
