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


@pytest.mark.parametrize(
    ("match", "key"),
    [
        ("memory = [10, 5]", "memory: [10, 5]"),
        ("memory = [8, 8]", "memory: [8, 8]"),
        ("memory = [-2, 0]", "memory: [-2, 0]"),
        ("name = []", "name: []"),
        ('compute_capability = "8"', 'compute_capability: "8"'),
        ('device = "cpu"\nname = "RTX*"', 'name: "RTX*"'),
        ('name = "RTX*"\ndevice = "cpu"', 'name: "RTX*"'),
        ('device = "cpu"\npcie_width = 8', "pcie_width: 8"),
    ],
)
def test_a_profile_that_can_match_nothing_is_refused(match: str, key: str) -> None:
    """Each was called good (audit, 12)."""
    file = own("bad.toml", f"[match]\n{match}\n")
    with pytest.raises(UsageError) as caught:
        profiles.read_file(file, None)
    assert f": match.{key}" in str(caught.value)


@pytest.mark.parametrize("rate", ["read", "to_device", "to_host", "gather"])
@pytest.mark.parametrize("value", ["1e-300", "0.009", "100001", "1e300"])
def test_a_rate_that_no_device_has_is_refused(rate: str, value: str) -> None:
    """A plan printed floors of hundreds of digits (audit, 12)."""
    file = own("bad.toml", f"[measured]\n{rate} = {value}\n")
    with pytest.raises(UsageError, match=rf"measured\.{rate}: .*0\.01.*100000"):
        profiles.read_file(file, None)


def test_the_slowest_and_the_fastest_rate_are_taken() -> None:
    file = own("good.toml", "[measured]\nread = 100000\nto_device = 0.01\n")
    assert profiles.read_file(file, None).profile.measured.to_device == 0.01


@pytest.mark.parametrize("text", ["[kv", '[kv]\nmode = "frezee"\n'])
def test_a_wrong_profile_is_shown_with_a_caret(nvml: Install, text: str) -> None:
    nvml(RTX)
    own("bad.toml", text)
    (told,) = profiles.find("auto").problems
    assert "^\n" in told
