"""Templates that would take all memory or all time are stopped before they do."""

from __future__ import annotations

import time
import tracemalloc
from datetime import datetime

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvchat import paths
from kvchat.engine.template import ChatTemplate, LimitExceededError

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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_at_once_and_in_little_memory(tokenizer, name: str) -> None:
    tokenizer.chat_template = HOSTILE[name]
    rendered = ChatTemplate(tokenizer)
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError):
            rendered.render([{"role": "user", "content": "What is 6 * 7?"}], datetime.now())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert name in WATCHED or peak < 200 * 2**20
    assert time.process_time() - began < 10
