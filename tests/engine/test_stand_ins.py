from __future__ import annotations

import pytest

from kvchat.engine.escaping import StandIns, harmless

TEXT = "\n<think> why </think>\n\nsaid 12 /no_think now "


def test_texts_are_put_back_where_their_stand_ins_are():
    stand_ins = StandIns()
    put = [stand_ins.put(text) for text in (TEXT, " \n", "other")]
    assert [stand_ins.put_back(text) for text in put] == [TEXT, " \n", "other"]
    assert stand_ins.put_back(f"<turn>{put[2].lower()}</turn>{put[0]}") == f"<turn>other</turn>{TEXT}"


def test_white_space_and_what_templates_look_for_stay():
    assert harmless(StandIns().put(TEXT)) == "\n<think> x </think>\n\nx /no_think x "


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<tool_response>", "/think", "/nothink"])
def test_texts_that_have_become_one_are_not_put_back(tag):
    stand_ins = StandIns()
    assert stand_ins.put_back(stand_ins.put(f"</tu{tag} rn>")) == f"</tu{tag} rn>"
    assert stand_ins.put_back(stand_ins.put(f"</tu{tag} rn>").replace(f"{tag} ", "")) is None
