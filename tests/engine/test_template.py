"""Templates of others come out as transformers renders them."""

import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime

import pytest
from jinja2.exceptions import SecurityError
from support.patience import PATIENCE_S
from transformers import AutoTokenizer

from kvchat import paths
from kvchat.engine import template
from kvchat.engine.template import ChatTemplate, LimitExceededError, limited
from kvchat.errors import UsageError
from kvchat.protocol.messages import parse_args

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 6 * 7?\nAnd 100%?"},
    {"role": "assistant", "content": "<think>\nsix sevens\n</think>\n\n42"},
    {"role": "user", "content": "Thanks 😀 {} %s"},
]

GENUINE = {
    "roles": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim + eos_token }}{% endfor %}",
    "thinking": (
        "{%- set ns = namespace(last=messages | length - 1, seen=[]) %}\n"
        "{%- for message in messages[::-1] %}{%- set index = messages | length - 1 - loop.index0 %}\n"
        "    {%- if message.role == 'user' and ns.last >= index %}{%- set ns.last = index %}{% endif %}\n"
        "    {%- set ns.seen = ns.seen + [message.role] %}\n"
        "{%- endfor %}\n"
        "{%- for message in messages %}\n"
        "    {%- set content = message.content if message.content is string else '' %}\n"
        "    {%- if '</think>' in content %}\n"
        "        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
        "        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
        "    {%- endif %}\n"
        "    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ (thought | default('')) ~ '<|im_end|>\\n' }}\n"
        "{%- endfor %}{{ ns.last }} {{ ns.seen | join(', ') }}\n"
    ),
    "macros": (
        "{% macro turn(role, text='') %}[{{ role | upper }}]{{ text | indent(2) }}{% endmacro %}"
        "{% for m in messages if m.role != 'system' %}{{ turn(m.role, text=m.content) }}{% endfor %}"
        "{% set whole %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ whole | length }}"
    ),
    "json": (
        "{{ messages | tojson(indent=2) }}{{ messages | map(attribute='role') | unique | join(' and ') }}"
        "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content.replace('%s', 'x' * 9) }}"
    ),
    "alternation": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% endif %}"
        "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ '%s: %-4d|' % (message.role, loop.index) }}{{ '{}/{}'.format(loop.index, 2 ** 3) }}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% elif loop.last %}{% break %}{% else %}{{ dict(a=m.role).items() | list }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ strftime_now('%d') | length }}{% endif %}{{ tools is none }}"
    ),
}


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(paths.bundled_model_dir())


@pytest.mark.parametrize("genuine", [None, *GENUINE.values()], ids=["bundled", *GENUINE])
def test_a_genuine_template_gives_what_transformers_gives(tokenizer, genuine):
    tokenizer.chat_template = genuine or tokenizer.chat_template
    long = [{**message, "content": message["content"] * 10_000} for message in MESSAGES]
    for messages in (MESSAGES, long, MESSAGES[1:3] * (500 if genuine == GENUINE["thinking"] else 1)):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(tokenizer).render(messages, datetime.now()) == expected
    tokenizer.chat_template = f"\ufeff{tokenizer.chat_template}"  # a mark of byte order is not rendered
    assert ChatTemplate(tokenizer).render(messages, datetime.now()) == expected


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{{ reasoning_effort | default('medium') }}{{ bos_token }}"
)


def test_its_variables_are_found_and_given_to_it(tokenizer):
    tokenizer.chat_template = THINKS
    assert ChatTemplate(tokenizer).variables == ("enable_thinking", "reasoning_effort")
    question = [{"role": "user", "content": "Hi"}]
    given = parse_args(["enable_thinking=false", "reasoning_effort=low"])
    for variables in ({}, given):
        expected = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **variables)
        assert ChatTemplate(tokenizer, variables).render(question, datetime.now()) == expected
    assert ChatTemplate(tokenizer, given).render(question, datetime.now()).startswith("Hi<think></think>low")


def test_of_templates_with_names_the_one_for_tools_is_taken_where_there_are_tools(tokenizer):
    written = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{}</tool_call>"
    tokenizer.chat_template = {"default": GENUINE["thinking"], "tool_use": GENUINE["roles"] + written}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for given in ({}, {"tools": tools}):
        expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **given)
        assert ChatTemplate(tokenizer, given).render(MESSAGES, datetime.now()) == expected
    assert ChatTemplate(tokenizer).calls == ChatTemplate(tokenizer, given).calls != ""


def test_variables_are_json_or_text():
    args = ["a=true", "b=False", "c=3", 'd=["x"]', "e=low", "f=", "g=1=2"]
    assert parse_args(args) == {"a": True, "b": False, "c": 3, "d": ["x"], "e": "low", "f": "", "g": "1=2"}
    for wrong in ("a", "=3", "two words=3", "messages=[]", "add_generation_prompt=false"):
        with pytest.raises(UsageError):
            parse_args([wrong])


def forever() -> int:
    return sum(1 for _ in itertools.count() if _ < 0)


def hoard() -> list[bytearray]:
    return [bytearray(b"x" * 2**20) for _ in itertools.count()]


def test_work_within_its_limits_gives_its_result_and_its_errors():
    assert limited(lambda: 7, 5, 2**30) == 7
    with pytest.raises(ZeroDivisionError):
        limited(lambda: 1 // 0, 5, 2**30)


def stubborn() -> int:
    while True:
        with suppress(Exception):  # as jinja does where it computes constants
            forever()


def test_work_without_end_or_that_hoards_is_stopped_in_any_thread():
    began = time.monotonic()
    for work, seconds, told in ((forever, 0.2, "200 ms"), (stubborn, 0.2, "200 ms"), (hoard, 60, "100 MiB")):
        with pytest.raises(LimitExceededError, match=f"more than {told}"):
            limited(work, seconds, 100 * 2**20)
        with ThreadPoolExecutor(1) as pool:
            assert isinstance(pool.submit(limited, work, seconds, 100 * 2**20).exception(), LimitExceededError)
    assert time.monotonic() - began < PATIENCE_S


def test_nothing_is_left_that_stops_something_else():
    before = set(threading.enumerate())
    for seconds in (0.0, 0.02, 0.021, 0.04):
        for _ in range(5):
            try:
                limited(lambda: time.sleep(0.02), seconds, 2**30)
            except LimitExceededError:
                continue
    assert sum(range(10**6)) == 499999500000
    assert set(threading.enumerate()) <= before


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


def test_afterwards_a_debugger_can_step_through_a_generator():
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
ASKED = [{"role": "user", "content": "What is 6 * 7?"}]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(tokenizer, name, monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 0.3)
    tokenizer.chat_template = HOSTILE[name]
    began = time.process_time()
    with pytest.raises(LimitExceededError):
        ChatTemplate(tokenizer).render(ASKED, datetime.now())
    assert time.process_time() - began < 10


@pytest.mark.parametrize("reaches", REACHING_OUT)
def test_nothing_beside_the_conversation_is_in_reach(tokenizer, reaches):
    tokenizer.chat_template = reaches
    with pytest.raises(SecurityError):
        ChatTemplate(tokenizer).render(ASKED, datetime.now())
