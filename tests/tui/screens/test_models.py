"""The list of models, driven by keys."""

import threading
import time
from dataclasses import replace

import pytest
from support.app_driver import choices, is_finished, is_open, press
from support.patience import PATIENCE_S
from support.weights import linears
from textual.widgets import OptionList

from kvchat.models.catalog import FoundModel, Room
from kvchat.tui.screens import choosing
from kvchat.tui.screens.choosing import ModelsScreen, describe_model, typed_model
from kvchat.tui.widgets.welcome import EXAMPLES, Welcome

GiB = 2**30
HERE = FoundModel("bundled", "bundled", linears(2**24))
OTHER = FoundModel("org/other", "hub", linears(2**24))


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(choosing.catalog, "find", lambda folders: [HERE, OTHER])
    monkeypatch.setattr(choosing.catalog, "is_here", lambda name: True)
    monkeypatch.setattr(choosing, "room", lambda device, released: Room("cpu", 8 * GiB))


def shown(app):
    return is_open(app, ModelsScreen) and app.screen.query(OptionList) and len(choices(app)) == 2


async def test_a_model_is_found_planned_and_loaded(running, machine):
    async with running(size=(80, 24)) as (app, _pilot, until):
        await app.chat.run_command("/model")
        await until(lambda: shown(app))
        press(app, "escape")
        await until(lambda: app.screen is app.chat)
        press(app, "ctrl+o")
        await until(lambda: shown(app))
        assert choices(app)[0].startswith("● bundled ")
        row = " ".join(choices(app)[1].split())
        assert row == "org/other hub 32.0 MiB bfloat16 ✓ fits, takes 64.0 MiB"
        planned = []
        app.controller.models.plan = lambda name, context: planned.append(name)
        press(app, "down", "ctrl+l")  # the previous key is still in the queue
        await until(lambda: planned == ["org/other"] and app.screen is app.chat)
        press(app, "ctrl+o")
        await until(lambda: shown(app))
        press(app, *"other", "enter", "down")
        await until(lambda: app.controller.models.in_use.model == "org/other" and app.screen is app.chat)
        await until(lambda: EXAMPLES[False][1] in str(app.chat.query_one(Welcome).content))  # what Enter would ask it


async def test_enter_during_the_search_loads_the_typed_model(running, machine, monkeypatch):
    found, located = threading.Event(), threading.Event()
    monkeypatch.setattr(choosing.catalog, "find", lambda folders: found.wait(PATIENCE_S) and [HERE, OTHER])
    monkeypatch.setattr(choosing.catalog, "is_here", lambda name: located.wait(PATIENCE_S))
    async with running() as (app, _pilot, until):
        press(app, "ctrl+o", *"other", "enter")
        await until(lambda: is_open(app, ModelsScreen) and app.screen._is_chosen)
        picker = app.screen
        found.set()
        await until(lambda: app.screen is app.chat and not picker.is_attached)
        located.set()
        await until(lambda: app.controller.models.in_use.model == "org/other")


async def test_a_question_goes_to_the_model_chosen_before_it(running, machine, monkeypatch):
    monkeypatch.setattr(choosing.catalog, "is_here", lambda name: not time.sleep(0.3))  # a slow disk
    async with running() as (app, _pilot, until):
        press(app, "ctrl+o")
        await until(lambda: shown(app))
        press(app, "down", "enter", *"hello", "enter")
        await until(lambda: is_finished(app))
        assert app.controller.models.in_use.model == "org/other"


def test_typed_text_may_name_a_model(tmp_path):
    assert typed_model("", [HERE]) == typed_model("bundled", [HERE]) == typed_model("no such thing", []) == []
    assert typed_model("org/name", [OTHER]) == [FoundModel("org/name", "download")]
    assert typed_model("https://huggingface.co/org/name", []) == [FoundModel("org/name", "download")]
    assert typed_model("org/name:q4.gguf", [])[0].kind == typed_model("org/name:Q4_K_M", [])[0].kind == "download"
    assert typed_model("/org/name", []) == typed_model("../a", []) == []
    (tmp_path / "x.gguf").write_bytes(b"no")
    assert typed_model(str(tmp_path / "x.gguf"), [])[0].kind == "GGUF"
    assert typed_model(f"'{tmp_path}/x.gguf'", [])[0].kind == "GGUF"  # as a terminal pastes a dropped file


def facts(model, free=8 * GiB):
    return " ".join(str(describe_model(model, "auto", Room("cpu", free), 90)).split())


def test_a_row_says_whether_a_model_fits():
    assert facts(OTHER).endswith("✓ fits, takes 64.0 MiB")
    assert facts(OTHER, 2**25).endswith("~ int8 fits, 64.0 MiB")
    assert facts(OTHER, 2**20).endswith("✖ too large, 64.0 MiB")
    assert facts(replace(OTHER, weights=None, problem="dam\x1baged")).endswith("✖ dam␛aged")
    assert facts(FoundModel("a/b", "download")).endswith("will be downloaded")
    assert str(describe_model(replace(OTHER, name="n" * 200), "auto", Room("cpu", 1), 80)).count("…") == 1
