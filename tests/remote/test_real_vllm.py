"""A real vLLM for CPUs with the bundled model: chat, stop, a full context, metrics, reused prefixes.

``KVCHAT_TEST_VLLM`` is its program, in a separate environment.
"""

import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from support.fake_server import events_of, text_of
from support.llama_server import free_port

from kvchat import paths
from kvchat.errors import DoesNotFitError
from kvchat.protocol.messages import Sampling, Turn

PROGRAM = os.environ.get("KVCHAT_TEST_VLLM", "")
START_S = 400.0
GREEDY = Sampling(temperature=0, max_new_tokens=12)
STORY = Turn("user", "Tell me a story about a whale that has lost its way in the sea. " * 8)
pytestmark = pytest.mark.skipif(not PROGRAM, reason="KVCHAT_TEST_VLLM is not set")


@pytest.fixture(scope="module", params=[1, 2])
def vllm(request, tmp_path_factory):
    """The address of a server with one worker, and with two on a core each."""
    port, folder = free_port(), tmp_path_factory.mktemp("vllm")
    flags = ["--max-model-len", "2048", "--dtype", "float32", "--enable-prompt-tokens-details"]
    flags += ["--tensor-parallel-size", str(request.param)]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if request.param == 2 else {}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    command = [PROGRAM, "serve", str(paths.bundled_model_dir()), "--host", "127.0.0.1", "--port", str(port), *flags]
    log = Path(folder / "log")
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready(port):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_real_vllm_reuses_the_prefix_of_each_turn(vllm, connect):
    session = connect(vllm)
    assert (session.info.server, session.info.context) == ("vLLM", 2048)
    turns, before = [STORY], 0
    for number in range(3):
        finished = events_of(session, turns, GREEDY)[-1]
        assert finished.stats.generated_tokens <= 12
        assert finished.stats.reused_tokens >= before // 16 * 16 - 16 * (number > 0)  # whole blocks
        before = finished.stats.prompt_tokens
        turns += [Turn("assistant", finished.text), Turn("user", "And then?")]
    session.details()
    time.sleep(1)
    session.details()
    figures = session.snapshot().server
    assert not figures.missing
    assert figures.capacity > 2048
    assert figures.prefix_tokens > 0 < figures.prefix_share
    assert (figures.running, figures.waiting) == (0, 0)


def test_real_vllm_stops_when_the_client_disconnects(vllm, connect):
    session = connect(vllm)
    long = Sampling(temperature=0, max_new_tokens=1500)
    *_, finished = session.answer((STORY,), long, lambda tokens: session.cancel() if tokens >= 3 else None)
    assert finished.reason == "stopped"
    assert 3 <= finished.stats.generated_tokens < 1000
    deadline = time.monotonic() + 20
    session.details()
    while session.snapshot().server.running != 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        session.details()
    assert text_of(events_of(session, (STORY,), GREEDY))


def test_real_vllm_refuses_a_prompt_longer_than_its_context(vllm, connect):
    session = connect(vllm)
    with pytest.raises(DoesNotFitError, match="2048"):
        events_of(session, (Turn("user", "word " * 4000),), GREEDY)
    assert text_of(events_of(session, (STORY,), GREEDY))
