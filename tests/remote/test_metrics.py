"""The figures that servers give of themselves, from the text that they print."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_server import FakeServer

from kvchat.protocol.figures import ServerFigures
from kvchat.remote import servers
from kvchat.remote.metrics import MetricsReader, Samples
from kvchat.remote.servers import parse

# What vLLM 0.32 printed, with other numbers; the last lines are those of its offloading.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 200.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7956827827802913e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 150.0
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 64.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} %d
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 8.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="455"} 1.0
# TYPE vllm:kv_offload_cpu_cache_usage_perc gauge
vllm:kv_offload_cpu_cache_usage_perc{engine="0",model_name="m"} 0.5
# TYPE vllm:kv_offload_load_bytes_total counter
vllm:kv_offload_load_bytes_total{engine="0",model_name="m"} 4096.0
# TYPE vllm:kv_offload_store_bytes_total counter
vllm:kv_offload_store_bytes_total{engine="0",model_name="m"} 8192.0
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 1.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 0.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 441122.0
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{model_name="m",tp_rank="0"} 0.4
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 70.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 30.0
# TYPE sglang:hicache_host_used_tokens gauge
sglang:hicache_host_used_tokens{model_name="m"} 1000.0
# TYPE sglang:hicache_host_total_tokens gauge
sglang:hicache_host_total_tokens{model_name="m"} 4000.0
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{model_name="m",tp_rank="0"} 86.5
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{model_name="m",tp_rank="0"} 0.7
"""


class Reading:
    """A reader of a server's figures, with a client, an event loop and a clock of its own."""

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


def test_the_parser_renames_counters_and_a_sample_is_found_by_either_name():
    text = "# TYPE llamacpp:n_tokens_max counter\nllamacpp:n_tokens_max 7\n"
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].name == "llamacpp:n_tokens_max_total"
    assert Samples(text).sum("llamacpp:n_tokens_max") == Samples(text).sum("llamacpp:n_tokens_max_total") == 7


def test_figures_of_vllm(reading):
    figures = reading(servers.VLLM, VLLM % 100).read()
    assert (figures.used_share, figures.capacity) == (0.25, 58_240)
    assert (figures.prefix_share, figures.prefix_tokens) == (0.75, 150)
    assert (figures.host_share, figures.host_tokens) == (0.5, 64)
    assert (figures.host_loaded_bytes, figures.host_stored_bytes) == (4096, 8192)
    assert (figures.running, figures.waiting, figures.drafts_share) == (1, 2, 0.75)


def test_engines_side_by_side_are_added_and_shares_are_their_mean(reading):
    text = re.sub('(?m)^(vllm.*)engine="0"(.*)$', r'\g<0>\n\1engine="1"\2', VLLM % 100)
    figures = reading(servers.VLLM, text).read()
    assert (figures.capacity, figures.running, figures.used_share, figures.prefix_share) == (116_480, 2, 0.25, 0.75)


def test_the_speed_needs_two_readings_and_begins_again_with_the_server(reading):
    one = reading(servers.VLLM, VLLM % 100)
    assert one.read().tokens_per_s is None
    one.server.routes["/metrics"] = VLLM % 150
    one.now += 2
    assert one.read().tokens_per_s == 25
    one.server.routes["/metrics"] = VLLM % 3
    one.now += 1
    assert one.read().tokens_per_s is None


def test_figures_of_sglang(reading):
    figures = reading(servers.SGLANG, SGLANG).read()
    assert (figures.used_share, figures.capacity) == (0.28, 441_122)
    assert (figures.prefix_share, figures.prefix_tokens, figures.host_tokens) == (0.4, 100, 30)
    assert (figures.host_share, figures.host_capacity) == (0.25, 4000)
    assert (figures.tokens_per_s, figures.drafts_share) == (86.5, 0.7)


@pytest.mark.parametrize(("kind", "prefix"), [(servers.LLAMA, "llamacpp"), (servers.KVCHAT, "kvchat")])
def test_figures_of_llama_server_and_of_kvchat(reading, kind, prefix):
    counters = {"prompt_tokens_total": 30, "prompt_tokens_cached_total": 90}
    gauges = {"requests_processing": 1, "requests_deferred": 2}
    lines = [f"# TYPE {prefix}:{name} counter\n{prefix}:{name} {value}" for name, value in counters.items()]
    lines += [f"# TYPE {prefix}:{name} gauge\n{prefix}:{name} {value}" for name, value in gauges.items()]
    one = reading(kind, "\n".join(lines) + "\n")
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
def test_figures_that_cannot_be_had_say_why(reading, kind, metrics):
    figures = reading(kind, metrics).read()
    assert figures.missing
    assert figures == ServerFigures(kind, figures.place, missing=figures.missing)


def test_a_server_that_is_gone_says_so(reading):
    one = reading(servers.VLLM, VLLM % 1)
    one.server.__exit__()
    assert one.read().missing


def test_numbers_out_of_range_are_left_out(reading):
    text = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running NaN\n"
    assert reading(servers.VLLM, text).read().running is None
