"""Presets as files: what one keeps is what it sets, and what is no part of one is refused with its line."""

from __future__ import annotations

import pytest

from kvchat import paths
from kvchat.cli.options import flags
from kvchat.config import presets, sources
from kvchat.config.presets import MODE, SYSTEM
from kvchat.errors import UsageError

CODER = {SYSTEM: "You write code.", ("sampling", "temperature"): 0.2, ("sampling", "stop"): ("END",), MODE: "streaming"}


def written(text: str, name: str = "coder") -> None:
    paths.presets_dir().mkdir(parents=True)
    (paths.presets_dir() / f"{name}.toml").write_text(text)


def test_what_was_kept_is_read_and_the_next_one_of_that_name_replaces_it():
    presets.save("coder", {**CODER, ("kv", "streaming", "budget"): 512})
    settings = sources.resolve(presets.read(presets.find("cod"))).settings
    assert (settings.model.system, settings.sampling.temperature) == ("You write code.", 0.2)
    assert (settings.kv.mode, settings.kv.params("streaming"), settings.sampling.stop) == (
        *("streaming", {"budget": 512}, ("END",)),
    )
    presets.save("coder", {MODE: "full", ("sampling", "seed"): None})
    assert presets.read(presets.find("coder")).values == {MODE: "full"}
    assert presets.names() == ["coder"]


@pytest.mark.parametrize("name", ["", "../config", "a b", ".hidden", "a/b"])
def test_a_name_that_would_be_no_file_is_refused(name):
    with pytest.raises(UsageError):
        presets.save(name, CODER)
    assert not paths.presets_dir().exists()


@pytest.mark.parametrize(
    "text",
    [
        "[model]\nname = 'bundled'\n",
        "[ui]\ntheme = 'x'\n",
        "[kv]\nparked_gib = 1\n",
        "[sampling]\ntemperature = -1\n",
        "[",
    ],
)
def test_what_is_no_part_of_a_preset_is_refused_with_its_file(text):
    written(text)
    with pytest.raises(UsageError, match=r"presets/coder\.toml"):
        presets.read(presets.find("coder"))


def test_an_unknown_preset_is_refused():
    with pytest.raises(UsageError):
        presets.read(presets.find("coder"))
    presets.save("coder", CODER)
    with pytest.raises(UsageError, match="writer"):
        presets.read(presets.find("writer"))


def test_on_the_command_line_other_options_go_before_a_preset():
    presets.save("coder", {**CODER, ("kv", "streaming", "budget"): 512})
    given = flags({"preset": "coder", "temperature": 0.9, "budget": 256})
    settings = sources.resolve(given).settings
    assert (settings.sampling.temperature, settings.kv.params("streaming")) == (0.9, {"budget": 256})
    assert (settings.kv.mode, settings.model.system) == ("streaming", "You write code.")
    assert given.origins[MODE] == "--preset coder"
