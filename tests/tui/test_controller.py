"""The user's requests without a screen: commands to the engine, state changes, refusals."""

import asyncio

import pytest

from kvchat.config import presets
from kvchat.config.modes import mode_names
from kvchat.errors import EngineError, UsageError
from kvchat.protocol import messages
from kvchat.protocol.client import Crashed
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.protocol.messages import (
    Chat,
    Failed,
    Finished,
    Load,
    Peek,
    Prefilled,
    Rebuild,
    Rebuilt,
    Recovered,
    Stop,
    Switch,
    Switched,
    Text,
    Turn,
)
from kvchat.tui.controller import PEEK_TOKENS
from kvchat.tui.prompt import arguments
from kvchat.tui.state import Phase

DONE = Finished("eos", "hi", Stats(generated_tokens=1))


async def test_starting_loads_the_model(chat):
    await chat.controller.start()
    assert chat.client.sent == [chat.controller.models.in_use]
    assert chat.phase is Phase.LOADING
    await chat.load()
    assert chat.phase is Phase.READY


async def test_an_engine_that_cannot_start_returns_the_question(chat):
    chat.client.start_error = EngineError("The engine cannot start.")
    await chat.ask("hello")
    await chat.controller.start()
    assert chat.view.errors == [chat.client.start_error]
    assert chat.phase is Phase.DOWN
    assert (chat.view.prompt, chat.view.questions[0].removed) == ("hello", True)
    chat.client.start_error = None
    await chat.ask("hello")
    await chat.engine_ended()
    assert chat.client.starts == 2


async def test_a_lost_log_is_reported_once(chat):
    chat.client.log_problem = "A problem."
    await chat.controller.start()
    await chat.controller.restart()
    await chat.engine_ended()
    (toast,) = chat.view.toasts
    assert toast.startswith("A problem.")


async def test_a_question_after_unloading_restarts_the_engine(chat):
    await chat.load()
    await chat.ask("one")
    with pytest.raises(UsageError, match="busy"):
        await chat.controller.unload()
    await chat.controller.handle(DONE)
    await chat.controller.unload()
    await chat.engine_ended()
    assert (chat.client.is_closed, chat.phase) == (True, Phase.DOWN)
    assert "unloaded" in chat.view.notes[-1]
    await chat.ask("two")
    await chat.load()
    assert chat.turns == ["one", "hi", "two"]


async def test_the_chat_does_not_wait_for_an_engine_to_exit(chat):
    await chat.load()
    chat.client.ended.clear()
    await chat.controller.unload()
    (note,) = chat.view.notes
    assert (chat.phase, "unloaded" in note) == (Phase.DOWN, True)
    await chat.ask("one")
    await chat.controller.restart()
    await asyncio.sleep(0)
    with pytest.raises(UsageError, match="not loaded yet"):
        chat.controller.switch("streaming")
    with pytest.raises(UsageError, match="No model is loaded"):
        chat.controller.models.plan("", None)
    assert (chat.client.sent, chat.client.starts, chat.phase) == ([], 0, Phase.LOADING)
    chat.client.ended.set()
    await chat.engine_ended()
    assert {type(command) for command in chat.client.sent} == {Load}
    assert chat.view.notes == [note], "no note after the question"


async def test_a_question_is_sent_with_the_whole_conversation(chat):
    await chat.load()
    chat.controller.set_system("be brief")
    chat.controller.set_sampling("temperature", "0.2")
    await chat.ask("one")
    await chat.controller.handle(DONE)
    await chat.ask("two")
    turns = (Turn("system", "be brief"), Turn("user", "one"), Turn("assistant", "hi"), Turn("user", "two"))
    assert chat.client.sent[-1] == Chat(turns, chat.controller.state.sampling, chat.controller.state.conversation.id)
    assert chat.phase is Phase.PREFILL


async def test_stop_is_sent_only_during_an_answer(chat):
    await chat.load()
    chat.controller.stop()
    assert not chat.client.sent
    await chat.ask("one")
    chat.controller.stop()
    assert chat.client.sent[-1] == Stop()


async def test_rebuilding_needs_a_ready_engine_and_a_question(chat):
    with pytest.raises(UsageError, match="busy"):
        chat.controller.rebuild()
    await chat.load()
    with pytest.raises(UsageError, match="nothing to recompute"):
        chat.controller.rebuild()
    chat.controller.state.conversation.ask("one")
    chat.controller.rebuild()
    assert chat.client.sent == [Rebuild()]
    assert chat.phase is Phase.PREFILL
    await chat.controller.handle(Prefilled(512, 900))
    assert "512 of 900" in chat.controller.state.stage
    await chat.controller.handle(Rebuilt(900, 4.0))
    assert (chat.phase, chat.controller.state.stage) == (Phase.READY, "")


async def test_switches_are_validated_before_sending(chat):
    with pytest.raises(UsageError, match="not loaded"):
        chat.controller.switch("streaming")
    await chat.load()
    with pytest.raises(UsageError, match="no KV mode"):
        chat.controller.switch("straeming")
    with pytest.raises(UsageError, match="no parameter"):
        chat.controller.switch("streaming", {"tau": 0.5})
    assert not chat.client.sent
    chat.controller.switch("streaming", {"budget": 128})
    assert chat.client.sent == [Switch("streaming", {"budget": 128})]


async def test_mode_steps_start_from_the_last_requested_mode(chat):
    await chat.load()
    names = mode_names()
    for _ in range(3):
        chat.controller.switch_by(1)
    chat.controller.switch_by(-1)
    assert [command.mode for command in chat.client.sent] == [names[1], names[2], names[3], names[2]]
    chat.controller.state.enter_mode("full", {})
    chat.controller.switch_by(-1)
    assert chat.client.sent[-1].mode == names[-1]


async def test_deferred_parameters_go_to_the_first_matching_mode(chat):
    await chat.load()
    chat.controller.set_later("window", 96)
    with pytest.raises(UsageError):
        chat.controller.set_later("window", -1)
    chat.controller.set_later("K", 96)
    chat.controller.set_later("budget", 512)  # not for freeze, whose budget is its own
    chat.controller.switch("freeze")
    chat.controller.switch("streaming")
    chat.controller.switch("speculative")
    assert [command.params for command in chat.client.sent] == [{"K": 96}, {"window": 96, "budget": 512}, {}]


async def test_reports_of_an_ending_engine_are_ignored(chat, monkeypatch):
    await chat.load()
    chat.client.ended.clear()
    batches = [[Recovered("RR", "entropy", 3.4, 40), Rebuilt(12, 0.25)]]

    async def receive():
        return batches.pop() if batches else await asyncio.Future()

    async def handle(report):
        if isinstance(report, Recovered):
            await chat.controller.restart()
        else:
            await chat.controller._events.handle(report)

    monkeypatch.setattr(chat.client, "receive", receive, raising=False)
    monkeypatch.setattr(chat.controller, "handle", handle)
    listening = asyncio.create_task(chat.controller.listen())
    await asyncio.sleep(0.05)
    assert chat.controller.state.phase is Phase.LOADING
    listening.cancel()
    chat.client.ended.set()


async def test_a_restart_keeps_mode_parameters_and_conversation(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(DONE)
    given = {"speculative": {"tau": 0.9, "budget": 128}, "streaming": {"sigma": 8}}
    for mode, params in given.items():
        chat.controller.switch(mode, params)
        await chat.controller.handle(Switched("full", mode, params, 10, 0, 0.0, given=given))
    await chat.controller.restart()
    await chat.engine_ended()
    load = chat.client.sent[-1]
    assert isinstance(load, Load)
    assert (load.mode, load.given) == ("streaming", given)
    assert chat.turns == ["one", "hi"]
    assert chat.view.snapshots == [None]


async def test_peeking_is_limited_and_needs_a_model(chat):
    chat.controller.peek(0, 32)
    await chat.load()
    chat.controller.peek(64, 64 + 10 * PEEK_TOKENS)
    assert chat.client.sent == [Peek(64, 64 + PEEK_TOKENS)]


async def test_panels_show_nothing_of_the_previous_conversation(chat):
    snapshot = Snapshot("full", {}, 9.0, 9, 100, 1, 1, ribbon="D", attended="9")
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(DONE)
    await chat.controller.handle(snapshot)
    assert chat.view.snapshots[-1] == snapshot
    await chat.controller.new()
    await chat.controller.handle(snapshot)
    shown = chat.view.snapshots[-1]
    assert (shown.total, shown.ribbon, shown.kv_host_bytes) == (0, "", 1)


async def test_a_preset_restores_system_prompt_sampling_and_mode(chat):
    await chat.load()
    controller, state = chat.controller, chat.controller.state
    controller.set_system("You write code.")
    controller.set_sampling("temperature", "0.2")
    controller.switch("streaming", {"budget": 512})
    await controller.handle(
        Switched("full", "streaming", {"budget": 512}, 0, 0, 0.1, given={"streaming": {"budget": 512}})
    )
    controller.save_preset("coder")
    controller.set_system(None)
    controller.set_sampling("temperature", "0.9")
    controller.set_sampling("top_k", "7")
    await controller.handle(Switched("streaming", "full", {}, 0, 0, 0.1))
    controller.use_preset(presets.find("cod"))
    assert chat.client.sent[-1] == Switch("streaming", {"budget": 512})
    assert (state.conversation.system, state.sampling.temperature) == ("You write code.", 0.2)
    assert state.sampling.top_k == 0


async def test_a_preset_with_a_refused_mode_changes_nothing(chat):
    chat.controller.save_preset("coder")
    chat.controller.set_system("You write code.")
    with pytest.raises(UsageError):  # no model is loaded yet
        chat.controller.use_preset(presets.find("cod"))
    assert chat.controller.state.conversation.system == "You write code."


FULL_BY_AUTO = "auto: full, 12 ms a token"


async def test_auto_receives_parameters_of_later_modes_at_once(chat):
    await chat.load(auto=FULL_BY_AUTO)
    chat.controller.set_parameter("budget", 512)
    chat.controller.set_for_mode("speculative", "window", 64)
    chat.controller.set_for_mode("full", "recovery", True)
    chat.controller.set_later("sink", 8)
    assert chat.client.sent == [
        Switch("auto", {"budget": 512}),
        Switch("auto", {"speculative": {"window": 64}}),
        Switch("auto", {"full": {"recovery": True}}),
        Switch("auto", {"speculative": {"sink": 8}}),
    ]
    state = chat.controller.state
    assert (state.later, state.awaiting) == ({}, {})
    assert state.pending["speculative"] == {"window": 64, "sink": 8}
    chat.controller.set_for_mode("streaming", "sigma", 8)  # auto never enters streaming
    assert state.awaiting == {"streaming": {"sigma": 8}}
    with pytest.raises(UsageError):
        chat.controller.set_for_mode("speculative", "window", -1)


async def test_deferred_parameters_are_sent_with_auto(chat):
    await chat.load()
    chat.controller.set_for_mode("speculative", "window", 64)
    chat.controller.switch("auto", {"tokens_per_s": 5})
    assert chat.client.sent == [Switch("auto", {"tokens_per_s": 5, "speculative": {"window": 64}})]


async def test_auto_gives_deferred_parameters_to_each_accepting_mode(chat):
    await chat.load()
    for name, value in (("profile", "paper"), ("sink", 8), ("mem", 0.7), ("budget", 512), ("window", 64)):
        chat.controller.set_later(name, value)
    chat.controller.switch("auto", {"speculative": {"window": 96}})
    expected = {
        "budget": 512,
        "speculative": {"profile": "paper", "sink": 8, "window": 96},
        "sync": {"profile": "paper", "mem": 0.7},
    }
    (sent,) = chat.client.sent
    assert (sent.mode, sent.params) == ("auto", expected)
    assert (chat.controller.state.later, chat.controller.state.awaiting) == ({}, {})


async def test_an_auto_preset_keeps_shared_and_mode_parameters(chat):
    await chat.load(auto=FULL_BY_AUTO)
    given = {"speculative": {"budget": 512, "window": 64}, "auto": {"recovery": True}}
    shared, own = {"budget": 512, "recovery": True}, {"speculative": {"window": 64}}
    await chat.controller.handle(Switched("full", "full", {}, 0, 0, 0.1, given=given, auto=FULL_BY_AUTO))
    assert chat.controller.state.conversation.params == shared | own
    chat.controller.save_preset("wide")
    await chat.controller.handle(Switched("full", "full", {}, 0, 0, 0.1))
    chat.controller.use_preset(presets.find("wide"))
    assert chat.client.sent == [Switch("auto", shared), Switch("auto", own)]


async def test_set_in_auto_changes_auto_or_its_mode(chat):
    await chat.load(auto=FULL_BY_AUTO)
    set_parameter = chat.controller.set_parameter
    assert "tokens_per_s" in chat.controller.state.parameters
    assert arguments.in_words(chat.controller.state, "tokens_per_s") == "10.0"
    set_parameter("tokens_per_s", 5)
    set_parameter("draft", "lookup")
    assert chat.client.sent == [Switch("auto", {"tokens_per_s": 5}), Switch("", {"draft": "lookup"})]


# ---- After memory ran out: commands that need less


@pytest.mark.parametrize(
    ("mode", "budget", "text", "offered"),
    [
        ("speculative", 512, "so far", [("/budget 256", "/continue"), ("/mode streaming", "/continue"), ("/unload",)]),
        ("streaming", 512, "", [("/budget 256",), ("/unload",)]),
        ("full", None, "so far", [("/mode streaming", "/continue"), ("/unload",)]),
        ("speculative", 1, "", [("/mode streaming",), ("/unload",)]),
    ],
)
async def test_out_of_memory_offers_commands_that_need_less(chat, mode, budget, text, offered):
    await chat.load(mode=mode, params={} if budget is None else {"budget": budget})
    await chat.ask("hello")
    if text:
        await chat.controller.handle(Text(text, 1))
    await chat.controller.handle(Failed("Memory ran out while decoding.", kind="OutOfMemoryError"))
    assert chat.view.remedies == offered


@pytest.mark.parametrize(
    ("crashed", "is_suspected"),
    [
        (Crashed(-9, ()), True),  # killed by the system
        (Crashed(-6, ("memory allocation of 557072 bytes failed", "Fatal Python error: Aborted")), True),
        (Crashed(-11, ("Fatal Python error: Segmentation fault",)), False),
    ],
)
async def test_a_likely_out_of_memory_crash_offers_commands(chat, crashed, is_suspected):
    await chat.load(mode="speculative", params={"budget": 512})
    await chat.ask("hello")
    await chat.controller.handle(Text("so far", 1))
    await chat.controller.handle(crashed)
    offered = [("/budget 256", "/continue"), ("/mode streaming", "/continue"), ("/unload",)]
    assert ("Memory" in chat.view.errors[0].detail) == is_suspected
    assert chat.view.remedies == (offered if is_suspected else [])


async def test_an_earlier_answer_is_not_offered_to_be_resumed(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Text("first", 1))
    await chat.controller.handle(messages.Finished("eos", "first", Stats()))
    await chat.ask("two")
    await chat.controller.handle(Failed("Memory ran out while reading the prompt.", kind="OutOfMemoryError"))
    assert chat.view.remedies == [("/mode streaming",), ("/unload",)]
    assert chat.turns == ["one", "first"]


@pytest.mark.parametrize(("kind", "offered"), [("DoesNotFitError", []), ("ContextFullError", [("/mode streaming",)])])
async def test_a_full_context_offers_a_mode_without_limit(chat, kind, offered):
    await chat.load(mode="speculative", params={"budget": 512})
    await chat.ask("hello")
    await chat.controller.handle(Failed("The prompt is too long.", kind=kind))
    assert chat.view.remedies == offered


async def test_forcing_a_too_large_model_is_offered_once(chat, tmp_path):
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
