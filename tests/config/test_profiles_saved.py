"""Measured rates, saved in a profile of this GPU."""

from __future__ import annotations

import errno
import os

import pytest
import tomli
from support.gpu_profiles import RTX, Install, gpu, own, resolved, shown
from typer.testing import CliRunner

from kvchat import paths
from kvchat.cli import chat, main
from kvchat.config import profiles
from kvchat.config.profiles import Measured
from kvchat.errors import UsageError


def test_what_was_measured_is_found_again_on_this_gpu_only(nvml: Install) -> None:
    nvml(RTX)
    measured = Measured(read=250.0, to_device=11.5, gather=11.0, kvchat="0.1.0")
    file = profiles.save(measured)
    assert file == paths.user_profiles_dir() / "rtx-4060-8gb.toml"
    assert profiles.find("auto").measured == measured
    assert profiles.find("cpu").measured == Measured()
    load = chat.load_of(resolved().settings)
    assert (load.link_bytes_per_s, load.read_bytes_per_s) == (11e9, 250e9)
    nvml(gpu("NVIDIA GeForce RTX 4060 Ti", 7.996))
    assert profiles.find("auto").measured == Measured()


@pytest.mark.parametrize(
    ("measured", "rate"),
    [
        (Measured(to_device=50.0, gather=40.0), 40e9),
        (Measured(to_device=50.0), 50e9),
        (Measured(read=3000.0, to_host=50.0), None),
    ],
)
def test_the_link_is_as_fast_as_recall_or_a_copy(measured: Measured, rate: float | None) -> None:
    assert measured.link_bytes_per_s == rate


def test_saving_again_keeps_settings_and_comments(nvml: Install) -> None:
    nvml(RTX)
    file = profiles.save(Measured(read=1.0, to_host=3.0))
    file.write_text(file.read_text() + "\n[kv]  # mine\nmode = 'streaming'\n")
    profiles.save(Measured(read=2.0))
    written = tomli.loads(file.read_text())
    assert written["measured"] == {"read": 2.0}
    assert "[kv]  # mine" in file.read_text()
    assert 'kv.mode = "streaming"   # profiles/rtx-4060-8gb.toml:' in shown("kv.mode")


def test_saving_takes_no_setting_away(nvml: Install) -> None:
    """The saved profile has more keys than most that a person writes, and was the only one in force (audit, 12)."""
    own("mine.toml", '[match]\nname = "cpu"\n[kv]\nmode = "streaming"\n[kv.streaming]\nbudget = 300\n')
    before = resolved()
    profiles.save(Measured(read=9.0, kvchat="0.1.0"))
    assert resolved() == before
    assert profiles.find("auto").measured.read == 9.0
    assert not profiles.find("auto").problems


def test_the_commands_say_which_profile_was_measured(nvml: Install) -> None:
    own("mine.toml", '[match]\nname = "cpu"\n[kv]\nmode = "streaming"\n')
    profiles.save(Measured(read=9.0, kvchat="0.1.0"))
    measured = "measured.read = 9.0   # profiles/cpu.toml:5 (matched: name)"
    matched = CliRunner().invoke(main.app, ["profile", "match"]).stdout.splitlines()
    assert any(line.startswith("profiles/cpu.toml (matched: name)") for line in matched)
    assert '  kv.mode = "streaming"   # profiles/mine.toml:4 (matched: name)' in matched
    assert f"  {measured}" in matched
    config = CliRunner().invoke(main.app, ["config", "show"]).stdout.splitlines()
    assert config[0].endswith("profiles/mine.toml (matched: name), profiles/cpu.toml (matched: name)")
    assert config[1] == f"# {measured}"
    assert 'kv.mode = "streaming"   # profiles/mine.toml:4 (matched: name)' in config


def test_the_figures_are_those_of_one_profile(nvml: Install) -> None:
    """Rates of two measurements do not belong together."""
    own("mine.toml", '[match]\nname = "cpu"\n[measured]\nread = 5.0\nto_host = 3.0\n[sampling]\nseed = 3\n')
    profiles.save(Measured(read=9.0))
    assert profiles.find("auto").measured == Measured(read=9.0)
    assert resolved().settings.sampling.seed == 3


def test_a_machine_without_gpu_is_saved_as_such(nvml: Install) -> None:
    assert profiles.save(Measured(read=9.0)).name == "cpu.toml"
    assert profiles.find("auto").measured.read == 9.0
    nvml(RTX)
    assert profiles.find("auto").measured.read is None


def test_a_full_disk_leaves_the_old_profile(nvml: Install, request: pytest.FixtureRequest) -> None:
    file = profiles.save(Measured(read=9.0))
    request.getfixturevalue("full_disk")
    with pytest.raises(UsageError, match=rf"cpu\.toml.*{os.strerror(errno.ENOSPC)}"):
        profiles.save(Measured(read=1.0))
    assert profiles.find("auto").measured.read == 9.0
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_profile_that_is_no_toml_is_named(nvml: Install) -> None:
    own("cpu.toml", "[kv")
    with pytest.raises(UsageError, match=r"cpu\.toml"):
        profiles.save(Measured(read=9.0))
