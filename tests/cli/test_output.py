"""Output of the commands: raw to a pipe, without control characters to a terminal."""

import io
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from support.environment import environ
from support.hostile import MARKUP, SEQUENCES, forbidden_in, hostile
from support.message import lacks
from support.pty_run import PtyRun

from kvchat.cli import options, output
from kvchat.cli.main import app
from kvchat.cli.options import complete_device, complete_mode, complete_model, complete_param, complete_theme, one_of
from kvchat.cli.output import note, progress
from kvchat.config import modes, sources
from kvchat.config.modes import SHARED, BudgetParameters, FullParameters, ModeParameters, choosable
from kvchat.config.schema import Settings
from kvchat.config.validation_errors import field_at

SUPPORT = Path(__file__).parents[1]
PIECES = [*SEQUENCES.values(), MARKUP]
ASK = f"""
import os, sys
sys.path.insert(0, {str(SUPPORT)!r})
import kvchat
from kvchat.cli import main
from kvchat.errors import DoesNotFitError
from support.fake_session import FakeSession
from support.hostile import hostile
def open_session(load, progress):
    session = FakeSession({PIECES!r}, failure=DoesNotFitError(hostile("refusal")))
    session.notes = (hostile("note"),)
    session.extras = dict([(hostile("figure"), hostile("value"))])  # of a mode of another package
    progress(hostile("stage"))
    return session.open(load, progress)
kvchat.open_session = open_session
answer = sys.argv[1]
for _ in range(2):
    sys.argv = ["kvchat", "ask", "hello", "--switch-at", "1:streaming", "--stats"]
    try:
        main.main()
    except SystemExit as left:
        assert left.code == 3  # the refused switch
    os.dup2(os.open(answer, os.O_WRONLY | os.O_CREAT), 1)  # then into a file
"""


def run_in_a_terminal(code: str, *arguments: str, **variables: str) -> bytes:
    """The bytes that a Python program writes to its terminal."""
    run = PtyRun([sys.executable, "-c", code, *arguments], {**os.environ, **variables})
    try:
        assert run.finish() == 0
    finally:
        run.close()
    return run.written


def test_a_closed_stderr_does_not_crash(monkeypatch):
    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    note("The engine is restarting.")


def test_ask_sanitizes_terminal_output_but_not_files(tmp_path):
    written = run_in_a_terminal(ASK, str(tmp_path / "answer"))
    assert not forbidden_in(written)
    names = "«stage»", "«note»", "«figure»", "«value»", "«refusal»"
    assert not lacks(written.decode(), *names, "␛]52;c;aGFja2Vk␛\\", "‹U+009B›31m", MARKUP)
    assert (tmp_path / "answer").read_bytes() == "".join(PIECES).encode() + b"\n"


IN_TURN = """
import os, sys
from pathlib import Path
from kvchat.cli.main import main
for arguments in (["config", "init"], ["locate"], ["config", "show"]):
    sys.argv = ["kvchat", *arguments]
    try:
        main()
    except SystemExit as left:
        assert not left.code
    Path(os.environ["KVCHAT_CONFIG"]).write_text(os.environ["SETTINGS"])
"""


def test_foreign_values_and_paths_are_sanitized(tmp_path):
    folder = tmp_path / hostile("folder").replace("\x00", "").replace("/", "")
    folder.mkdir()
    settings = '[model]\nsystem = "\\u001b]0;hacked\\u0007\\u009b31m«value»"\n'
    own = {"KVCHAT_CONFIG": f"{folder}/config.toml", "KVCHAT_DATA_DIR": str(folder), "SETTINGS": settings}
    written = run_in_a_terminal(IN_TURN, **own)
    assert not forbidden_in(written)
    assert not lacks(written.decode(), "«folder»", "«value»")


def test_a_missing_model_is_refused_before_importing_torch():
    command = [sys.executable, "-X", "importtime", "-m", "kvchat", "ask", "hi", "-m", "./no-such-model"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 2
    assert '"./no-such-model"' in result.stderr
    assert " kvchat.cli.ask" in result.stderr
    assert " torch" not in result.stderr


def test_a_progress_stage_fits_on_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    progress("reading " * 20)
    assert len(capsys.readouterr().err.removeprefix("\r\x1b[K")) == 39


def test_piped_progress_is_an_occasional_line(capsys, monkeypatch):
    for now, stage in ((100, "one"), (104, "two"), (105, ""), (115, "three"), (124, "four"), (126, "five")):
        monkeypatch.setattr(output.time, "monotonic", lambda now=now: now)
        progress(stage)
    progress("")
    assert capsys.readouterr().err == "kvchat: five\n"


# ---- Shell completion


def names(offers):
    return [name for name, _ in offers]


def test_completions_come_from_schema_modes_and_themes(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(("line", "offered"), [("kvchat --mode sy", "sync"), ("kvchat ask --param clust", "clusters=")])
def test_bash_completion_works(line, offered):
    words = line.split()
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_KVCHAT_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "kvchat"]
    result = subprocess.run(command, capture_output=True, text=True, env=environ(**variables), timeout=600)
    assert (result.returncode, result.stdout.split()) == (0, [offered])


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("command", ["chat", "ask", "plan", "compare"])
def test_option_help_matches_the_schema(command):
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
def test_shared_mode_options_match_their_parameters(name, section):
    option = next(option for option in COMMANDS["ask"].params if option.name == name)
    assert name in SHARED
    assert option.help == section.model_fields[name].description


def test_option_choices_come_from_the_schema():
    quantize = next(option for option in COMMANDS["ask"].params if option.name == "quantize")
    assert quantize.metavar == "auto|none|int8|int4|nf4"
    offered = quantize.shell_complete(click.Context(COMMANDS["ask"]), "int")
    assert [item.value for item in offered] == ["int8", "int4"]


def test_every_setting_has_an_option_name():
    keys = {key for key, _ in sources.leaves() if len(key) == 2}
    assert {key for keys in options.KEYS.values() for key in keys} == keys


def test_each_mode_parses_an_option_once(monkeypatch):
    parse, parsed = modes.parse, []
    monkeypatch.setattr(modes, "parse", lambda mode, params: parsed.append(mode) or parse(mode, params))
    options.flags({"budget": 512, "mode": "streaming"})
    assert sorted(parsed) == sorted(modes.having("budget"))
