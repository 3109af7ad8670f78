"""Profiles that are refused: all of them at once."""

from __future__ import annotations

import pytest
from support.gpu_profiles import own
from typer.testing import CliRunner

from kvchat.cli import main
from kvchat.errors import UsageError


@pytest.mark.parametrize("command", ["config", "profile"])
def test_all_wrong_profiles_are_told_at_once(command: str) -> None:
    """Only the first was (audit, 12)."""
    own("a.toml", '[kv]\nmode = "frezee"\n')
    own("b.toml", "[measured]\nread = -1\n")
    good = own("c.toml", "[sampling]\nseed = 3\n")
    ran = CliRunner().invoke(main.app, [command, "validate"])
    assert isinstance(ran.exception, UsageError)
    assert 'profiles/a.toml:2: kv.mode: "frezee" is not one of' in str(ran.exception)
    assert "profiles/b.toml:2: measured.read: -1 is refused" in str(ran.exception)
    assert ran.stdout.splitlines()[-1] == f"{good}: good"


def test_a_file_that_is_not_there_keeps_no_other_from_being_checked() -> None:
    wrong = own("a.toml", '[kv]\nmode = "frezee"\n')
    ran = CliRunner().invoke(main.app, ["profile", "validate", str(wrong.with_name("none.toml")), str(wrong)])
    assert f"There is no file {wrong.with_name('none.toml')}. Check the path.\n" in str(ran.exception)
    assert "profiles/a.toml:2" in str(ran.exception)
