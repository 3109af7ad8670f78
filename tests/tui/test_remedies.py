"""Where memory ran out commands are offered that take less of it."""

from __future__ import annotations

import pytest

from kvchat.protocol import messages
from kvchat.protocol.client import Crashed
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import (
    Failed,
    Text,
)


@pytest.mark.parametrize(
    ("mode", "budget", "said", "offered"),
    [
        ("speculative", 512, "so far", [("/budget 256", "/continue"), ("/mode streaming", "/continue"), ("/unload",)]),
        ("streaming", 512, "", [("/budget 256",), ("/unload",)]),
        ("full", None, "so far", [("/mode streaming", "/continue"), ("/unload",)]),
        ("speculative", 1, "", [("/mode streaming",), ("/unload",)]),
    ],
)
async def test_where_memory_ran_out_commands_are_offered(chat, mode, budget, said, offered):
    await chat.load(mode=mode, params={} if budget is None else {"budget": budget})
    await chat.ask("hello")
    if said:
        await chat.controller.handle(Text(said, 1))
    await chat.controller.handle(Failed("Memory ran out while decoding.", kind="OutOfMemoryError"))
    assert chat.view.remedies == offered


@pytest.mark.parametrize(
    ("crashed", "is_told"),
    [
        (Crashed(-9, ()), True),  # by the system
        (Crashed(-6, ("memory allocation of 557072 bytes failed", "Fatal Python error: Aborted")), True),
        (Crashed(-11, ("Fatal Python error: Segmentation fault",)), False),
    ],
)
async def test_where_memory_may_have_ended_the_engine_commands_are_offered(chat, crashed, is_told):
    await chat.load(mode="speculative", params={"budget": 512})
    await chat.ask("hello")
    await chat.controller.handle(Text("so far", 1))
    await chat.controller.handle(crashed)
    offered = [("/budget 256", "/continue"), ("/mode streaming", "/continue"), ("/unload",)]
    assert ("Memory" in chat.view.errors[0].detail) == is_told
    assert chat.view.remedies == (offered if is_told else [])


async def test_an_answer_before_the_question_given_back_is_not_gone_on_with(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Text("first", 1))
    await chat.controller.handle(messages.Finished("eos", "first", Stats()))
    await chat.ask("two")
    await chat.controller.handle(Failed("Memory ran out while reading the prompt.", kind="OutOfMemoryError"))
    assert chat.view.remedies == [("/mode streaming",), ("/unload",)]
    assert chat.turns == ["one", "first"]


async def test_where_something_else_failed_nothing_is_offered(chat):
    await chat.load(mode="speculative", params={"budget": 512})
    await chat.ask("hello")
    await chat.controller.handle(Failed("The prompt is too long.", kind="DoesNotFitError"))
    assert chat.view.remedies == []


async def test_a_model_that_does_not_fit_is_offered_to_be_loaded_anyway_once(chat, tmp_path):
    await chat.load()
    too_large = Failed("It does not fit.", kind="DoesNotFitError")
    await chat.controller.models.choose(str(tmp_path), {"quantize": "int8"})
    await chat.controller.handle(too_large)
    assert chat.view.remedies == [(f"/model {tmp_path} quantize=int8 force=true",)]
    await chat.load()  # the model in use stays
    await chat.controller.models.choose(str(tmp_path), {"quantize": "int8", "force": "true"})
    assert chat.client.sent[-1].force
    await chat.controller.handle(too_large)
    assert chat.view.remedies == []
