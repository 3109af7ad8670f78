"""Bundled themes are complete; a bad one is named with its reason."""

from __future__ import annotations

import pytest

from kvchat.errors import UsageError
from kvchat.paths import bundled_themes_dir
from kvchat.tui.themes import DEFAULT, RIBBON_DEFAULTS, load, load_all


def test_bundled_themes_are_complete():
    themes, problems = load_all(())
    assert not problems
    assert {DEFAULT, "kvchat-light", "kvchat-contrast"} <= set(themes)
    assert not themes["kvchat-light"].dark
    for theme in themes.values():
        assert set(theme.variables) >= set(RIBBON_DEFAULTS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("primary = ", "Invalid value"),
        ('secondary = "#fff"', "primary is missing"),
        ('primary = "#12"', "is no color"),
        ('primary = "#123456"\nprimari = "#fff"', 'Did you mean "primary"'),
        ('primary = "#123456"\n[variables]\nribbon-sink = "reddish"', 'ribbon-sink = "reddish" is no color'),
        ('primary = "#123456"\nvariables = 3', "variables is no table"),
    ],
)
def test_a_bad_theme_names_file_and_reason(tmp_path, text, reason):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        load(path)
    assert str(path) in refused.value.title
    assert reason in refused.value.detail


def test_a_user_theme_replaces_a_bundled_one_and_bad_ones_are_left_out(tmp_path):
    text = (bundled_themes_dir() / "kvchat-dark.toml").read_text()
    (tmp_path / "kvchat-dark.toml").write_text(text.replace("#6cb6eb", "#010203"))
    (tmp_path / "broken.toml").write_bytes(b"\xff\xfe")
    themes, problems = load_all([tmp_path, tmp_path / "missing"])
    assert themes["kvchat-dark"].primary == "#010203"
    assert len(problems) == 1
    assert "broken.toml" in problems[0].title
