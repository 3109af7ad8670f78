"""Profiles that are refused: all of them at once, those that match nothing, and speeds that no device has."""

from __future__ import annotations

import pytest
from support.gpu_profiles import RTX, Install, own
from support.message import lacks
from typer.testing import CliRunner

from kvchat.cli import main
from kvchat.config import profiles
from kvchat.errors import UsageError


@pytest.mark.parametrize("command", ["config", "profile"])
def test_all_wrong_profiles_are_told_at_once(command: str) -> None:
    """Only the first was (audit, 12)."""
    own("a.toml", '[kv]\nmode = "frezee"\n')
    own("b.toml", "[measured]\nread = -1\n")
    good = own("c.toml", "[sampling]\nseed = 3\n")
    ran = CliRunner().invoke(main.app, [command, "validate"])
    assert isinstance(ran.exception, UsageError)
    assert not lacks(ran.exception, 'profiles/a.toml:2: kv.mode: "frezee"', "profiles/b.toml:2: measured.read: -1")
    assert ran.stdout.splitlines()[-1] == f"{good}: good"


def test_a_file_that_is_not_there_keeps_no_other_from_being_checked() -> None:
    wrong = own("a.toml", '[kv]\nmode = "frezee"\n')
    ran = CliRunner().invoke(main.app, ["profile", "validate", str(wrong.with_name("none.toml")), str(wrong)])
    assert not lacks(ran.exception, str(wrong.with_name("none.toml")), "profiles/a.toml:2")


def test_a_range_of_memory_that_can_match_nothing_is_refused() -> None:
    """It was called good (audit, 12)."""
    file = own("bad.toml", "[match]\nmemory = [10, 5]\n")
    with pytest.raises(UsageError, match=r"profiles/bad\.toml:2: match\.memory: \[10, 5\]"):
        profiles.read_file(file, None)


@pytest.mark.parametrize("text", ["[kv", '[kv]\nmode = "frezee"\n'])
def test_a_wrong_profile_is_shown_with_a_caret(nvml: Install, text: str) -> None:
    nvml(RTX)
    own("bad.toml", text)
    (told,) = profiles.find("auto").problems
    assert "^\n" in told
