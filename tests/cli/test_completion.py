"""What the shells complete, asked as the shells ask."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
import typer
from support.environment import environ
from typer.testing import CliRunner

from kvchat.cli import options
from kvchat.cli.main import app
from kvchat.cli.options import (
    complete_device,
    complete_mode,
    complete_model,
    complete_param,
    complete_profile,
    complete_theme,
    one_of,
)
from kvchat.config import modes, sources
from kvchat.config.modes import SHARED, BudgetParameters, FullParameters, ModeParameters, choosable
from kvchat.config.schema import Settings
from kvchat.config.validation_errors import field_at


def names(offers):
    return [name for name, _ in offers]


def test_words_come_from_the_schema_the_modes_and_the_themes(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCHAT_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "themes").mkdir()
    (tmp_path / "themes" / "own.toml").write_text("")
    assert names(complete_mode("")) == list(choosable())
    assert names(complete_mode("s")) == ["streaming", "sync", "speculative", "shadowkv", "snapkv"]
    assert names(one_of(("auto", "int8", "int4"))("int")) == ["int8", "int4"]
    assert names(complete_device("c")) == ["cpu", "cuda"]
    assert names(complete_param("rh")) == ["rho="]
    assert names(complete_param("score=")) == ["score=prob_rel", "score=raw", "score=always"]
    assert names(complete_param("recovery=t")) == ["recovery=true"]
    assert names(complete_param("budget=")) == []
    assert {"kvchat-dark", "own"} <= set(names(complete_theme("")))
    assert names(complete_model("bun")) == ["bundled"]
    assert names(complete_profile("8g")) == ["8gb"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_asks_kvchat(shell):
    result = CliRunner().invoke(app, ["completion", shell])
    assert result.exit_code == 0
    assert f"_KVCHAT_COMPLETE=complete_{shell}" in result.output
    assert CliRunner().invoke(app, ["completion", "nosh"]).exit_code == 2


@pytest.mark.parametrize(
    ("line", "offered"),
    [("kvchat --mode sy", "sync"), ("kvchat ask --param clust", "clusters="), ("kvchat compl", "completion")],
)
def test_bash_is_answered(line, offered):
    words = line.split()
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_KVCHAT_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "kvchat"]
    result = subprocess.run(command, capture_output=True, text=True, env=environ(**variables), timeout=600)
    assert (result.returncode, result.stdout.split()) == (0, [offered])


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


@pytest.mark.parametrize(
    ("name", "section"), [("budget", BudgetParameters), ("draft", FullParameters), ("pin_system", ModeParameters)]
)
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
