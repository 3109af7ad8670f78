"""Commands and the engine's process where a server has the model: what they do, what they refuse, what they need."""

import asyncio
import json
import subprocess
import sys

import pytest
from support.command_line import run_in_turn
from support.environment import environ

from kvchat import libraries
from kvchat.engine.worker import Loader
from kvchat.errors import ModelError, UsageError
from kvchat.models import checkpoint
from kvchat.protocol.messages import Load, Plan
from kvchat.tui.models import of_servers


@pytest.mark.slow("commands in a process of their own")
def test_one_answer_goes_to_stdout_and_the_rest_to_stderr(serve):
    server = serve()
    ask = ("ask", "Hi.", "-m", server.url)
    done, as_json = run_in_turn([(*ask, "--stats"), (*ask, "--json")], environ())
    assert (done.code, done.out) == (0, "Hello.\n")
    assert "vLLM" in done.err
    assert "prompt_tokens" in done.err
    assert server.asked[0]["messages"] == [{"role": "user", "content": "Hi."}]
    told = json.loads(as_json.out)
    assert (told["text"], told["model"], told["mode"]) == ("Hello.", "Qwen/Qwen3-4B", "server")


CODES = {
    ("ask", "Hi.", "-m", "http://127.0.0.1:1"): 1,
    ("ask", "Hi.", "-m", "http://me:geheim@127.0.0.1:1"): 2,
    ("plan", "http://127.0.0.1:1"): 2,
    ("compare", "Hi.", "full", "sync", "-m", "http://127.0.0.1:1"): 2,
}


@pytest.mark.slow("commands in a process of their own")
def test_refusals_have_a_code_and_no_traceback():
    for one, (words, code) in zip(run_in_turn([*CODES], environ()), CODES.items(), strict=True):
        assert (one.code, one.out) == (code, ""), words
        assert "Traceback" not in one.err
        assert "geheim" not in one.err


@pytest.mark.slow("commands in a process of their own")
def test_the_list_of_models_has_those_of_the_servers_in_the_settings(serve):
    server = serve("LM Studio")
    as_json, table = run_in_turn([("models", "--json"), ("models",)], environ(KVCHAT_MODEL_SERVERS=server.url))
    name = f"{server.url}#gemma"
    row = {row["name"]: row for row in json.loads(as_json.out)}[name]
    assert (row["kind"], row["type"]) == ("LM Studio", "Q4_K_M · context 4,096 · loaded")
    assert name in table.out


def test_what_needs_a_model_here_says_so():
    with pytest.raises(ModelError, match="server"):
        checkpoint.locate("http://127.0.0.1:1", lambda stage: None)
    with pytest.raises(ModelError, match="server"):
        Loader().plan(Plan(Load("http://127.0.0.1:1")), None, lambda stage: None)
    assert Loader().fits_beside(Load("http://127.0.0.1:1"), lambda stage: None)


def test_without_its_packages_the_command_that_installs_them_is_told(monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: object() if name == "pip" else None)
    with pytest.raises(UsageError) as refused:
        Loader().open_session(Load("http://127.0.0.1:1"), lambda stage: None)
    assert all(package.partition(">")[0] in refused.value.detail for package in libraries.EXTRAS["remote"])
    assert libraries.extra("remote") in refused.value.hint


def test_without_servers_nothing_of_the_client_is_imported():
    code = (
        "import asyncio, sys; from kvchat.tui.models import of_servers; sys.modules['httpx2'] = None;"
        " assert asyncio.run(of_servers(())) == []; assert 'kvchat.remote.servers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ())
    assert done.returncode == 0, done.stderr


def test_servers_that_cannot_be_asked_without_packages_are_listed_with_the_command(monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: object() if name == "pip" else None)
    named = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    found = asyncio.run(of_servers(named))
    assert [one.name for one in found] == named
    assert all(libraries.extra("remote") in one.problem for one in found)
