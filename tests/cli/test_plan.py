from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvchat.cli.models import plan
from kvchat.kv.memory import available
from kvchat.protocol.messages import Load

ASKED = Load("bundled", "cpu", "float32")


def test_the_table_names_what_fits(capsys):
    assert plan(replace(ASKED, mode_params={"speculative": {"budget": 256}}), 1000, as_json=False) == 0
    out = capsys.readouterr().out
    assert "bundled (LlamaForCausalLM) in float32 on cpu, 1,000 tokens" in out
    assert "K/V read, speculative, budget 256" in out
    assert out.endswith("kvchat -m bundled --device cpu --dtype float32 --mode full\n  gives up nothing\n")


def test_json(capsys):
    assert plan(ASKED, 1000, as_json=True) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["weights"]["none"] == 69_232_384
    assert made["modes"]["full"]["device_bytes"] == 0, "on a CPU it reads the host pool itself"
    assert made["modes"]["speculative"]["device_bytes"] > 0
    assert made["proposal"] == {"quantize": "none", "mode": "full", "budget": None, "gave_up": [], "install": ""}


def test_the_proposed_command_is_what_was_planned_and_8_bit_pages_are_given_up(capsys):
    asked, lost = Load("bundled", host_dtype="int8"), "full pages are stored in 8 bits instead of float32, nearly exact"
    assert plan(asked, 1000, as_json=False) == plan(asked, 1000, as_json=True) == 0
    table, _, made = capsys.readouterr().out.partition("{")
    assert table.endswith(f"kvchat -m bundled --host-dtype int8 --mode full\n  gives up precision of the K/V: {lost}\n")
    made = json.loads("{" + made)
    assert (made["given"], made["proposal"]["gave_up"]) == ({"host_dtype": "int8"}, [f"precision of the K/V: {lost}"])


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_fits(capsys, monkeypatch, as_json):
    monkeypatch.setattr(available, "host_free", lambda: 1000)
    assert plan(ASKED, 1000, as_json) == 3
    out = capsys.readouterr().out
    assert json.loads(out)["proposal"] is None if as_json else "Nothing fits" in out
