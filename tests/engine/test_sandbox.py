"""Templates that would take all memory or all time are stopped, and none reaches out of transformers' sandbox."""

from __future__ import annotations

import time
from datetime import datetime

import pytest
from jinja2.exceptions import SecurityError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvchat import paths
from kvchat.engine.template import ChatTemplate, LimitExceededError

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
