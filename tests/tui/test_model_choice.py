"""Changing the model: choosing, loading, refusing, stopping, downloading and planning."""

import asyncio
import re
import shlex
import sys
from dataclasses import replace

import pytest
from support.app_driver import wait_for
from support.message import lacks

from kvchat import paths
from kvchat.errors import EngineError, UsageError
from kvchat.models import catalog
from kvchat.protocol.figures import MemoryPlan, ModeNeed, Planned, Proposal, Snapshot, StoredNeed
from kvchat.protocol.messages import Failed, Load, Loading, Plan, SetTemplateArgs, Stop
from kvchat.tui.commands import chat as chat_module
from kvchat.tui.models import PLANNED, plan_lines
from kvchat.tui.state import Phase

PLAN = MemoryPlan(
    "bundled", "Fake", "cpu", "float32", 4096, {"none": 2**20}, {"full": ModeNeed(2**21, {})}, 0, 8, 2**21, 0, 99, 99,
    proposal=Proposal("none", "full", None, ()),
)  # fmt: skip
FAILED = Failed("Too big.", kind="DoesNotFitError")


@pytest.fixture
def all_local(monkeypatch):
    """Pretend that every model is on this machine."""
    monkeypatch.setattr(catalog, "is_here", lambda name: True)


async def choose(chat, line):
    await chat_module.choose(chat.controller, line)


async def test_a_new_model_keeps_the_current_mode(chat, all_local):
    await chat.load()
    chat.controller.state.enter_mode("streaming", {})
    await choose(chat, "./other quantize=int8")
    assert chat.client.sent == [Load("./other", mode="streaming", quantize="int8")]
    assert chat.phase is Phase.LOADING
    chat.controller.state.is_stored = True
    await chat.load(model="other", mode="streaming", notes=("read this",))
    assert (chat.phase, chat.controller.state.is_stored, chat.view.notes) == (Phase.READY, False, ["read this"])
    assert chat.controller.models.in_use.model == "./other"
    await chat.controller.restart()
    await chat.engine_ended()
    assert chat.client.sent[-1].model == "./other"


async def test_a_used_model_folder_is_listed(chat, all_local, monkeypatch):
    folder, listed = str(paths.bundled_model_dir()), []

    async def show_models(find):
        listed.extend(await find())

    monkeypatch.setattr(chat.view, "show_models", show_models)
    monkeypatch.setattr(catalog, "find", lambda folders: [])
    await chat.load()
    for name in (folder, "bundled"):
        await choose(chat, name)
        await chat.load(model=name)
    await chat.controller.models.show_all()
    assert [model.name for model in listed] == [folder]


async def test_model_settings_are_accepted_as_options(chat, all_local):
    await chat.load()
    await choose(chat, "./other dtype=bfloat16 device=cpu fast=false")
    assert chat.client.sent == [Load("./other", "cpu", "bfloat16", fast=False)]
    chat.controller.state.enter_phase(Phase.READY)
    with pytest.raises(UsageError, match='"folders"'):
        await choose(chat, "./other folders=there")


async def test_a_failed_load_keeps_the_old_model(chat, all_local):
    await chat.load()
    await choose(chat, "other")
    await chat.controller.handle(FAILED)
    assert [error.title for error in chat.view.errors] == ["Too big."]
    assert chat.phase is Phase.LOADING, "the old model reports itself next"
    await chat.load(notes=("said before",))
    assert (chat.phase, chat.view.notes) == (Phase.READY, [])
    assert chat.controller.models.in_use.model == "bundled"


async def test_losing_both_models_leaves_the_engine_down(chat, all_local):
    await chat.load()
    await choose(chat, "other")
    await chat.controller.handle(FAILED)
    await chat.controller.handle(replace(FAILED, fatal=True))
    assert chat.phase is Phase.DOWN
    await choose(chat, "third")
    await chat.engine_ended()
    assert (chat.client.starts, chat.client.sent[-1].model) == (1, "third")


@pytest.mark.parametrize("line", ["other quantise=int8", "other dtype=float17", "other mode=full", '"'])
async def test_invalid_options_are_rejected_before_unloading(chat, all_local, line):
    await chat.load()
    with pytest.raises(UsageError):
        await choose(chat, line)
    assert chat.client.sent == []


async def test_no_name_opens_the_model_list(chat):
    await choose(chat, "")
    assert chat.view.are_models_shown


async def test_changing_the_model_during_an_answer_is_refused(chat, all_local):
    await chat.load()
    await chat.ask("one")
    with pytest.raises(UsageError, match="answer"):
        await choose(chat, "other")


async def test_a_second_stop_of_a_load_restarts_the_engine(chat, all_local):
    await chat.load()
    await choose(chat, "other")
    with pytest.raises(UsageError, match="is being loaded"):
        await choose(chat, "third")
    await chat.controller.stop_work()
    assert chat.client.sent[-1] == Stop()
    await chat.controller.handle(Loading("still reading"))
    await chat.controller.stop_work()
    await chat.engine_ended()
    assert (chat.client.starts, chat.client.sent[-1].model) == (1, "bundled")


async def test_the_first_load_needs_two_stops(chat):
    await chat.controller.start()
    await chat.controller.stop_work()
    assert Stop() not in chat.client.sent
    await chat.controller.stop_work()
    assert chat.client.sent[-1] == Stop()


async def test_a_plan_compares_estimates_with_measurements(chat):
    await chat.load()
    await chat_module.plan(chat.controller, "")
    await chat_module.plan(chat.controller, "org/other context=1000")
    assert chat.client.sent == [Plan(Load()), Plan(Load("org/other"), 1000)]
    chat.controller.state.is_stored = True
    held = {"state_bytes": 2**18, "snapshot_bytes": 2**19}
    await chat.controller.handle(Snapshot("sync", {}, 7, 7, 4096, 2**20, 2**21, 2**20 + 2**19, **held))
    in_use = StoredNeed("sync", 6, 2**20 - 2**18, 2**21, 128, 256)
    await chat.controller.handle(Planned("bundled", replace(PLAN, state=2**18, stored=in_use)))
    [table] = chat.view.notes
    assert re.search(r"weights, not quantized +RAM +1.00 MiB +1.50 MiB\n", table)
    assert re.search(r"recurrent state +RAM +256 KiB +256 KiB\n", table)
    assert re.search(r"6 tokens now +planned +measured\n", table)
    assert re.search(r"K/V read, sync, up to 128 +RAM +768 KiB +768 KiB\n", table)
    assert re.search(r"K/V stored, up to 256 +RAM +2.00 MiB +1.50 MiB\n", table)
    assert "kvchat -m bundled --mode full\n" in table
    await chat.controller.handle(Planned("org/other", None, "The reason."))
    assert not lacks(chat.view.errors[0], "org/other", "The reason.")
    for wrong in ("bundled context=no", "bundled tokens=1"):
        with pytest.raises(UsageError):
            await chat_module.plan(chat.controller, wrong)


async def test_planning_ends_with_a_result_or_the_engine(chat):
    await chat.load()
    working = chat.controller.models
    for end in (lambda: chat.controller.handle(Planned("bundled", None, "No.")), chat.controller.answers.down):
        assert not working.is_working
        await chat_module.plan(chat.controller, "")
        assert working.is_working
        await end()
    assert not working.is_working
    await chat.controller.start()
    assert not working.is_working


# ---- Downloads


@pytest.fixture
def config(config):
    """A fake download; the model's name decides which JSON lines it writes and whether it then waits."""
    code = """
import json, sys, time
name = sys.argv[1].partition("/")[2]
good, gated = [{"stage": "1 of 2"}, {"done": ""}], [{"error": ["g is gated.", "", ""]}]
for said in {"good": good, "gated": gated}.get(name, [{"stage": "\x1b 1 of 9"}]):
    print(json.dumps(said), flush=True)
time.sleep(60 if name == "slow" else 0)
"""
    return replace(config, download_command=(sys.executable, "-c", code))


async def test_a_missing_model_is_downloaded_then_loaded(chat):
    await chat.load()
    await choose(chat, "org/good")
    await chat.ask("one")
    await wait_for(lambda: not chat.controller.models.download._process)
    assert chat.phase is Phase.PREFILL
    chat.controller.state.enter_phase(Phase.READY)
    await wait_for(lambda: chat.phase is Phase.LOADING)
    assert chat.client.sent[-1].model == "org/good"
    assert chat.controller.state.download == ""


@pytest.mark.parametrize(("name", "reason"), [("gated", "g is gated."), ("dead", "org/dead")])
async def test_a_failed_download_reports_the_reason(chat, name, reason):
    await chat.load()
    await choose(chat, f"org/{name}")
    await wait_for(lambda: chat.view.errors)
    assert reason in chat.view.errors[0].title
    assert chat.phase is Phase.READY


async def test_a_stopped_download_can_be_restarted(chat):
    await chat.load()
    await choose(chat, "org/slow")
    await wait_for(lambda: chat.controller.state.download == "␛ 1 of 9")
    with pytest.raises(UsageError, match="downloaded"):
        await choose(chat, "org/good")
    await chat.controller.stop_work()
    await wait_for(lambda: not chat.controller.state.download)
    (toast,) = chat.view.toasts
    assert "/model org/slow" in toast
    await choose(chat, "org/good")
    await wait_for(lambda: chat.phase is Phase.LOADING)


async def test_a_download_can_be_stopped_before_its_process_starts(chat):
    await chat.load()
    await choose(chat, "org/slow")
    await asyncio.sleep(0)
    assert "org/slow" in chat.controller.state.download
    assert chat.controller.models.download._process is None
    await chat.controller.stop_work()
    await wait_for(lambda: not chat.controller.state.download)
    (toast,) = chat.view.toasts
    assert "/model org/slow" in toast


async def test_a_download_that_cannot_start_is_an_error(chat):
    chat.controller.models.download._command = ("/not/there",)
    with pytest.raises(EngineError, match="cannot be started"):
        await chat.controller.models.download.run("org/good", print)


def sent_args(chat):
    return [one.args for one in chat.client.sent if isinstance(one, SetTemplateArgs)]


@pytest.mark.parametrize(
    ("known", "line", "args"),
    [
        (("enable_thinking",), "on", ("enable_thinking=true",)),
        (("enable_thinking",), "off", ("enable_thinking=false",)),
        (("reasoning_effort", "thinking"), "off", ("thinking=false",)),
        (("reasoning_effort",), "low", ("reasoning_effort=low",)),
        (("enable_thinking",), "auto", ()),
    ],
)
async def test_think_sets_the_templates_own_variable(chat, known, line, args):
    await chat.load(template_variables=known)
    await chat_module.template(chat.controller, "other=1")
    await chat_module.think(chat.controller, line)
    assert sent_args(chat) == [("other=1",), ("other=1", *args)]
    assert chat.controller.models.in_use.template_args == ("other=1", *args), "a restart keeps them"


@pytest.mark.parametrize(("known", "line"), [((), "on"), (("reasoning_effort",), "off"), (("thinking",), "high")])
async def test_think_without_a_template_variable_is_refused(chat, known, line):
    await chat.load(template_variables=known)
    with pytest.raises(UsageError, match="no effect"):
        await chat_module.think(chat.controller, line)
    assert sent_args(chat) == []


async def test_template_sets_variables_or_reloads_the_model(chat, tmp_path):
    await chat.load(template_variables=("a",))
    for line in ("a=1 b=two", "a=", "b=3"):
        await chat_module.template(chat.controller, line)
    assert sent_args(chat) == [("a=1", "b=two"), ("b=two",), ("b=3",)]
    await chat_module.template(chat.controller, "")
    assert "b=3" in chat.view.notes[-1]
    file = tmp_path / "own.jinja"
    await chat_module.template(chat.controller, str(file))
    assert (chat.client.sent[-1].chat_template, chat.client.sent[-1].template_args) == (str(file), ("b=3",))
    for wrong in ("two files", "no-name=1", "messages=1"):
        with pytest.raises(UsageError):
            await chat_module.template(chat.controller, wrong)
    assert chat.controller.models.in_use.template_args == ("b=3",), "a restart would fail"


# ---- The text of a plan


CUDA_PLAN = MemoryPlan(
    "org/model", "qwen3", "cuda:0", "bfloat16", 4096, {"none": 2**30}, {"full": ModeNeed(2**20, {}, "", 2**10)},
    1, 2**20, 2**20, 1, 2**30, 2**30, unpacked=2**30, proposal=Proposal("none", "full", None, ()),
)  # fmt: skip


def test_every_plan_row_is_explained():
    table = "\n".join(plan_lines(CUDA_PLAN, {"stored": 1})).split("\n\n")[1]
    heading, *rows = (line.strip() for line in table.split("\n"))
    assert heading.split()[-1] in PLANNED
    assert [row for row in rows if not row.startswith(tuple(PLANNED))] == []
    assert [word for word in PLANNED if not any(row.startswith(word) for row in (*rows, "measured"))] == []


def test_proposed_commands_quote_paths_and_keep_options():
    plan = replace(CUDA_PLAN, model="/my models/it's", given={"dtype": "float16", "host_dtype": "int8"})
    start = ["kvchat", "-m", plan.model, "--dtype", "float16", "--host-dtype", "int8"]
    *_, proposed, _ = plan_lines(plan)
    assert shlex.split(proposed) == [*start, "--mode", "full"]
    *_, unquantized, _ = plan_lines(replace(plan, given=plan.given | {"quantize": "int8"}))
    assert shlex.split(unquantized) == [*start, "--mode", "full", "--quantize", "none"]
    *_, anyway = plan_lines(replace(plan, proposal=None))
    assert shlex.split(anyway)[: len(start) + 1] == [*start, "--force"]
