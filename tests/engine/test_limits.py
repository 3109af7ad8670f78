from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

import pytest
from jinja2.exceptions import SecurityError
from support.patience import PATIENCE_S
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvchat import paths
from kvchat.engine.template import ChatTemplate, LimitExceededError, limited


def forever() -> int:
    return sum(1 for _ in itertools.count() if _ < 0)


def hoard() -> list[bytearray]:
    return [bytearray(b"x" * 2**20) for _ in itertools.count()]


def test_work_within_its_limits_gives_its_result_and_its_errors() -> None:
    assert limited(lambda: 7, 5, 2**30) == 7
    with pytest.raises(ZeroDivisionError):
        limited(lambda: 1 // 0, 5, 2**30)


def stubborn() -> int:
    while True:
        with suppress(Exception):  # as jinja does where it computes constants
            forever()


@pytest.mark.parametrize("work", [forever, stubborn])
def test_work_without_end_is_stopped(work: Callable[[], int]) -> None:
    began = time.monotonic()
    with pytest.raises(LimitExceededError, match=r"more than 200 ms"):
        limited(work, 0.2, 2**30)
    assert time.monotonic() - began < PATIENCE_S


def test_work_that_hoards_is_stopped() -> None:
    with pytest.raises(LimitExceededError, match="more than 100 MiB"):
        limited(hoard, 60, 100 * 2**20)


def test_nothing_is_left_that_stops_something_else() -> None:
    before = set(threading.enumerate())
    for seconds in (0.0, 0.02, 0.021, 0.04):
        for _ in range(5):
            try:
                limited(lambda: time.sleep(0.02), seconds, 2**30)
            except LimitExceededError:
                continue
    assert sum(range(10**6)) == 499999500000
    assert set(threading.enumerate()) <= before


def test_it_stops_work_in_any_thread() -> None:
    found: list[BaseException] = []

    def run() -> None:
        with pytest.raises(LimitExceededError) as caught:
            limited(forever, 0.1, 2**30)
        found.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    assert found


TRACED = """
import sys
from kvchat.engine.template import LimitExceededError, limited
for seconds in (5, 0):
    try:
        limited(lambda: sum(range(10**6)), seconds, 2**30)
    except LimitExceededError:
        pass
    sys.settrace(lambda *_: None)
    list(number for number in range(3))
    sys.settrace(None)
"""


def test_afterwards_a_debugger_can_step_through_a_generator() -> None:
    subprocess.run([sys.executable, "-c", TRACED], check=True, timeout=PATIENCE_S)


# ---- Templates that would take all memory or all time are stopped, and none reaches out of transformers' sandbox


HOSTILE = {
    "more than there is": "{{ 'x' * 10 ** 15 }}",
    "doubling": "{% set s = namespace(x='x') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
    "200 MB": "{% for i in range(99999) %}{{ 'x' * 2000 }}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}" * 3 + "{% set x = i %}" + "{% endfor %}" * 3,
    "recursion that doubles": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 'x' }}{% endmacro %}{{ f(60) }}",
}
REACHING_OUT = ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ strftime_now.__self__.year }}"]
MESSAGES = [{"role": "user", "content": "What is 6 * 7?"}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(paths.bundled_model_dir())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(tokenizer, name: str) -> None:
    tokenizer.chat_template = HOSTILE[name]
    began = time.process_time()
    with pytest.raises(LimitExceededError):
        ChatTemplate(tokenizer).render(MESSAGES, datetime.now())
    assert time.process_time() - began < 10


@pytest.mark.parametrize("template", REACHING_OUT)
def test_nothing_beside_the_conversation_is_in_reach(tokenizer, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(SecurityError):
        ChatTemplate(tokenizer).render(MESSAGES, datetime.now())
