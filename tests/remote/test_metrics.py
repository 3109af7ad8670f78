"""Metrics that servers publish, read from the text that they print."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_server import FakeServer

from kvchat.protocol.figures import ServerFigures
from kvchat.remote import servers
from kvchat.remote.metrics import SILENT, MetricsReader, Samples
from kvchat.remote.servers import parse


def metrics_text(program: str, labels: str, counters: dict[str, float], gauges: dict[str, float]) -> str:
    """Metrics as a program prints them, each with labels; braces in a name hold its own labels."""
    lines = []
    for kind, figures in (("counter", counters), ("gauge", gauges)):
        for figure, value in figures.items():
            name, _, own = figure.partition("{")
            all_labels = ",".join(filter(None, (own.rstrip("}"), labels)))
            lines += [f"# TYPE {program}:{name} {kind}", f"{program}:{name}{{{all_labels}}} {value}"]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def vllm(generated: int) -> str:
    """What vLLM 0.32 printed, with other numbers, and what its offloading adds."""
    counters = {
        "prefix_cache_queries_total": 200.0,
        "prefix_cache_hits_total": 150.0,
        "external_prefix_cache_hits_total": 64.0,
        "generation_tokens_total": generated,
        "spec_decode_num_draft_tokens_total": 8.0,
        "spec_decode_num_accepted_tokens_total": 6.0,
        "kv_offload_load_bytes_total": 4096.0,
        "kv_offload_store_bytes_total": 8192.0,
    }
    gauges = {
        "num_requests_running": 1.0,
        "num_requests_waiting": 2.0,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_created": 1.7956827827802913e09,
        'cache_config_info{block_size="128",cache_dtype="auto",num_gpu_blocks="455"}': 1.0,
        "kv_offload_cpu_cache_usage_perc": 0.5,
    }
    return metrics_text("vllm", 'engine="0",model_name="m"', counters, gauges)


SGLANG = metrics_text(
    "sglang",
    'model_name="m",tp_rank="0"',
    {'cached_tokens_total{cache_source="device"}': 70.0, 'cached_tokens_total{cache_source="host"}': 30.0},
    {"num_running_reqs": 1.0, "num_queue_reqs": 0.0, "token_usage": 0.28, "max_total_num_tokens": 441122.0}
    | {"cache_hit_rate": 0.4, "hicache_host_used_tokens": 1000.0, "hicache_host_total_tokens": 4000.0}
    | {"gen_throughput": 86.5, "spec_accept_rate": 0.7},
)


class Reading:
    """A reader of a server's figures, with its own client, event loop and clock."""

    def __init__(self, kind: str, server: FakeServer) -> None:
        self.server, self.now, self.loop = server, 100.0, asyncio.new_event_loop()
        address = parse(server.url)
        self.http = servers.client(address)
        self.reader = MetricsReader(kind, address, self.http, lambda: self.now)

    def read(self) -> ServerFigures:
        return self.loop.run_until_complete(self.reader.read())

    def close(self) -> None:
        self.loop.run_until_complete(self.http.aclose())
        self.loop.close()


@pytest.fixture
def reading(serve):
    opened = []

    def begin(kind, metrics):
        server = serve()
        server.routes["/metrics"] = metrics
        opened.append(Reading(kind, server))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def test_a_counter_is_found_under_both_names():
    text = "# TYPE llamacpp:n_tokens_max counter\nllamacpp:n_tokens_max 7\n"
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].name == "llamacpp:n_tokens_max_total"
    assert Samples(text).sum("llamacpp:n_tokens_max") == Samples(text).sum("llamacpp:n_tokens_max_total") == 7


def test_vllm_metrics_are_read(reading):
    figures = reading(servers.VLLM, vllm(100)).read()
    assert (figures.used_share, figures.capacity) == (0.25, 58_240)
    assert (figures.prefix_share, figures.prefix_tokens) == (0.75, 150)
    assert (figures.host_share, figures.host_tokens) == (0.5, 64)
    assert (figures.host_loaded_bytes, figures.host_stored_bytes) == (4096, 8192)
    assert (figures.running, figures.waiting, figures.drafts_share) == (1, 2, 0.75)


def test_several_engines_are_summed_and_shares_averaged(reading):
    text = re.sub('(?m)^(vllm.*)engine="0"(.*)$', r'\g<0>\n\1engine="1"\2', vllm(100))
    figures = reading(servers.VLLM, text).read()
    assert (figures.capacity, figures.running, figures.used_share, figures.prefix_share) == (116_480, 2, 0.25, 0.75)


def test_speed_needs_two_readings_and_resets_with_the_server(reading):
    one = reading(servers.VLLM, vllm(100))
    assert one.read().tokens_per_s is None
    one.server.routes["/metrics"] = vllm(150)
    one.now += 2
    assert one.read().tokens_per_s == 25
    one.server.routes["/metrics"] = vllm(3)
    one.now += 1
    assert one.read().tokens_per_s is None


def test_sglang_metrics_are_read(reading):
    figures = reading(servers.SGLANG, SGLANG).read()
    assert (figures.used_share, figures.capacity) == (0.28, 441_122)
    assert (figures.prefix_share, figures.prefix_tokens, figures.host_tokens) == (0.4, 100, 30)
    assert (figures.host_share, figures.host_capacity) == (0.25, 4000)
    assert (figures.tokens_per_s, figures.drafts_share) == (86.5, 0.7)


@pytest.mark.parametrize(("kind", "prefix"), [(servers.LLAMA, "llamacpp"), (servers.KVCHAT, "kvchat")])
def test_llama_server_and_kvchat_metrics_are_read(reading, kind, prefix):
    counters = {"prompt_tokens_total": 30, "prompt_tokens_cached_total": 90}
    one = reading(kind, metrics_text(prefix, "", counters, {"requests_processing": 1, "requests_deferred": 2}))
    one.server.routes["/slots"] = [{"id": 0, "n_ctx": 2048}, {"id": 1, "n_ctx": 2048}]
    figures = one.read()
    assert (figures.prefix_share, figures.prefix_tokens, figures.running, figures.waiting) == (0.75, 90, 1, 2)
    assert figures.capacity == (4096 if kind == servers.LLAMA else None)


@pytest.mark.parametrize(
    ("kind", "metrics"),
    [
        (servers.LLAMA, (501, {"error": {"message": "This server does not support metrics endpoint."}})),
        (servers.SGLANG, (404, "")),
        (servers.VLLM, (500, "")),
        (servers.VLLM, "vllm:x{"),
        (servers.OLLAMA, (404, "")),
    ],
)
def test_unavailable_metrics_have_a_reason(reading, kind, metrics):
    figures = reading(kind, metrics).read()
    assert figures.missing
    assert figures == ServerFigures(kind, figures.place, missing=figures.missing)


def test_metrics_of_a_server_that_is_gone_have_a_reason(reading):
    one = reading(servers.VLLM, vllm(1))
    one.server.__exit__()
    assert one.read().missing == SILENT


def test_numbers_out_of_range_are_left_out(reading):
    text = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running NaN\n"
    assert reading(servers.VLLM, text).read().running is None
