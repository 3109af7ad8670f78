"""A mode of another package, installed as users install it, everywhere that modes appear."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.command_line import Outcome, run_in_sequence
from support.kv_run import REFERENCES, Run
from support.message import lacks
from support.reference import FullReference
from support.toy_model import toy

from kvchat import paths
from kvchat.config.modes import AUTO, BUILT_IN, FullParameters, registered
from kvchat.errors import UsageError
from kvchat.kv.modes import implementation

pytestmark = pytest.mark.slow("a package is built, installed and used by other processes")
SOURCE = Path(__file__).parent / "support" / "plugin_mode"
ROOT = Path(__file__).parents[1]
GREEDY = ("--temperature", "0", "--max-new-tokens", "12")
PROMPT = "Tell me a story about a boat. " * 20


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the sample package, built by its own build system."""
    source, folder = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("installed")
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(source)], check=True, timeout=600)
    return folder


def run_python(installed: Path, *args: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(installed), str(ROOT))), "TERM": "dumb"}
    command = [sys.executable, *args]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=600, env=env, check=False)


def outcomes(installed: Path, *commands: list[str], **environ: str) -> list[Outcome]:
    """The outcome of each command."""
    path = os.pathsep.join((str(installed), str(ROOT)))
    return run_in_sequence(commands, {**os.environ, "PYTHONPATH": path, **environ})


@pytest.fixture(scope="module")
def answers(installed):
    """Answers in strided mode, in full mode, and in full mode with a switch to strided."""
    asked = ["ask", PROMPT, "--json", *GREEDY]
    strided = ["--mode", "strided", "--param", "window=32", "--param", "budget=64"]
    switch = ["--switch-at", "4:strided,stride=1,budget=2048"]
    return outcomes(installed, [*asked, *strided], asked, [*asked, *switch])


def write_settings(text: str) -> None:
    paths.config_file().parent.mkdir(exist_ok=True)
    paths.config_file().write_text(text)


LISTING = """
import sys
from kvchat.cli.main import main
sys.argv[1:] = ["modes", "--json"]
try:
    main()
finally:
    assert "torch" not in sys.modules
    print(sorted(name for name in sys.modules if name.startswith("kvchat_str")), file=sys.stderr)
"""


def test_the_plugin_mode_is_listed_last_without_importing_its_implementation(installed):
    result = run_python(installed, "-c", LISTING)
    assert (result.returncode, result.stderr) == (0, "['kvchat_strided', 'kvchat_strided.parameters']\n")
    listed = {mode["name"]: mode for mode in json.loads(result.stdout)}
    assert list(listed) == [AUTO, *(cls.name for cls in BUILT_IN), "strided"]
    window = {"name": "window", "default": 128, "doc": "most recent tokens, always read"}
    assert window in listed["strided"]["params"]


def test_the_plugin_mode_answers_within_its_budget(answers):
    result = answers[0]
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    assert answer["mode"] == "strided"
    assert answer["text"].strip()
    stats = answer["stats"]
    assert 32 < stats["active_tokens"] <= 64 < stats["prompt_tokens"]


def test_switching_to_the_plugin_mode_with_a_large_budget_changes_no_token(answers):
    full, entered = (json.loads(answer.out) for answer in answers[1:])
    assert [(s["at"], s["mode"]) for s in entered["stats"]["switches"]] == [(4, "strided")]
    assert full["token_ids"] == entered["token_ids"]


def test_a_chat_switches_to_the_plugin_mode_and_sets_its_parameters(installed):
    typed = "/mode strided window=64\n/set stride=4\n/set\n/set stride=0\n/mode\n/quit\n"
    chat = run_python(installed, "-m", "kvchat", "chat", "--plain", typed=typed)
    assert "[full to strided, budget 512, window 64]" in chat.stdout
    assert [line.split()[:2] for line in chat.stdout.splitlines() if line.startswith(("window", "stride"))] == [
        ["window", "64"],
        ["stride", "4"],
    ]
    assert "strided: stride = 0" in chat.stderr
    assert "* strided" in chat.stdout


class StridedReference(FullReference):
    """The window and the newest k pages among every stride-th page."""

    def reads(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        page, p = self.run.toy.geometry.page, self.p
        tokens = torch.arange(len(self.run.ids))
        last = len(self.run.ids) - 1 - p["window"]
        chosen = range(0, last // page + 1, p["stride"])[-((p["budget"] - p["window"]) // page) :]
        read = (tokens > last) | torch.isin(tokens // page, torch.tensor([*chosen]))
        return read.expand(self.run.toy.geometry.kv_heads, -1).clone()


def test_the_plugin_mode_matches_dense_attention_over_what_it_reads(monkeypatch):
    """Also with pinned messages, after truncation and after a switch; no stored byte changes."""
    monkeypatch.syspath_prepend(SOURCE)
    from kvchat_strided.parameters import StridedParameters

    monkeypatch.setitem(registered(), "strided", StridedParameters)
    monkeypatch.setitem(REFERENCES, "strided", StridedReference)
    run = Run(toy(("plain", "window"), page=8), "strided", budget=64, window=32, stride=3)
    for tokens in (100, 37):
        run.prefill(tokens)
        run.step(40)
        run.check()
    run.pin([9, 10, 26, 27, 150])
    run.step(20)
    run.truncate(120)
    run.step(20)
    run.check()
    run.switch("full")
    run.step(3)
    run.switch("strided", budget=96, window=40, stride=1)
    run.step(9)
    run.check()


def test_the_developers_readme_shows_the_plugins_code():
    section = (ROOT / "kvchat" / "README.md").read_text().split("## Adding a mode")[1]
    files = [path.read_text() for path in (SOURCE / "pyproject.toml", *(SOURCE / "kvchat_strided").glob("*.py"))]
    blocks = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 3
    assert [any(block in text for text in files) for block in blocks] == [True] * 3


def test_the_plugin_mode_has_its_own_settings_section(installed):
    write_settings('[kv]\nmode = "strided"\n[kv.strided]\nbudget = 64\nwindow = 48\n')
    commands = [["config", "show"], ["config", "schema"]]
    show, schema_of = outcomes(installed, *commands, KVCHAT_KV_STRIDED_STRIDE="3")
    shown = show.out.splitlines()
    assert 'kv.mode = "strided"   # config.toml:2' in shown
    assert "kv.strided.window = 48   # config.toml:5" in shown
    assert "kv.strided.stride = 3   # KVCHAT_KV_STRIDED_STRIDE" in shown
    schema = json.loads(schema_of.out)
    assert schema["$defs"]["StridedParameters"]["properties"]["window"]["minimum"] == 32


def test_wrong_parameters_are_rejected_and_config_init_has_the_section(installed, tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[kv.strided]\nstrde = 1\n")
    asked = ["ask", "Hello", "--mode", "strided", "--param", "stride=0"]
    refused, validated, begun = outcomes(installed, asked, ["config", "validate", str(wrong)], ["config", "init"])
    assert (refused.code, refused.out, validated.code, begun.code) == (2, "", 2, 0)
    assert not lacks(refused.err, '--param stride: "0"', "1")
    assert not lacks(validated.err, "wrong.toml:2: kv.strided.strde: ", '"stride"')
    assert validated.err.endswith("\n  strde = 1\n          ^\n")
    assert "[kv.strided]" in paths.config_file().read_text()


CHECK_DOCTOR = """
from kvchat.doctor.installation import kv_modes
check = kv_modes()
assert (check.state, "broken 1.2" in check.found) == ("warning", True), check
"""


def test_a_broken_package_is_named_and_disables_only_its_mode(installed, tmp_path):
    folder = tmp_path / "site"
    path = os.pathsep.join((str(folder), str(ROOT)))
    shutil.copytree(installed, folder)
    (folder / "broken-1.2.dist-info").mkdir(parents=True)
    (folder / "broken-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.2\n")
    (folder / "broken-1.2.dist-info" / "entry_points.txt").write_text("[kvchat.modes]\nworse = broken:Parameters\n")
    (folder / "broken.py").write_text("raise RuntimeError('It is\\nbroken')")
    (listed,) = run_in_sequence([["modes"]], {**os.environ, "PYTHONPATH": path}, before=CHECK_DOCTOR)
    assert listed.code == 0
    assert listed.out.startswith("auto ")
    assert not lacks(listed.err, '"worse" of broken 1.2', "It is")


@pytest.mark.parametrize(
    ("place", "reason"), [("nothing_like_it:Mode", "ModuleNotFoundError"), ("json:dumps", "subclass of Mode")]
)
def test_an_invalid_implementation_is_named(place, reason):
    class Parameters(FullParameters):
        implementation: ClassVar[str] = place

    with pytest.raises(UsageError) as refused:
        implementation(Parameters())
    assert not lacks(refused.value, place, reason)
