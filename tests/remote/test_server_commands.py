"""Commands and the engine's process if a server has the model: results, refusals, needed packages."""

import asyncio
import json
import subprocess
import sys

import pytest
from support.command_line import run_in_sequence
from support.environment import environ

from kvchat import libraries
from kvchat.engine.worker import Loader
from kvchat.errors import ModelError, UsageError
from kvchat.models import checkpoint
from kvchat.protocol.messages import Load, Plan
from kvchat.tui.models import of_servers


@pytest.mark.slow("commands in their own process")
def test_only_the_answer_is_printed_to_stdout(serve):
    server = serve()
    ask = ("ask", "Hi.", "-m", server.url)
    done, as_json = run_in_sequence([(*ask, "--stats"), (*ask, "--json")], environ())
    assert (done.code, done.out) == (0, "Hello.\n")
    assert "vLLM" in done.err
    assert "prompt_tokens" in done.err
    assert server.asked[0]["messages"] == [{"role": "user", "content": "Hi."}]
    answer = json.loads(as_json.out)
    assert (answer["text"], answer["model"], answer["mode"]) == ("Hello.", "Qwen/Qwen3-4B", "server")


CODES = {
    ("ask", "Hi.", "-m", "http://127.0.0.1:1"): 1,
    ("ask", "Hi.", "-m", "http://me:geheim@127.0.0.1:1"): 2,
    ("plan", "http://127.0.0.1:1"): 2,
    ("compare", "Hi.", "full", "sync", "-m", "http://127.0.0.1:1"): 2,
}


@pytest.mark.slow("commands in their own process")
def test_refusals_have_an_exit_code_and_no_traceback():
    for one, (words, code) in zip(run_in_sequence([*CODES], environ()), CODES.items(), strict=True):
        assert (one.code, one.out) == (code, ""), words
        assert "Traceback" not in one.err
        assert "geheim" not in one.err


@pytest.mark.slow("commands in their own process")
def test_models_of_configured_servers_are_listed(serve):
    server = serve("LM Studio")
    as_json, table = run_in_sequence([("models", "--json"), ("models",)], environ(KVCHAT_MODEL_SERVERS=server.url))
    name = f"{server.url}#gemma"
    row = {row["name"]: row for row in json.loads(as_json.out)}[name]
    assert (row["kind"], row["type"]) == ("LM Studio", "Q4_K_M · context 4,096 · loaded")
    assert name in table.out


def test_functions_for_local_models_refuse_a_server():
    with pytest.raises(ModelError, match="server"):
        checkpoint.locate("http://127.0.0.1:1", lambda stage: None)
    with pytest.raises(ModelError, match="server"):
        Loader().plan(Plan(Load("http://127.0.0.1:1")), None, lambda stage: None)
    assert Loader().fits_beside(Load("http://127.0.0.1:1"), lambda stage: None)


def test_missing_packages_name_the_install_command(monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: object() if name == "pip" else None)
    with pytest.raises(UsageError) as refused:
        Loader().open_session(Load("http://127.0.0.1:1"), lambda stage: None)
    assert all(package.partition(">")[0] in refused.value.detail for package in libraries.EXTRAS["remote"])
    assert libraries.extra("remote") in refused.value.hint


def test_the_client_is_not_imported_without_servers():
    code = (
        "import asyncio, sys; from kvchat.tui.models import of_servers; sys.modules['httpx2'] = None;"
        " assert asyncio.run(of_servers(())) == []; assert 'kvchat.remote.servers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ())
    assert done.returncode == 0, done.stderr


def test_servers_are_listed_with_the_command_for_missing_packages(monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: object() if name == "pip" else None)
    named = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    found = asyncio.run(of_servers(named))
    assert [one.name for one in found] == named
    assert all(libraries.extra("remote") in one.problem for one in found)
