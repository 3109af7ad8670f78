from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvchat.cli.plan import plan
from kvchat.kv.memory import available
from kvchat.protocol.messages import Load

ASKED = Load("bundled", "cpu", "float32")


def test_the_table_names_what_fits(capsys):
    assert plan(replace(ASKED, mode_params={"speculative": {"budget": 256}}), 1000, as_json=False) == 0
    out = capsys.readouterr().out
    assert "bundled (LlamaForCausalLM) in float32 on cpu, 1,000 tokens" in out
    assert "K/V read, speculative, budget 256" in out
    assert out.endswith("kvchat -m bundled --mode full\n  gives up nothing\n")


def test_json(capsys):
    assert plan(ASKED, 1000, as_json=True) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["weights"]["none"] == 69_232_384
    assert made["modes"]["full"]["device_bytes"] == 0, "on a CPU it reads the host pool itself"
    assert made["modes"]["speculative"]["device_bytes"] > 0
    assert made["proposal"] == {"quantize": "none", "mode": "full", "budget": None, "gave_up": [], "install": ""}


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_fits(capsys, monkeypatch, as_json):
    monkeypatch.setattr(available, "host_free", lambda: 1000)
    assert plan(ASKED, 1000, as_json) == 3
    out = capsys.readouterr().out
    assert json.loads(out)["proposal"] is None if as_json else "Nothing fits" in out
