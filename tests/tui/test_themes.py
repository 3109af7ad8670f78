"""Bundled themes are complete; an invalid theme is reported with the reason."""

from dataclasses import replace

import pytest
from support.app_driver import ask, drawn, is_finished, press, submit, toasts
from textual.color import Color

from kvchat.errors import UsageError
from kvchat.paths import bundled_themes_dir
from kvchat.tui.themes import ANSI, DEFAULT, DIM, RIBBON_DEFAULTS, load, load_all, suited

BUNDLED, PROBLEMS = load_all(())
COLORED = [theme for theme in BUNDLED.values() if not theme.ansi]
SURFACES = ("background", "surface", "panel")
TEXT = ("foreground", "primary", "secondary", "accent", "success", "warning", "error")


def luminance(color):
    """Relative luminance by WCAG 2.1."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in color.rgb)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_bundled_themes_are_complete():
    assert not PROBLEMS
    assert len(BUNDLED) >= 6
    assert {DEFAULT, ANSI} <= set(BUNDLED)
    assert {theme.dark for theme in COLORED} == {True, False}
    for theme in BUNDLED.values():
        assert set(theme.variables) >= set(RIBBON_DEFAULTS)


@pytest.mark.parametrize("theme", COLORED, ids=lambda theme: theme.name)
def test_text_is_readable_on_every_surface(theme):
    for surface in map(Color.parse, (getattr(theme, name) for name in SURFACES)):
        text = {name: Color.parse(getattr(theme, name)) for name in TEXT}
        text["muted"] = surface.blend(surface.get_contrast_text(1), 0.6)  # Textual's $text-muted is "auto 60%"
        text["dim"] = surface.blend(text["foreground"], DIM)
        faint = {name: round(ratio, 2) for name, color in text.items() if (ratio := contrast(color, surface)) < 4.5}
        assert not faint, surface.hex
    assert theme.to_color_system().generate()["text-muted"] == "auto 60%"


@pytest.mark.parametrize("theme", COLORED, ids=lambda theme: theme.name)
def test_ribbon_colors_stand_out_from_the_background(theme):
    background = Color.parse(theme.background)
    colors = {name: Color.parse(theme.variables[name]) for name in RIBBON_DEFAULTS}
    assert not {name: color.hex for name, color in colors.items() if contrast(color, background) < 3}


async def test_every_word_is_readable_in_every_theme(running, monkeypatch):
    monkeypatch.setenv("FAKE_REPEAT", "60")
    async with running(size=(200, 60)) as (app, pilot, until):
        app.chat.add_class("figures-all")
        submit(app, "/mode speculative")
        await until(lambda: app.controller.state.mode == "speculative")
        submit(app, "hello")
        await until(lambda: is_finished(app) and "stored" in drawn(app))
        for theme in COLORED:
            app.use_theme(theme.name)
            await until(lambda theme=theme: app.chat.styles.background == Color.parse(theme.background))
            await pilot.pause()
            faint = {
                segment.text.strip(): round(ratio, 2)
                for strip in app.screen._compositor.render_strips()
                for segment in strip
                if any(map(str.isalpha, segment.text)) and (ratio := contrast_of(segment.style)) < 2.7
            }
            assert not faint, theme.name


def contrast_of(style):
    color, background = (Color.from_rich_color(one) for one in (style.color, style.bgcolor))
    return contrast(color, background)


def test_the_ansi_theme_leaves_all_colors_to_the_terminal():
    theme = BUNDLED[ANSI]
    used = [getattr(theme, name) for name in (*SURFACES, *TEXT)] + [theme.variables[name] for name in RIBBON_DEFAULTS]
    assert all(color.startswith("ansi_") for color in used)


async def test_a_custom_ansi_theme_needs_no_variables(running, config, tmp_path):
    (tmp_path / "mine.toml").write_text('primary = "ansi_green"\nansi = true\ndark = false\n')
    async with running(replace(config, theme_dirs=(tmp_path,), theme="mine")) as (app, _pilot, until):
        press(app, "f2")
        await until(lambda: app.screen is not app.chat)
        assert (app.theme, app.native_ansi_color) == ("mine", True)


@pytest.mark.parametrize(
    ("term", "others", "name"),
    [
        ("xterm", {}, ANSI),
        ("linux", {}, ANSI),
        ("xterm-256color", {}, DEFAULT),
        ("xterm", {"COLORTERM": "truecolor"}, DEFAULT),
        ("xterm-256color", {"NO_COLOR": "1"}, ANSI),
        ("xterm-256color", {"TEXTUAL_COLOR_SYSTEM": "standard"}, ANSI),
        ("xterm", {"TEXTUAL_COLOR_SYSTEM": "truecolor"}, DEFAULT),
    ],
)
def test_terminals_with_few_colors_get_the_ansi_theme(monkeypatch, term, others, name):
    for variable in ("COLORTERM", "NO_COLOR", "TEXTUAL_COLOR_SYSTEM"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"TERM": term, **others}.items():
        monkeypatch.setenv(variable, value)
    assert suited() == name


async def test_an_unknown_theme_names_the_users_theme_folder(running, config, tmp_path):
    async with running(replace(config, theme="nrod", theme_dirs=(tmp_path,)), ready=False) as (app, _pilot, until):
        await until(lambda: str(tmp_path) in toasts(app))


async def test_no_color_removes_all_colors(running, config, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(replace(config, theme=ANSI)) as (app, _pilot, until):
        await ask(app, "hello")
        await until(lambda: "❯ hello" in drawn(app))
        strips = app.screen._compositor.render_strips()
        styles = [segment.style for strip in strips for segment in strip if segment.style]
        colors = [color for style in styles for color in (style.color, style.bgcolor)]
        assert colors
        assert all(color is None or color.is_default for color in colors)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("primary = ", "Invalid value"),
        ('secondary = "#fff"', "primary is missing"),
        ('primary = "#12"', "is not a color"),
        ('primary = "#123456"\nprimari = "#fff"', '"primary"?'),
        ('primary = "#123456"\n[variables]\nribbon-sink = "reddish"', 'ribbon-sink = "reddish"'),
        ('primary = "#123456"\nvariables = 3', "variables"),
        (f"a{'.a' * 5000} = 1", "more than"),
        (f"a = {'[' * 5000}", "more than"),
    ],
)
def test_an_invalid_theme_names_file_and_reason(tmp_path, text, reason):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        load(path)
    assert str(path) in refused.value.title
    assert reason in refused.value.detail


def test_user_themes_replace_bundled_and_invalid_are_skipped(tmp_path):
    text = (bundled_themes_dir() / "kvchat-dark.toml").read_text()
    (tmp_path / "kvchat-dark.toml").write_text("\ufeff" + text.replace("#6cb6eb", "#010203"))
    (tmp_path / "broken.toml").write_bytes(b"\xff\xfe")
    themes, problems = load_all([tmp_path, tmp_path / "missing"])
    assert themes["kvchat-dark"].primary == "#010203"
    assert len(problems) == 1
    assert "broken.toml" in problems[0].title
