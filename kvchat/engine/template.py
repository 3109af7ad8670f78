"""A model's chat template: third-party code.

transformers' sandbox keeps it from files and from changing its arguments. A template that never ends blocks the engine
process: /stop ends a load, during which it is tested, and /restart ends an answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from jinja2 import Template, meta
from transformers.utils import chat_template_utils

from kvchat.engine.sampler import OF_JSON
from kvchat.errors import UsageError, check_known
from kvchat.files import unmarked
from kvchat.protocol.messages import RESERVED
from kvchat.thoughts import end_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS = "tools"  # the template variable that contains the tools
# How templates with a tag write calls: like a model type that transformers knows, or a field of its response templates.
# A call of Mistral's models ends with the answer or where the next one begins.
WRITTEN_AS: dict[str, str | dict[str, Any]] = {
    "<function=": "qwen3_5",
    "<tool_call>": "qwen3",
    "<|tool_call>": "gemma4",
    "[ARGS]": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{\s]+)\s*(?:\[CALL_ID\]\w+)?\[ARGS\]",
        "close_pattern": r"(?<=\})\s*(?=\[TOOL_CALLS\]|\Z)",
        "content": "json",
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        "repeats": True,
    },
    "<|tool_call_start|>": {
        "open": "<|tool_call_start|>",
        "close": "<|tool_call_end|>",
        "content": "python-call-list",
        "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
}
JSON_CALL = ("<tool_call>", '\n{{"name": {}, "arguments": ', "}\n", "</tool_call>")  # the parts around the arguments
NOTHING = {"additionalProperties": False}  # the arguments of a tool without parameters
# A question, the tool that answers it and its arguments, to test a template with.
ASKED, CALLED, ARGUMENTS = "kvchat-asked", "kvchat_called", {"x": "y"}
PROBE_CALL: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": ASKED},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "kvchat123", "type": "function", "function": {"name": CALLED, "arguments": ARGUMENTS}}],
    },
)


class ChatTemplate:
    """Renders the template of ``tokenizer`` like the tokenizer's ``apply_chat_template`` with ``variables``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._tokenizer = tokenizer
        self._variables = variables

    def render(self, messages: Sequence[Mapping[str, Any]], clock: datetime) -> str:
        """Return the text of a conversation with the generation prompt; ``clock`` is the template's current time.

        Raises:
            Exception: whatever the template raises.
        """
        return self._render(self.source, messages, clock)

    def _render(self, source: str, messages: Sequence[Mapping[str, Any]], clock: datetime) -> str:
        given = {
            **self._tokenizer.special_tokens_map,
            TOOLS: None,
            **self._variables,
            "messages": list(messages),
            "documents": None,
            "add_generation_prompt": True,
            "strftime_now": clock.strftime,
        }
        return _compiled(source).render(given)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables that the template reads, except those that every template gets."""
        return tuple(sorted(self._names(self.source) - RESERVED - {TOOLS}))

    @property
    def calls(self) -> str:
        """How the model calls tools: transformers' response template as JSON; empty if unknown or there are no tools.

        It is the tokenizer's own, or that of templates that write calls between the same tags. A template that writes
        something else between these tags, such as GLM's, counts as unknown.
        """
        source = self._source([])
        if TOOLS not in self._names(source):
            return ""
        try:
            from transformers.cli.serving.utils import get_response_template
        except ImportError:  # an older version
            return ""
        like = next((form for tag, form in WRITTEN_AS.items() if tag in source), "")
        kind = like if isinstance(like, str) else ""
        found = get_response_template(self._tokenizer, SimpleNamespace(config=SimpleNamespace(model_type=kind)))
        if not found and isinstance(like, dict):
            found = {"start_anchor": "\0", "fields": {"tool_calls": like, "content": {"content": "text"}}}
        return json.dumps(found) if found and self._is_written(source, found) else ""

    def _is_written(self, source: str, form: dict[str, Any]) -> bool:
        """Return True if a call that the template writes can be parsed by ``form``, or if it writes none."""
        try:
            written = self._render(source, PROBE_CALL, datetime.now()).rpartition(ASKED)[2]
        except Exception:  # noqa: BLE001  # templates raise anything
            return True
        written = written.removesuffix(str(self._tokenizer.eos_token))
        return CALLED not in written or any(CALLED in str(call) for call in _calls_in(written, form))

    def forced_call(self, names: Collection[str], thoughts: Sequence[str] = ()) -> str:
        """Return, as a Lark grammar for llguidance, one call of a tool of these ``names``.

        Its arguments fit the tool's JSON schema. A thought that begins with one of the tags ``thoughts`` may come
        first, if the tag is a token.

        Raises:
            UsageError: there is no such tool, or the model does not write calls as JSON between tags.
        """
        begin, head, tail, end = JSON_CALL
        sample = f"{begin}{head.format(json.dumps(CALLED))}{json.dumps(ARGUMENTS)}{tail}{end}"
        expected = [{"type": "function", "function": {"name": CALLED, "arguments": ARGUMENTS}}]
        if _calls_in(sample, json.loads(self.calls or "{}")) != expected:
            raise UsageError(
                "This model cannot be made to call a tool.",
                f"It does not write calls as JSON between {begin} and {end}.",
                "Omit tool_choice: the model then decides whether to call.",
            )
        tokens = {name: f"<[{id}]>" for name, id in self._tokenizer.get_added_vocab().items()}
        begin, end = (tokens.get(tag, json.dumps(tag)) for tag in (begin, end))
        functions = {tool["function"]["name"]: tool["function"] for tool in self._variables.get(TOOLS) or ()}
        calls = []
        for name in names:
            check_known(name, functions, "tool")
            schema = {"type": "object", **(functions[name].get("parameters") or NOTHING), "x-guidance": OF_JSON}
            named = head.format(json.dumps(name, ensure_ascii=False))
            calls.append(f"{begin} {json.dumps(named)} %json {json.dumps(schema)} {json.dumps(tail)} {end}")
        tags = [(tag, end_of(tag)) for tag in thoughts if {tag, end_of(tag)} <= tokens.keys()]
        before = " ".join(rf"({tokens[tag]} /(.|\n)*/ {tokens[end]})?" for tag, end in tags)
        return rf'start: {before} "\n\n"? ({" | ".join(calls)})'

    @property
    def source(self) -> str:
        """The template's text; of several named templates, the one for tools if tools are among the variables."""
        return self._source(self._variables.get(TOOLS))

    def _names(self, source: str) -> set[str]:
        environment = _compiled(source).environment
        known: set[str] = meta.find_undeclared_variables(environment.parse(source))
        known.difference_update(self._tokenizer.special_tokens_map, environment.globals)
        return known

    def _source(self, tools: Any) -> str:
        source: str = self._tokenizer.get_chat_template(tools=tools)
        return unmarked(source)


def _calls_in(text: str, form: dict[str, Any]) -> Sequence[Any]:
    """Return the calls that transformers finds in ``text`` with the response template ``form``."""
    from transformers.utils.chat_parsing import parse_response

    try:
        return parse_response(text, form, prefix="").get("tool_calls") or ()
    except ValueError:
        return ()


def _compiled(source: str) -> Template:
    # Not apply_chat_template, which would give the template the current time. Seen in transformers 5.23.
    compiled: Template = chat_template_utils._compile_jinja_template(source)
    return compiled
