"""The READMEs are correct: their commands, links, modes, numbers and the transcript."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import typer

import kvchat
from kvchat.cli.main import app
from kvchat.config.modes import registered
from kvchat.protocol.messages import Sampling

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "kvchat/bench/README.md", "kvchat/README.md", "kvchat/tui/README.md", "kvchat/cli/README.md")
FRONT, BENCH, STRUCTURE, KEYS, COMMANDS = (ROOT / name for name in NAMES)
TEXTS = {path: path.read_text(encoding="utf-8") for path in (FRONT, BENCH, STRUCTURE, KEYS, COMMANDS)}
LINKS = [(path, link) for path, text in TEXTS.items() for link in sorted(set(re.findall(r"\]\(([^)#:]+)\)", text)))]
RESULTS = sorted(path.stem for path in (ROOT / "kvchat/bench/results").glob("*.json"))
STORIES = ("a whale", "a lighthouse", "two brothers")
SHELL = [
    line.split("   #")[0].strip()
    for text in TEXTS.values()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("kvchat ")
]


def tables() -> ModuleType:
    """The script that generates the tables."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / ".ci" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("result", RESULTS)
def test_each_result_has_its_generated_table(result):
    assert f"<!-- {result} -->\n\n{tables().table(result)}\n\n<!-- end -->" in TEXTS[BENCH], "run .ci/tables.py --write"


def test_the_keys_match_the_action_table():
    assert tables().keys() in TEXTS[KEYS], "run .ci/tables.py --write"


def test_the_recall_table_matches_the_results():
    assert f"<!-- recalled -->\n\n{tables().recalled()}\n\n<!-- end -->" in TEXTS[FRONT], "run .ci/tables.py --write"


def test_continuous_integration_runs_the_readmes_test_command():
    command = re.search(r"&& \.venv/bin/python (-m pytest[^\n]*)", TEXTS[FRONT]).group(1)
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command in run
    assert re.search(r"pip install -e '(\.\[test\])'", TEXTS[FRONT]).group(1) in run


@pytest.mark.parametrize(("path", "target"), LINKS, ids=str)
def test_linked_files_exist(path, target):
    assert (path.parent / target).exists()


@pytest.mark.parametrize("mode", registered())
def test_every_mode_has_a_row(mode):
    text, folder = (STRUCTURE, "comparison/") if registered()[mode].for_comparison else (FRONT, "")
    assert re.search(rf"^\| {mode} \|.*modes/{folder}{mode}\.py", TEXTS[text], re.MULTILINE)


@pytest.mark.parametrize("command", SHELL)
def test_commands_and_their_flags_exist(command):
    words = shlex.split(command)[1:]
    level = typer.main.get_command(app)
    while words and words[0] in getattr(level, "commands", {}):
        level = level.commands[words.pop(0)]
    known = {option for parameter in level.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.slow("the bundled model answers and its heads are measured")
def test_the_python_example_runs(capsys):
    example = re.search(r"```python\n(import kvchat\n.*?)```", TEXTS[STRUCTURE], re.DOTALL).group(1)
    exec(compile(example, "the example", "exec"), {})
    printed = capsys.readouterr().out
    for piece in ("length: ", "streaming: budget = 1 is not valid.", "[('full', ", "('sync', "):
        assert piece in printed


@pytest.mark.slow("the bundled model answers five times")
def test_the_bundled_model_answers_as_in_the_transcript():
    fact, reply, between, question, recalled = (
        re.search(r"```text\n(.*?)```", TEXTS[FRONT], re.DOTALL).group(1).splitlines()
    )
    assert "three stories" in between
    session = kvchat.load(mode="speculative", budget=int(re.search(r"budget of (\d+)", between).group(1)))
    sampling = Sampling(temperature=0, max_new_tokens=200)
    answers = [
        "".join(session.chat(text, sampling)).strip()
        for text in (fact[2:], *(f"Tell me a story about {what}." for what in STORIES), question[2:])
    ]
    assert (answers[0], answers[-1]) == (reply.strip(), recalled.strip())
