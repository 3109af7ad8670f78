"""Panel rows are complete, omit unknown values and are explained."""

from dataclasses import replace

import pytest

from kvchat.config.modes import registered
from kvchat.protocol.figures import Gpu, Price, ServerFigures, Snapshot
from kvchat.remote.metrics import NONE, UNAVAILABLE
from kvchat.tui.panel_rows import (
    EVENTS,
    EXPLANATIONS,
    FETCH_TIMES,
    FIGURES,
    GPU_HISTORY,
    HELD_BY_HEAD,
    READ_BY_HEAD,
    READ_OF_STORED,
    Rows,
    blocks,
    context_rows,
    explain,
    extra_rows,
    gpu_rows,
    memory_rows,
    mode_rows,
    plain_rows,
    recall_rows,
)
from kvchat.tui.widgets.charts import labeled

OF_EVERY_MODE = {"pinned", "recurrent state", "recovery"}  # the engine adds these to the mode's own figures
WIDTH = 32  # cells of a line in the panel, next to a scrollbar
DETAILS = {READ_BY_HEAD, HELD_BY_HEAD, FETCH_TIMES, GPU_HISTORY, READ_OF_STORED, EVENTS}


def snapshot(**changes: object) -> Snapshot:
    defaults = {"mode": "full", "params": {}, "active": 0.0, "total": 0, "context": 0, "kv_device_bytes": 0}
    return Snapshot(**{**defaults, "kv_host_bytes": 0, **changes})


def as_dict(rows: Rows) -> dict[str, str]:
    return dict(rows)


def test_mode_rows_show_the_budget_and_switch_costs():
    prices = (Price("freeze", 2**20, seconds=0.004), Price("sync", 2**30))
    shown = snapshot(params={"budget": None, "resident": None, "recovery": False}, prices=prices)
    assert mode_rows(shown) == [
        ("parameters", "in /settings"),
        ("next mode", "freeze"),
        ("to switch", "moves 1.0 MiB · 4 ms"),
    ]
    assert as_dict(mode_rows(snapshot(params={"budget": 1024})))["budget"] == "1,024 tokens a head"
    for price, text in ((Price("freeze", seconds=0.004), "moves nothing"), (Price("freeze", refusal="x"), "refused")):
        assert as_dict(mode_rows(snapshot(prices=(price,))))["to switch"] == text


def test_context_rows_show_reads_coverage_and_reduced_tokens():
    shown = snapshot(active=512.0, total=2048, context=16384, reduced_tokens=120, kv_device_bytes=2**20)
    rows = as_dict(context_rows(shown))
    assert rows["reads"] == "512 of 2,048 · 25 %"
    assert rows["copied to read"] == "1.0 MiB"
    assert rows["fetched per token"] == "nothing"
    assert rows["context used"] == "12 % of 16,384"
    assert rows["reduced context"] == "120 tok"
    assert "over the budget" not in rows
    assert "attention covered" not in rows, "everything was read"
    assert as_dict(context_rows(replace(shown, coverage=0.968)))["attention covered"] == "97 %"
    assert context_rows(snapshot()) == [("reads", "nothing stored yet")]


def test_savings_are_relative_to_full_mode():
    prices = (Price("freeze", 1, 5 * 2**30), Price("full", 2**30, 2 * 2**30))
    shown = snapshot(total=2048, kv_device_bytes=2**29, gpu=Gpu("H200"), prices=prices)
    assert as_dict(context_rows(shown))["less than full"] == "1.5 GiB"
    refused = Price("full", 2**30, 2 * 2**30, refusal="no room")
    for other in ({"gpu": None}, {"prices": ()}, {"prices": (refused,)}, {"kv_device_bytes": 2**32}):
        assert "less than full" not in as_dict(context_rows(replace(shown, **other)))


def test_the_fetch_rate_is_a_share_of_link_bandwidth():
    shown = snapshot(recall_bytes_per_s=2.04e9)
    assert as_dict(recall_rows(shown))["fetch rate"] == "2.0 GB/s"
    assert as_dict(recall_rows(shown, 20e9))["fetch rate"] == "2.0 GB/s · 10 %"
    assert "fetch rate" not in as_dict(recall_rows(snapshot(step_bytes=2**20), 20e9))


def test_tokens_over_the_budget_have_their_own_row():
    rows = as_dict(context_rows(snapshot(params={"budget": 512}, active=1737.0, total=10439, gpu=Gpu("H200"))))
    assert rows["over the budget"] == "1,225 tok"
    assert "on the device" in rows
    fetching = snapshot(total=1, step_bytes=2**20, recall_ms_p50=6.0)
    assert as_dict(context_rows(fetching))["fetched per token"] == "1.0 MiB · 6.0 ms"


def test_unknown_values_have_no_row():
    assert recall_rows(snapshot()) == [("total", "nothing yet")]
    assert "time p50 / p95" not in as_dict(recall_rows(snapshot(recalled_bytes=2**20, recall_hit_rate=0.5)))
    assert "this process" not in as_dict(memory_rows(snapshot()))
    allocated = as_dict(memory_rows(snapshot(torch_allocated=2**30, torch_reserved=2**31)))
    assert (allocated["GPU"], allocated["torch"]) == ("not read: no NVML", "1.0 GiB of 2.0 GiB")
    assert "torch" not in as_dict(memory_rows(snapshot(gpu=Gpu("H200"))))
    assert gpu_rows(Gpu("H200")) == [("GPU", "H200")]
    assert as_dict(gpu_rows(Gpu("H200", utilization=45.0, power=90.0)))["load"] == "45 % · 90 W"


def test_memory_rows_say_there_is_no_gpu():
    rows = as_dict(memory_rows(snapshot(process_bytes=2**30)))
    assert "no GPU" in rows
    assert rows["this process"] == "1.0 GiB"
    assert "torch" not in rows


def test_every_label_is_explained():
    full = snapshot(
        params={"budget": 1}, active=9.0, total=9, context=9, reduced_tokens=1, corrections=1, exposed_ms_p95=1.0,
        recall_hit_rate=0.5, process_bytes=1, torch_allocated=1, torch_reserved=1,
        recall_ms_p95=2.0, recall_bytes_per_s=1e9, gpu=Gpu("H200", used=1, process=1, power=1.0), kv_parked_bytes=1,
        coverage=0.9, prices=(Price("freeze"), Price("full", 1, 1)),
    )  # fmt: skip
    shown = [plain_rows(full), context_rows(full), context_rows(snapshot(total=1)), mode_rows(full), recall_rows(full)]
    server = ServerFigures("vLLM", "h:1", 9, 3, 1.0, 99, 0.5, 0.5, 7, 99, 0.5, 7, 7, 7, 1.0, 1, 0, 0.5, "why")
    served = replace(full, server=server)
    shown += [plain_rows(served), *(rows for _, rows in blocks(served).values())]
    labels = {label for rows in (*shown, memory_rows(full), memory_rows(snapshot())) for label, _ in rows}
    assert labels | DETAILS | OF_EVERY_MODE == set(EXPLANATIONS)
    assert sum(map(len, FIGURES.values())) == len(EXPLANATIONS)


def test_server_chats_show_only_the_servers_figures():
    nothing = snapshot(server=ServerFigures("Ollama", "h:1", missing="the server has no metrics"))
    shown = blocks(nothing)
    assert shown["memory"] == ("memory", [])
    assert shown["recall"][1] == [("others", "the server has no metrics")]
    other = ServerFigures("vLLM", "h:1", prompt_tokens=9, reused_tokens=3, prompt_tokens_per_s=5.0)
    assert blocks(snapshot(server=other))["context"][1] == [("context used", "0 tok")]  # of another conversation
    some = ServerFigures("vLLM", "h:1", capacity=65_536, used_share=0.12, prefix_share=0.75, running=1)
    assert blocks(snapshot(server=some))["recall"][1] == [
        ("server's K/V", "12 % of 65,536 tok"),
        ("server's hits", "75 %"),
        ("server's queue", "1 now, 0 waiting"),
    ]


@pytest.mark.parametrize("missing", [NONE, *UNAVAILABLE.values()])
def test_the_reason_for_missing_server_figures_fits(missing):
    ((label, value),) = blocks(snapshot(server=ServerFigures("a", "h:1", missing=missing)))["recall"][1]
    assert missing in labeled(label, value, WIDTH).plain


def test_modes_explain_their_own_figures():
    assert explain("mean timer", "freeze") == registered()["freeze"].figures["mean timer"]
    assert explain("reads", "freeze") == EXPLANATIONS["reads"]
    assert explain("mean timer", "full") == explain("mean timer", "gone") == ""


def test_extra_figures_become_rows():
    assert extra_rows({"pages a step": 1.5, "calm": True}) == [("pages a step", "1.5"), ("calm", "yes")]
