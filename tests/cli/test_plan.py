import json
from dataclasses import replace

import pytest
from support.message import lacks

from kvchat.cli.models import card_costs, plan
from kvchat.kv.memory import available
from kvchat.protocol.messages import Load

LOAD = Load("bundled", "cpu", "float32")


def test_the_plan_table_shows_what_fits(capsys):
    assert plan(replace(LOAD, mode_params={"speculative": {"budget": 256}}), 1000, as_json=False) == 0
    out = capsys.readouterr().out
    assert not lacks(out.splitlines()[0], "bundled", "LlamaForCausalLM", "float32", "cpu", "1,000 tokens")
    assert "speculative, budget 256" in out
    assert out.splitlines()[-2].endswith("kvchat -m bundled --device cpu --dtype float32 --mode full")


def test_the_json_plan_has_sizes_and_a_proposal(capsys):
    assert plan(LOAD, 1000, as_json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["weights"]["none"] == 69_232_128
    assert result["modes"]["full"]["device_bytes"] == 0, "on a CPU it reads the host pool itself"
    assert result["modes"]["speculative"]["device_bytes"] > 0
    assert result["proposal"] == {"quantize": "none", "mode": "full", "budget": None, "gave_up": [], "install": ""}


def test_the_proposal_names_the_cost_of_8_bit_pages(capsys):
    load = Load("bundled", host_dtype="int8")
    assert plan(load, 1000, as_json=False) == plan(load, 1000, as_json=True) == 0
    table, _, result = capsys.readouterr().out.partition("{")
    result = json.loads("{" + result)
    (tradeoff,) = result["proposal"]["gave_up"]
    assert not lacks(tradeoff, "K/V", "8 bits", "float32")
    assert result["given"] == {"host_dtype": "int8"}
    command, explanation = table.splitlines()[-2:]
    assert command.endswith("kvchat -m bundled --host-dtype int8 --mode full")
    assert tradeoff in explanation


def test_token_times_are_predicted_for_another_card(capsys):
    card_costs(Load("bundled"), "RTX 3060", 4000, as_json=True)
    result, *smaller = json.loads(capsys.readouterr().out)
    assert all(costs["floor_ms"] < result["floor_ms"] for costs in smaller)
    card_costs(Load("bundled"), "RTX 3060", 4000, as_json=False)
    table = capsys.readouterr().out
    assert not lacks(table.splitlines()[0], "bundled", "bfloat16", "RTX 3060")
    for way, row in result["computed_ms"].items():
        assert row["4000"] is None or row["4000"] > result["floor_ms"]
        line = next(line for line in table.splitlines() if line.startswith(f"{way} "))
        if way in result["measured"]:
            assert line.endswith(f" {result['measured'][way]:.2f}")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_plan_says_if_nothing_fits(capsys, monkeypatch, as_json):
    monkeypatch.setattr(available, "host_free", lambda: 1000)
    assert plan(LOAD, 1000, as_json) == 3
    out = capsys.readouterr().out
    assert json.loads(out)["proposal"] is None if as_json else "Nothing fits" in out
