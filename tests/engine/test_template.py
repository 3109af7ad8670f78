"""Chat templates of other models render as in transformers."""

from datetime import datetime

import pytest
from jinja2.exceptions import SecurityError
from transformers import AutoTokenizer

from kvchat import paths
from kvchat.engine.template import ChatTemplate
from kvchat.errors import UsageError
from kvchat.protocol.messages import parse_args

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 6 * 7?\nAnd 100%?"},
    {"role": "assistant", "content": "<think>\nsix sevens\n</think>\n\n42"},
    {"role": "user", "content": "Thanks 😀 {} %s"},
]

REAL = {
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


@pytest.mark.parametrize("template", [None, *REAL.values()], ids=["bundled", *REAL])
def test_real_templates_render_as_in_transformers(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    long = [{**message, "content": message["content"] * 10_000} for message in MESSAGES]
    for messages in (MESSAGES, long, MESSAGES[1:3] * (500 if template == REAL["thinking"] else 1)):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(tokenizer).render(messages, datetime.now()) == expected
    tokenizer.chat_template = f"\ufeff{tokenizer.chat_template}"  # a byte order mark is not rendered
    assert ChatTemplate(tokenizer).render(messages, datetime.now()) == expected


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{{ reasoning_effort | default('medium') }}{{ bos_token }}"
)


def test_template_variables_are_found_and_set(tokenizer):
    tokenizer.chat_template = THINKS
    assert ChatTemplate(tokenizer).variables == ("enable_thinking", "reasoning_effort")
    question = [{"role": "user", "content": "Hi"}]
    given = parse_args(["enable_thinking=false", "reasoning_effort=low"])
    for variables in ({}, given):
        expected = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **variables)
        assert ChatTemplate(tokenizer, variables).render(question, datetime.now()) == expected
    assert ChatTemplate(tokenizer, given).render(question, datetime.now()).startswith("Hi<think></think>low")


def test_tool_template_is_used_when_tools_are_given(tokenizer):
    written = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{}</tool_call>"
    tokenizer.chat_template = {"default": REAL["thinking"], "tool_use": REAL["roles"] + written}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for given in ({}, {"tools": tools}):
        expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **given)
        assert ChatTemplate(tokenizer, given).render(MESSAGES, datetime.now()) == expected
    assert ChatTemplate(tokenizer).calls == ChatTemplate(tokenizer, given).calls != ""


ONE_CALL = (
    "{{ tools and '<tool_call>' }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "%s{% endfor %}{% endfor %}"
)
AS_JSON = "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
AS_TAGS = (
    "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}\n"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
)
OTHER_TAGS = "<seed:tool_call><function={{ c.function.name }}></function></seed:tool_call>"


@pytest.mark.parametrize(
    ("call", "is_known"), [(AS_JSON, True), (AS_TAGS, False), (OTHER_TAGS, False), ("", True), ("{{ 1 / 0 }}", True)]
)
def test_unknown_call_formats_are_not_parsed(tokenizer, call, is_known):
    """They would stay text, and nobody would run them; templates that write none are known by their tags."""
    tokenizer.chat_template = ONE_CALL.replace("%s", call)
    assert bool(ChatTemplate(tokenizer).calls) == is_known


def test_variables_are_parsed_as_json_or_text():
    args = ["a=true", "b=False", "c=3", 'd=["x"]', "e=low", "f=", "g=1=2"]
    assert parse_args(args) == {"a": True, "b": False, "c": 3, "d": ["x"], "e": "low", "f": "", "g": "1=2"}
    for wrong in ("a", "=3", "two words=3", "messages=[]", "add_generation_prompt=false"):
        with pytest.raises(UsageError):
            parse_args([wrong])


REACHING_OUT = ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ strftime_now.__self__.year }}"]
ASKED = [{"role": "user", "content": "What is 6 * 7?"}]


@pytest.mark.parametrize("template", REACHING_OUT)
def test_templates_reach_nothing_but_the_conversation(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(SecurityError):
        ChatTemplate(tokenizer).render(ASKED, datetime.now())
