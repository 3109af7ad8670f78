"""Templates of others: what is genuine comes out as transformers renders it, what is hostile is refused at once."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvchat import paths
from kvchat.engine.generate.limits import LimitExceededError
from kvchat.engine.generate.template import ChatTemplate

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

HOSTILE = {
    "text times much": "{{ 'x' * (10**10) }}",
    "much times text": "{{ 10**10 * 'x' }}",
    "a power": "{{ 10 ** (10**8) }}",
    "a tower": "{% set s = namespace(x=9) %}{% for i in range(60) %}{% set s.x = s.x * s.x %}{% endfor %}{{ s.x }}",
    "items": "{% set x = [1] * 99999999 %}{{ x }}",
    "a width": "{{ '%999999999d' % 3 }}",
    "a width given": "{{ '%*d' % (999999999, 3) }}",
    "a width of the filter": "{{ '%999999999d' | format(3) }}",
    "a width of format": "{{ '{:999999999}'.format(3) }}",
    "a width given to format": "{{ '{:{}}'.format(3, 999999999) }}",
    "a width given to format_map": "{{ '{a:{b}}'.format_map({'a': 3, 'b': 999999999}) }}",
    "one value often": "{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}",
    "a method": "{{ 'x'.center(10**10) }}",
    "its name": "{{ ('x' | attr('ljust'))(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "the filter replace": "{{ ('a' * 99999) | replace('', 'b' * 99999) }}",
    "join": "{{ ('b' * 99999).join('a' * 99999) }}",
    "the filter join": "{{ range(99999) | join('b' * 99999) }}",
    "join what is made one by one": "{{ range(99999) | map('center', 99999) | join }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "strip": "{{ ('a' * 999999).strip('b' * 500000 + 'a') }}",
    "search from the right": "{{ ('a' * 999999).rfind('b' + 'a' * 500000) }}",
    "indent": "{{ 'x' | indent(10**9, true) }}",
    "indent lines": "{{ ('\\n' * 99999) | indent(99999, true, true) }}",
    "center": "{{ 'x' | map('center', 10**9) | list }}",
    "batch": "{{ [1] | batch(10**9, 1) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 5 | round(-10**9) }}",
    "round up": "{{ 5.5 | round(10**9, 'ceil') }}",
    "json": "{{ [1, [2]] | tojson(indent=10**9) }}",
    "separators": "{{ (range(99999) | list) | tojson(separators=('x' * 99999, ':')) }}",
    "lipsum": "{{ lipsum(10**7) }}",
    "a date": "{{ strftime_now('%999999999d' * 9999) }}",
    "doubling by +": (
        "{% set s = namespace(x='x') %}{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}{{ s.x }}"
    ),
    "doubling by ~": (
        "{% set s = namespace(x='x') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}"
    ),
    "doubling by blocks": (
        "{% set s = namespace(x='x') %}{% for i in range(60) %}{% set t %}{{ s.x }}{{ s.x }}{% endset %}"
        "{% set s.x = t %}{% endfor %}{{ s.x }}"
    ),
    "doubling by nesting": (
        "{% set s = namespace(x=[1]) %}{% for i in range(60) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x }}"
    ),
    "doubling by nesting in dicts": (
        "{% set s = namespace(x=1) %}{% for i in range(60) %}{% set s.x = {1: s.x, 2: s.x} %}{% endfor %}{{ s.x }}"
    ),
    "doubling by nesting in tuples": (
        "{% set s = namespace(x=1) %}{% for i in range(60) %}{% set s.x = (s.x, s.x) %}{% endfor %}{{ s.x == s.x }}"
    ),
    "doubling by calls": "{% macro f(x, n) %}{{ f([x, x], n - 1) if n else x }}{% endmacro %}{{ f(1, 60) }}",
    "doubling by a filter": (
        "{% set s = namespace(x=[1]) %}{% for i in range(60) %}{% set s.x = s.x | batch(2, s.x) | list %}{% endfor %}"
        "{{ s.x }}"
    ),
    "200 MB": "{% for i in range(99999) %}{{ 'x' * 2000 }}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}" * 3 + "{% set x = i %}" + "{% endfor %}" * 3,
    "hoarding": "{% set s = namespace(x=none) %}{% for i in range(99999) %}"
    "{% set s.x = joiner('%7d' % i ~ 'x' * 999999) if not s.x else [s.x, joiner('%7d' % i ~ 'y' * 999999)] %}"
    "{% endfor %}",
    "a long source": "x" * 2**19,
    "a constant": "{% autoescape 'x' | center(10**10) %}{% endautoescape %}",
}
# No single operation of these is large: they are stopped by who looks at the process now and then.
WATCHED = {"hoarding", "200 MB", "nested loops"}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(paths.bundled_model_dir())


@pytest.mark.parametrize("template", [None, *GENUINE.values()], ids=["bundled", *GENUINE])
@pytest.mark.parametrize("times", [1, 10_000], ids=["short", "long"])
def test_a_genuine_template_gives_what_transformers_gives(tokenizer, template: str | None, times: int) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    messages = [{**message, "content": message["content"] * times} for message in MESSAGES]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(tokenizer).render(messages) == expected


def test_many_turns_are_no_attack(tokenizer) -> None:
    tokenizer.chat_template = GENUINE["thinking"]
    messages = [MESSAGES[1], MESSAGES[2]] * 500
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(tokenizer).render(messages) == expected


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_at_once_and_in_little_memory(tokenizer, name: str) -> None:
    tokenizer.chat_template = HOSTILE[name]
    rendered = ChatTemplate(tokenizer)
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError):
            rendered.render(MESSAGES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert name in WATCHED or peak < 200 * 2**20
    assert time.process_time() - began < 10


def test_a_template_that_is_no_text_says_so(tokenizer) -> None:
    tokenizer.chat_template = 5
    with pytest.raises(TypeError, match="no text but int"):
        ChatTemplate(tokenizer).render(MESSAGES)
