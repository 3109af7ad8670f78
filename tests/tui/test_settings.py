"""Settings changed at run time: their effects, sources and saving."""

from dataclasses import replace

import pytest
from support.app_driver import choices, drawn, is_open, press, toasts
from textual.widgets import Input, Static

from kvchat.config import sources
from kvchat.config.modes import registered
from kvchat.config.schema import Settings
from kvchat.config.sources import Resolved, SettingsSource, file_source
from kvchat.errors import UsageError
from kvchat.foreign_text import visible
from kvchat.protocol.messages import KeepPages, Switch, Switched
from kvchat.tui.actions import ACTIONS
from kvchat.tui.rebinding import check_keys
from kvchat.tui.screens.settings import SettingsScreen
from kvchat.tui.settings import DEFAULT, HERE, SESSION, SettingsEditor

TEMPERATURE, SYSTEM, MODE, THEME, DTYPE, NEXT = (
    ("sampling", "temperature"),
    ("model", "system"),
    ("kv", "mode"),
    ("ui", "theme"),
    ("model", "dtype"),
    ("keys", "mode.next"),
)


class FakeAppearance:
    theme = "kvchat-dark"
    themes = dict.fromkeys(("kvchat-dark", "kvchat-light"))

    def __init__(self):
        self.keys = {}

    def use_theme(self, name):
        if name not in self.themes:
            raise UsageError(f'There is no theme "{name}".')
        self.theme = name

    def rebind(self, keys):
        check_keys(keys)
        self.keys = dict(keys)


class Rows:
    def __init__(self, chat, config):
        self.looks = FakeAppearance()
        self.editor = SettingsEditor(config, chat.controller, self.looks)

    def __getitem__(self, key):
        return next(row for row in self.editor.settings() if row.key == key)


@pytest.fixture
def config(config, tmp_path):
    return replace(config, config_file=tmp_path / "config.toml")


@pytest.fixture
def at(chat, config):
    return Rows(chat, config)


def test_rows_cover_the_schema_and_the_keys(at):
    bindable = [("keys", action.id) for action in ACTIONS if action.is_bindable]
    compared = {name for name, cls in registered().items() if cls.for_comparison}
    offered = [key for key, _ in sources.leaves() if key[0] != "kv" or key[1] not in compared]
    assert [row.key for row in at.editor.settings()] == offered + bindable
    assert all(row.doc and row.takes and row.origin == DEFAULT for row in at.editor.settings())


def test_a_comparison_mode_has_rows_only_while_active(at, chat):
    chat.controller.state.enter_mode("quest", {})
    assert {row.key[1] for row in at.editor.settings() if row.key[-1] == "whole_layers"} == {"quest"}
    chat.controller.state.enter_mode("full", {})
    assert not [row for row in at.editor.settings() if row.key[-1] == "whole_layers"]


async def test_live_settings_apply_immediately(at, chat):
    await chat.load()
    at.editor.change(TEMPERATURE, "0.25")
    at.editor.change(("sampling", "stop"), '["a", "b\\n"]')
    at.editor.change(SYSTEM, "Be short.\\nVery.")
    at.editor.change(THEME, "kvchat-light")
    at.editor.change(NEXT, "f12")
    at.editor.change(("kv", "streaming", "budget"), "256")
    at.editor.change(MODE, "streaming")
    state = chat.controller.state
    assert (state.sampling.temperature, state.sampling.stop) == (0.25, ("a", "b\n"))
    assert state.conversation.system == "Be short.\nVery."
    assert (at.looks.theme, at.looks.keys) == ("kvchat-light", {"mode.next": "f12"})
    assert chat.client.sent[-1:] == [Switch("streaming", {"budget": 256})]
    await chat.controller.handle(Switched("full", "streaming", {"budget": 256, "R": 64}, 100, 0, 0.0))
    at.editor.change(("kv", "streaming", "R"), "8")
    assert chat.client.sent[-1:] == [Switch("", {"R": 8})]
    assert (at[MODE].shown, at[("kv", "streaming", "budget")].shown) == ("streaming", "256")
    assert at.editor.unsaved == 8


async def test_the_models_own_temperature_is_shown(at, chat):
    assert (at[TEMPERATURE].text, at[TEMPERATURE].shown) == ("", "auto")
    await chat.load(temperature=0.3)
    assert (at[TEMPERATURE].text, at[TEMPERATURE].shown) == ("", "auto, now 0.3")
    at.editor.change(TEMPERATURE, "0")
    assert (at[TEMPERATURE].text, at[TEMPERATURE].shown) == ("0.0", "0.0")


async def test_the_page_dtype_applies_now_and_to_later_models(at, chat):
    key = ("kv", "host_dtype")
    at.editor.change(key, "int8")
    assert KeepPages("int8") not in chat.client.sent  # the first Load contains it
    await chat.load()
    at.editor.change(key, "model")
    assert chat.client.sent[-1:] == [KeepPages("model")]
    assert chat.controller.models.in_use.host_dtype == at[key].text == "model"
    at.editor.change(key, "int8")
    assert chat.controller.models._load("other", {}).host_dtype == "int8"


@pytest.mark.parametrize("name", ["parked_gib", "saved_gib"])
async def test_cache_sizes_apply_from_the_next_start(at, chat, name):
    await chat.load()
    before, sent = chat.controller.models.in_use.keeping, list(chat.client.sent)
    at.editor.change(("kv", name), "1.5")
    row = at[("kv", name)]
    assert (row.text, row.origin, row.is_live) == ("1.5", HERE, False)
    assert (chat.controller.models.in_use.keeping, chat.client.sent) == (before, sent)


def test_settings_for_the_next_start_are_shown_and_saved(at):
    at.editor.change(DTYPE, "bfloat16")
    assert (at[DTYPE].text, at[DTYPE].origin, at[DTYPE].is_live) == ("bfloat16", HERE, False)
    at.editor.save()
    assert at[DTYPE].origin == "config.toml:2"
    assert sources.file_source(at.editor.file).values == {DTYPE: "bfloat16"}
    at.editor.change(DTYPE, "")
    at.editor.save()
    assert (at[DTYPE].text, at[DTYPE].origin, at.editor.unsaved) == ("auto", DEFAULT, 0)
    assert sources.file_source(at.editor.file).values == {}


@pytest.mark.parametrize("key", [NEXT, DTYPE, TEMPERATURE])
def test_clearing_an_unset_value_is_not_a_change(at, key):
    before = at[key]
    at.editor.change(key, "")
    assert (at[key], at.editor.unsaved) == (before, 0)
    at.editor.save()
    assert not at.editor.file.exists()
    at.editor.change(key, {NEXT: "f12", DTYPE: "float32", TEMPERATURE: "1"}[key])
    at.editor.change(key, "")
    assert (at[key], at.editor.unsaved) == (before, 0)


def test_clearing_a_saved_key_removes_it_from_the_file(at):
    at.editor.change(NEXT, "f12")
    at.editor.save()
    at.editor.change(NEXT, "")
    assert (at[NEXT].text, at[NEXT].origin, at.looks.keys) == ("f6", HERE, {})
    at.editor.save()
    assert (at[NEXT].origin, sources.file_source(at.editor.file).values) == (DEFAULT, {})


def test_clearing_a_flags_value_lasts_for_the_session(chat, config):
    set_here = {DTYPE: "float16", TEMPERATURE: 0.3, ("kv", "host_dtype"): "int8"}
    flag = SettingsSource(set_here, dict.fromkeys(set_here, "--flag"))
    at = Rows(chat, replace(config, resolved=sources.resolve(flag)))
    for key in set_here:
        at.editor.change(key, "")
    rows = [(at[key].text, at[key].origin) for key in set_here]
    assert rows == [("float16", "--flag"), ("", SESSION), ("model", SESSION)]
    assert not at.editor.unsaved


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        (TEMPERATURE, "hot", '"hot"'),
        (MODE, "frezee", '"freeze"?'),
        (("kv", "freeze", "K"), "1.5", "whole number"),
        (THEME, "pink", '"pink"'),
        (NEXT, "ctrl+n", "mode.next and new"),
        (NEXT, "a", "types text"),
    ],
)
def test_invalid_values_are_rejected_and_change_nothing(at, key, text, words):
    before = at.editor.settings()
    with pytest.raises(UsageError) as refused:
        at.editor.change(key, text)
    assert words in str(refused.value)
    assert at.editor.settings() == before
    assert not at.editor.unsaved


def test_values_set_in_the_chat_belong_to_the_session(at, chat):
    chat.controller.set_sampling("temperature", "0.1")
    assert (at[TEMPERATURE].text, at[TEMPERATURE].origin) == ("0.1", SESSION)


def test_a_flag_overrides_the_file_and_saving_says_so(chat, config):
    flag = SettingsSource({DTYPE: "float16"}, {DTYPE: "--dtype"})
    at = Rows(chat, replace(config, resolved=sources.resolve(flag)))
    assert (at[DTYPE].text, at[DTYPE].origin) == ("float16", "--dtype")
    at.editor.change(DTYPE, "float32")
    assert "--dtype" in at.editor.save()


def test_an_invalid_file_keeps_the_change_unsaved(at):
    at.editor.file.write_text("[ui\n")
    at.editor.change(TEMPERATURE, "0.5")
    with pytest.raises(UsageError, match=r"config\.toml:1"):
        at.editor.save()
    assert at.editor.unsaved == 1


def test_auto_shows_the_effective_value(at, chat):
    chat.controller.state.enter_mode("speculative", {"budget": 512})
    assert at[("kv", "speculative", "budget")].shown == "auto, now 512"


# ---- The settings screen, driven by keys and the mouse


def text_of(app, selector):
    return str(app.screen.query_one(selector, Static).content)


def focused(app):
    return app.screen.focused.id if app.screen.focused else None


async def find(app, until, words):
    press(app, "f2")
    await until(lambda: is_open(app, SettingsScreen) and len(choices(app)) > 2)
    app.screen.query_one("#find", Input).value = words
    await until(lambda: len(choices(app)) == 2)


async def retype(app, until, text):
    """Replace the text in the field and press Enter; Textual deletes later than it inserts."""
    field = app.screen.query_one("#value", Input)
    press(app, *["backspace"] * len(field.value))
    await until(lambda: not field.value)
    press(app, *text)
    await until(lambda: field.value == text)
    press(app, "enter")


async def edit(app, until, part):
    """Open the setting that was found, and wait until its ``part`` has the focus."""
    press(app, "enter")
    await until(lambda: focused(app) == part)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_a_value_is_found_validated_and_saved(running, config, size):
    async with running(size=size) as (app, _pilot, until):
        await find(app, until, "sampling.temperature")
        await until(lambda: "Takes a number from 0 to 100." in text_of(app, "#about"))
        await edit(app, until, "value")
        await retype(app, until, "300")
        await until(lambda: "300" in text_of(app, "#refusal"))
        for selector in ("#about", "#value", "#refusal", "KeyHints"):
            widget = app.screen.query_one(selector)
            await until(lambda widget=widget: widget.region and app.screen.region.contains_region(widget.region))
        await retype(app, until, "0.25")
        await until(lambda: app.controller.state.sampling.temperature == 0.25)
        await until(lambda: any("● temperature" in row and "0.25" in row for row in choices(app)))
        press(app, "ctrl+s", "f2")
        await until(lambda: app.screen is app.chat)
    assert file_source(config.config_file).values == {("sampling", "temperature"): 0.25}


async def test_a_choice_is_made_by_mouse_and_reset_by_key(running):
    async with running() as (app, pilot, until):
        await find(app, until, "ui.theme")
        await until(lambda: app.screen.query_one("#list").region.height > 1)
        await pilot.click("#list", offset=(4, 1))
        place, choices = [*app.themes].index("kvchat-light"), app.screen.query_one("#choices")
        await until(lambda: choices.has_focus and choices.region.height > place)
        await pilot.click("#choices", offset=(4, place))
        await until(lambda: app.theme == "kvchat-light")
        press(app, "ctrl+d")
        await until(lambda: app.theme == "kvchat-dark")
        press(app, "escape", "escape")
        await until(lambda: app.screen is app.chat)
        press(app, "f2")
        await until(lambda: is_open(app, SettingsScreen) and "model.name" in text_of(app, "#about"))
        await edit(app, until, "value")
        press(app, "down", "pagedown", "q")
        await until(lambda: app.screen.query_one("#value", Input).value.endswith("q"))
        assert "model.name" in text_of(app, "#about"), "while a value is typed its setting stays selected"


async def test_a_mode_chosen_by_keys_is_shown_after_the_switch(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        await find(app, until, "kv.mode")
        await until(lambda: "kv.mode = full" in drawn(app))  # the last line of a long explanation
        await edit(app, until, "choices")
        press(app, "down", "enter")
        await until(lambda: app.controller.state.mode == "freeze" and focused(app) == "find")
        await until(lambda: "freeze" in choices(app)[1])
        await edit(app, until, "choices")
        press(app, "escape", "escape")
        await until(lambda: app.screen is app.chat and "last until kvchat is closed" in toasts(app))


async def test_foreign_text_and_a_missing_file_are_harmless(running, config):
    settings = Settings.model_validate({"model": {"name": "\x1b]0;x\x07[b]evil[/b]"}})
    foreign = Resolved(settings, {("model", "name"): "\x9bm.toml:1"})
    async with running(replace(config, config_file=None, resolved=foreign)) as (app, _pilot, until):
        await find(app, until, "model.name")
        await until(lambda: "[b]evil[/b]" in choices(app)[1] and "evil" in text_of(app, "#about"))
        shown = "".join(choices(app)) + text_of(app, "#about")
        assert visible(shown.replace("\n", "")) == shown.replace("\n", "")
        await edit(app, until, "value")
        press(app, "x", "enter")
        await until(lambda: app.settings.unsaved)
        press(app, "ctrl+s")
        await until(lambda: "not saved here" in text_of(app, "#refusal"))
