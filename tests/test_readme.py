"""The README says what is so: its commands, links, modes and numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvchat.bench import tables
from kvchat.cli.main import app
from kvchat.config.modes import registered

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [tables.decode, tables.passkey, tables.endurance, tables.perplexity])
def test_numbers_are_the_kept_results(table):
    assert table() in README


def test_the_test_command_is_the_one_that_continuous_integration_runs():
    command = re.search(r"&& \.venv/bin/python (-m pytest[^\n]*)", README).group(1)
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command in run
    assert re.search(r"pip install -e '(\.\[test\])'", README).group(1) in run


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize("mode", registered())
def test_every_mode_has_a_row(mode):
    assert re.search(rf"^\| {mode} \|.*modes/{mode}\.py", README, re.MULTILINE)


def test_commands_exist():
    known = {command.name or command.callback.__name__.strip("_") for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    said = set(re.findall(r"^kvchat ([a-z]+)", blocks, re.MULTILINE))
    assert said
    assert said <= known


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README
