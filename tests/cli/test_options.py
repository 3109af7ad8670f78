from __future__ import annotations

import click
import pytest
import typer

from kvchat.cli import options
from kvchat.cli.main import app
from kvchat.config import modes, sources
from kvchat.config.modes import SHARED, BudgetParameters, ModeParameters
from kvchat.config.schema import Settings
from kvchat.config.validation_errors import field_at

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("command", ["chat", "ask", "plan", "compare"])
def test_an_option_of_a_setting_says_what_the_schema_says(command: str) -> None:
    settings = [option for option in COMMANDS[command].params if option.name in options.KEYS]
    assert len(settings) >= 3
    for option in settings:
        if isinstance(option, click.Option):
            (key,) = options.KEYS[option.name]
            field = field_at(Settings, key)
            assert option.help.removesuffix("; repeatable") == field.description


@pytest.mark.parametrize(("name", "section"), [("budget", BudgetParameters), ("pin_system", ModeParameters)])
def test_an_option_of_every_mode_says_what_the_parameter_says(name: str, section: type[ModeParameters]) -> None:
    option = next(option for option in COMMANDS["ask"].params if option.name == name)
    assert name in SHARED
    assert option.help == section.model_fields[name].description


def test_the_words_of_an_option_come_from_the_schema() -> None:
    quantize = next(option for option in COMMANDS["ask"].params if option.name == "quantize")
    assert quantize.metavar == "auto|none|int8|int4|nf4"
    offered = quantize.shell_complete(click.Context(COMMANDS["ask"]), "int")
    assert [item.value for item in offered] == ["int8", "int4"]


def test_every_setting_may_have_an_option() -> None:
    keys = {key for key, _ in sources.leaves() if len(key) == 2}
    assert {key for keys in options.KEYS.values() for key in keys} == keys


def test_the_modes_are_asked_once_whether_they_accept_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, parsed = modes.parse, []
    monkeypatch.setattr(modes, "parse", lambda mode, params: parsed.append(mode) or parse(mode, params))
    options.flags({"budget": 512, "mode": "streaming"})
    assert sorted(parsed) == sorted(modes.having("budget"))
