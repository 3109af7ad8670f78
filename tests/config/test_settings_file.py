"""Writing config.toml: values change, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvchat.config import sources
from kvchat.config.settings_file import save
from kvchat.errors import UsageError

OWN = """\
# mine
title = 1   # not ours, see below

[sampling]   # how it talks
temperature = 0.7   # calm
stop = [
  "END",   # both
  "STOP",
]

# the screen
[ui]
theme = 'kvchat-dark'
"""
CHANGES = {
    ("sampling", "temperature"): 0.2,
    ("sampling", "seed"): 7,
    ("sampling", "stop"): ("a\nb", "[ui]"),
    ("model", "system"): 'He said "no".\n[kv]\n# theme = 1',
    ("ui", "theme"): "kvchat-light",
    ("ui", "history"): False,
    ("kv", "mode"): "freeze",
    ("kv", "freeze", "tau"): 0.25,
    ("keys", "mode.next"): "f8",
}
STARTS = [
    "",
    sources.template(),
    OWN.replace("title = 1   # not ours, see below\n", ""),
    "kv.mode = 'full'\nui = { theme = 'x', history = true }\nkeys.mode.next = 'f9'\n",
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "config.toml"


@pytest.mark.parametrize("start", STARTS)
@settings(max_examples=20)
@given(st.permutations(list(CHANGES)), st.integers(0, len(CHANGES)))
def test_what_is_saved_is_read_back_and_can_be_taken_out(tmp_path_factory, start, order, taken_out):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(start)
    before = sources.file_source(path).values
    save(path, {key: CHANGES[key] for key in order})
    read = {key: tuple(value) if isinstance(value, list) else value for key, value in _values(path).items()}
    assert read == {**before, **CHANGES}
    save(path, dict.fromkeys(order[:taken_out]))
    assert _values(path).keys() == {**before, **CHANGES}.keys() - set(order[:taken_out])


def test_comments_order_and_other_lines_stay(path):
    path.parent.mkdir()
    path.write_text(OWN.replace("title = 1   # not ours, see below\n", ""))
    save(path, {("sampling", "temperature"): 0.2, ("sampling", "seed"): 7, ("ui", "theme"): "kvchat-light"})
    assert path.read_text().splitlines() == [
        "# mine",
        "",
        "[sampling]   # how it talks",
        "seed = 7",
        "temperature = 0.2   # calm",
        *OWN.splitlines()[5:12],
        'theme = "kvchat-light"',
    ]


def test_a_mark_of_byte_order_is_no_part_of_the_settings(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'\xef\xbb\xbf[model]\nsystem = "\xef\xbb\xbfBe brief."\n')
    save(path, {("ui", "theme"): "kvchat-light"})
    resolved = sources.resolve(sources.file_source(path)).settings
    assert (resolved.model.system, resolved.ui.theme) == ("Be brief.", "kvchat-light")


def test_the_written_template_keeps_its_explanations(path):
    path.parent.mkdir()
    path.write_text(sources.template())
    save(path, {("sampling", "top_k"): 12, ("kv", "sync", "rho"): 0.75})
    changed = {"# top_k = 0": "top_k = 12", "# rho = 0.5": "rho = 0.75"}
    assert path.read_text().splitlines() == [changed.get(line, line) for line in sources.template().splitlines()]


@pytest.mark.parametrize("text", ["[ui\n", OWN, "[ui]\nhistory = 3\n"])
def test_a_wrong_file_is_refused_and_stays(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UsageError, match=r"config.toml:\d"):
        save(path, {("ui", "theme"): "x"})
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be"):
        save(tmp_path / "file" / "config.toml", {("ui", "theme"): "x"})


def _values(path):
    return sources.file_source(path).values
