"""kvchat ask: its output, options, switches, refusals and interrupts, with a fake session."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.environment import environ
from support.fake_session import PIECES, FakeSession
from support.message import lacks
from support.patience import PATIENCE_S

from kvchat import paths
from kvchat.cli import chat
from kvchat.cli.chat import compose
from kvchat.config.modes import registered
from kvchat.errors import DoesNotFitError, EngineError, UsageError
from kvchat.models import compile_ahead
from kvchat.protocol.messages import Load, Sampling, Turn

ANSWER = "".join(PIECES)
TAU_SETTINGS = {"index": "bounds", "unit": "page", "query": "last"}  # implied by tau


def prompt(session: FakeSession) -> str:
    return session.asked[-1][0][-1].content


def test_ask_prints_only_the_text(run, session):
    assert run("ask", "hello") == (0, ANSWER + "\n", "")
    assert session.asked == [((Turn("user", "hello"),), Sampling())]
    assert session.loaded == Load()
    assert session.closed


def test_ask_passes_on_model_settings(run, session):
    settings = paths.config_file()
    settings.parent.mkdir(parents=True)
    settings.write_text("[model]\nfast = false\n")
    assert run("ask", "hello", "--quantize", "int8").code == 0
    assert session.loaded == Load(quantize="int8", fast=False)


def test_model_notes_go_to_stderr(run, session):
    session.notes = ("No template.",)
    assert run("ask", "hello") == (0, ANSWER + "\n", "kvchat: No template.\n")


@pytest.mark.parametrize("interrupted", [False, True])
def test_ask_ends_after_compiling_or_on_ctrl_c(interrupted, run, session, monkeypatch):
    closed = []

    def finish(progress):
        closed.append(session.closed)
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(compile_ahead, "finish", finish)
    assert run("ask", "hello") == (0, ANSWER + "\n", "")
    assert closed == [True]


def test_a_full_disk_behind_stdout_is_a_one_line_error():
    command = [sys.executable, "-m", "kvchat", "modes"]
    with open("/dev/full", "w") as full:
        outcome = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert outcome.returncode == 1
    assert os.strerror(errno.ENOSPC) in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_flags_reach_the_session(run, session):
    flags = shlex.split(
        "ask hello -m there --device cpu --dtype bfloat16 --mode speculative --budget 512 --param tau=0.5"
        " --system Short. --max-new-tokens 9 --temperature 0 --top-k 3 --top-p 0.5 --min-p 0.1"
        " --repetition-penalty 1.1 --seed 0 --stop a --stop b"
    )
    assert run(*flags).err == ""
    assert session.loaded
    mode_params = session.loaded.mode_params
    assert session.loaded == Load("there", "cpu", "bfloat16", "speculative", mode_params=mode_params)
    assert mode_params["speculative"] == {"budget": 512, "tau": 0.5, **TAU_SETTINGS}
    assert mode_params["streaming"] == {"budget": 512}
    assert "freeze" not in mode_params, "its budget is its own, and tau of one mode is unrelated to that of another"
    turns, sampling = session.asked[0]
    assert turns == (Turn("system", "Short."), Turn("user", "hello"))
    assert sampling == Sampling(0, 3, 0.5, 0.1, 1.1, seed=0, stop=("a", "b"), max_new_tokens=9)


def test_text_is_streamed(run, session, capfd):
    seen = []
    session.on_token = lambda _session, _n: seen.append(capfd.readouterr().out)
    run("ask", "hello")
    assert tuple(seen) == ("", *PIECES[:-1])


def test_json_is_one_object_with_the_promised_keys(run, session):
    result = json.loads(run("ask", "hello", "--json", "--mode", "streaming").out)
    stats = result.pop("stats")
    assert result == {
        "text": ANSWER,
        "token_ids": [100, 101, 102, 103, 104],
        "model": "fake",
        "mode": "streaming",
        "finish_reason": "eos",
    }
    promised = "prompt_tokens generated_tokens total_tokens active_tokens ttft_s prefill_tokens_per_s"
    promised += " decode_tokens_per_s kv_device_bytes kv_host_bytes recalled_bytes recall_hit_rate corrections switches"
    promised += " corrected_share mean_cosine recall_ms_p50 recall_ms_p95 exposed_ms_p50 exposed_ms_p95"
    promised += " coverage lowest_coverage"
    assert set(promised.split()) <= set(stats)
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["switches"]) == (7, 5, [])


def test_stats_go_to_stderr(run, session):
    outcome = run("ask", "hello", "--stats")
    assert outcome.out == ANSWER + "\n"
    rows = dict(line.rsplit(maxsplit=1) for line in outcome.err.splitlines())
    assert rows["heads corrected"] == "20%"
    assert (rows["generated_tokens"], rows["ttft_s"], rows["switches"]) == ("5", "-", "0")


def test_piped_text_is_the_prompt_or_a_file_before_it(run, session):
    run("ask", stdin="grüß\n".encode())
    assert prompt(session) == "grüß"
    run("ask", "Sum up:", stdin=b"a\nb\n")
    assert prompt(session) == "File stdin:\n```\na\nb\n```\n\nSum up:"
    run("ask", "Sum up:", stdin=b" \n")
    assert prompt(session) == "Sum up:"


def test_files_come_before_the_prompt_with_their_names(run, session, tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("1\n")
    two.write_text("2\n")
    run("ask", "Which?", "-f", str(one), "--file", str(two))
    assert prompt(session) == f"File {one}:\n```txt\n1\n```\n\nFile {two}:\n```txt\n2\n```\n\nWhich?"


@pytest.mark.parametrize("stdin", [None, b"", b" \n"])
def test_an_empty_prompt_is_refused_before_loading(run, session, stdin):
    outcome = run("ask", stdin=stdin)
    assert (outcome.code, outcome.out) == (2, "")
    assert "prompt" in outcome.err
    assert run("ask", "  ", stdin=stdin).code == 2
    assert session.loaded is None


def test_invalid_utf8_is_rejected_with_its_position(run, session, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"gr\xfc\xdf")
    assert not lacks(run("ask", stdin=b"ab\xff").err, "stdin", "Byte 2", "0xff")
    assert not lacks(run("ask", "x", "-f", str(file)).err, str(file), "Byte 2", "0xfc")
    assert not lacks(run("ask", os.fsdecode(b"abc\xff")).err, "prompt", "Byte 3")
    missing = tmp_path / "no"
    assert not lacks(run("ask", "x", "-f", str(missing)).err, str(missing), os.strerror(errno.ENOENT))
    assert session.loaded is None


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        (["--mode", "frezee"], ("--mode", '"frezee"', "full, freeze")),
        (["--param", "tua=1"], ('"tua"', '"tau"')),
        (["--param", "tau"], ('--param "tau"', "KEY=VALUE")),
        (["--mode", "freeze", "--param", "tau=x"], ("--param tau", '"x"')),
        (["--param", "tau=1"], ("--param freeze.tau=", "--param speculative.tau=")),
        (["--param", "fronze.tau=1"], ('"fronze"', '"freeze"')),
        (["--param", "sync.tau=1"], ("sync", '"tau"')),
        (["--budget", "3"], ('--budget: "3"', "64")),
        (["--budget", "abc"], ('--budget: "abc"', "64")),
        (["--temperature", "abc"], ('--temperature: "abc"', "100")),
        (["--device", "tpu"], ('--device: "tpu"',)),
        (["--switch-at", "x:full"], ('--switch-at "x:full"', "N:MODE")),
        (["--mode", "s"], ('"s"', "speculative, streaming, sync")),
        (["--switch-at", "3:fulll"], ('"fulll"', '"full"')),
    ],
)
def test_invalid_flags_are_rejected_before_loading(run, session, args, facts):
    outcome = run("ask", "hello", *args)
    assert (outcome.code, outcome.out, session.loaded) == (2, "", None)
    assert not lacks(outcome.err, *facts)


def test_unknown_options_and_invalid_numbers_are_usage_errors(run):
    assert run("ask", "hello", "--nonsense").code == 2
    assert run("bench", "decode", "--steps", "x").code == 2


def test_mode_prefixes_are_accepted(run, session):
    outcome = run("ask", "hello", "--mode", "spec", "--budget", "512", "--switch-at", "2:STREAM", "--json")
    assert session.loaded
    assert (session.loaded.mode, session.loaded.mode_params["speculative"]) == ("speculative", {"budget": 512})
    assert json.loads(outcome.out)["stats"]["switches"] == [{"after": 2, "mode": "streaming"}]


def test_a_parameter_without_effect_is_reported(run, session):
    outcome = run("ask", "hello", "--budget", "512")
    assert not lacks(outcome.err, "--budget", "full", "speculative, streaming, sync", "--param resident=")
    assert outcome.code == 0
    assert run("ask", "hello", "--budget", "512", "--switch-at", "1:streaming").err == ""
    assert run("ask", "hello", "--mode", "auto", "--budget", "512", "--param", "speculative.window=64").err == ""
    assert "sigma" in run("ask", "hello", "--mode", "auto", "--param", "sigma=8").err


@pytest.mark.parametrize(
    "flags", ["--mode freeze --budget 512", "--mode freeze --param budget=512", "--switch-at 1:freeze,budget=512"]
)
def test_a_budget_for_freeze_warns_of_its_cost(run, session, flags):
    outcome = run("ask", "hello", *flags.split())
    assert outcome.code == 0
    assert outcome.err == f"kvchat: freeze: {registered()['freeze'].own['budget']}.\n"
    assert session.loaded
    assert "speculative" not in session.loaded.mode_params
    assert run("ask", "hello", "--mode", "freeze", "--param", "budget=auto").err == ""


def test_switches_happen_after_the_given_tokens(run, session):
    flags = [
        "--switch-at",
        "4:full",
        "--switch-at",
        "2:speculative,budget=128,tau=0.9",
        "--param",
        "speculative.sink=4",
    ]
    result = json.loads(run("ask", "hello", "--json", *flags).out)
    assert result["stats"]["switches"] == [{"after": 2, "mode": "speculative"}, {"after": 4, "mode": "full"}]
    assert result["mode"] == "full"
    run("ask", "hello", *flags[2:])
    assert session.params == {"budget": 128, "tau": 0.9, **TAU_SETTINGS}
    assert session.loaded
    assert session.loaded.mode_params["speculative"] == {"sink": 4}


def test_a_refused_switch_is_reported_and_the_answer_continues(run, session):
    session.failure = DoesNotFitError("Too small.", "It needs 96.")
    expected = (3, ANSWER + "\n", f"kvchat: {session.failure}\n")
    assert run("ask", "hello", "--switch-at", "2:streaming,budget=64") == expected


def test_an_unreached_switch_is_reported(run, session):
    outcome = run("ask", "hello", "--switch-at", "99:streaming")
    assert (outcome.code, outcome.out) == (0, ANSWER + "\n")
    assert not lacks(outcome.err, "streaming", "99 tokens")


def test_a_prompt_that_does_not_fit_exits_with_3(run, session):
    session.error = DoesNotFitError("Too long.", "9 tokens, the context 8.", "Shorten it.")
    outcome = run("ask", "hello")
    assert outcome.code == 3
    assert outcome.err == f"kvchat: {session.error}\n"
    session.error = EngineError("Broken.")
    assert run("ask", "hello") == (1, "The quick\n", "kvchat: Broken.\n"), "the partial text ends its line"


def test_unexpected_errors_name_the_log_with_the_traceback(run, session):
    session.error = ZeroDivisionError("one\ntwo")
    outcome = run("ask", "hello")
    assert outcome.code == 1
    log = paths.log_file()
    assert not lacks(outcome.err, "ZeroDivisionError: one", str(log))
    assert outcome.err.count("\n") == 1
    assert "Traceback" in log.read_text()


def test_without_a_log_the_traceback_is_shown(run, session):
    session.error = ZeroDivisionError("one")
    paths.data_dir().write_text("a file where the folder should be")
    outcome = run("ask", "hello")
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert str(paths.data_dir()) in outcome.err


def test_interrupting_keeps_the_text_and_exits_with_130(run, session):
    def interrupt(_session, n):
        if n == 2:
            os.kill(os.getpid(), signal.SIGINT)

    session.on_token = interrupt
    handler = signal.getsignal(signal.SIGINT)
    assert run("ask", "hello") == (130, "The quick\n", "")
    assert json.loads(run("ask", "hello", "--json").out)["finish_reason"] == "stopped"
    assert signal.getsignal(signal.SIGINT) == handler


def test_an_interrupt_before_the_answer_begins_is_not_lost(run, session, monkeypatch):
    answer = session.answer

    def interrupt_while_encoding(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return answer(*args)

    monkeypatch.setattr(session, "answer", interrupt_while_encoding)
    assert run("ask", "hello") == (130, "\n", "")


def test_a_second_interrupt_does_not_wait(run, session):
    session.on_token = lambda _session, n: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)] if n == 2 else None
    outcome = run("ask", "hello")
    assert (outcome.code, outcome.out) == (130, "The quick")
    assert "Traceback" not in outcome.err


ASK_A_FAKE = """
import sys, kvchat
from support.fake_session import FakeSession
kvchat.open_session = FakeSession(["line\\n"] * 100_000).open
sys.argv[1:] = ["ask", "hello"]
from kvchat.cli.main import main
main()
"""


def test_a_closed_pipe_ends_ask_quietly():
    pipe, command = subprocess.PIPE, [sys.executable, "-c", ASK_A_FAKE]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ(TERM="dumb")) as child:
        child.stdin.close()
        assert child.stdout.readline() == b"line\n"
        child.stdout.close()
        assert child.wait(PATIENCE_S) == 0
        assert child.stderr.read() == b""


# ---- Prompts from files, pipes and stdin, all of limited size


def test_pipes_are_read_and_endless_ones_rejected(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=("from a pipe",), daemon=True).start()
    assert "from a pipe" in compose("", [pipe], b"")
    monkeypatch.setattr(chat, "MAX_BYTES", 2**20)
    endless = threading.Thread(target=_write_until_closed, args=(pipe,), daemon=True)
    endless.start()
    with pytest.raises(DoesNotFitError, match=r"1\.0 MiB"):
        compose("", [pipe], b"")
    endless.join()


def test_an_invalid_path_is_reported(tmp_path):
    with pytest.raises(UsageError, match="too long"):
        compose("", [tmp_path / ("x" * 300)], b"")


def test_endless_stdin_is_rejected(run, monkeypatch):
    monkeypatch.setattr(chat, "MAX_BYTES", 100)
    outcome = run("ask", stdin=b"x" * 101)
    assert (outcome.code, outcome.out) == (3, "")
    assert not lacks(outcome.err, "stdin", "100 B")


def test_waiting_for_stdin_is_reported(monkeypatch):
    receiving, sending = os.pipe()
    monkeypatch.setattr(chat, "PATIENCE_S", 0.0)
    monkeypatch.setattr(chat, "note", lambda _text: os.close(sending))
    with os.fdopen(receiving) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert chat.piped() == b""


def _write_until_closed(pipe: Path) -> None:
    with pipe.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 2**16)
        except BrokenPipeError:
            return


def test_windows_line_endings_become_newlines(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\r\ntwo\r\n")
    monkeypatch.setattr(chat, "piped", lambda: b"three\r\nfour\r\n")
    (asked,) = chat.turns("five\r\nsix", [file], "")
    assert "\r" not in asked.content
    for lines in ("one\ntwo\n", "three\nfour\n", "five\nsix"):
        assert lines in asked.content


# ---- ``kvchat ask`` with the bundled model, in this process; ``test_main_environment`` starts one as a user does


GREEDY = ("--temperature", "0")


@pytest.mark.slow("the bundled model is loaded")
def test_ask_prints_only_the_models_answer(run):
    plain = run("ask", "What is the capital of France?", *GREEDY)
    assert (plain.code, plain.err) == (0, "")
    as_json = run("ask", "--json", *GREEDY, stdin=b"What is the capital of France?\n")
    assert (as_json.code, as_json.err) == (0, "")
    result = json.loads(as_json.out)
    assert plain.out == result["text"] + "\n"
    assert (result["mode"], result["finish_reason"]) == ("full", "eos")
    assert len(result["token_ids"]) == result["stats"]["generated_tokens"] > 0


@pytest.mark.slow("the bundled model is loaded")
@pytest.mark.parametrize(
    ("args", "stdin", "code", "fact"),
    [
        (["hi", "-m", "/no/such/model"], b"", 2, "/no/such/model"),
        (["hi", "--mode", "streaming", "--param", "sink=64", "--param", "window=64", "--budget", "64"], b"", 2, "64"),
        ([], b"word " * 200_000, 3, "context"),
    ],
    ids=["no such model", "budget below sinks and window", "1 MB paste"],
)
def test_impossible_requests_are_one_line_errors(run, args, stdin, code, fact):
    result = run("ask", *args, stdin=stdin)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("kvchat: ")
    assert fact in result.err
    assert result.err.count("\n") == 1
