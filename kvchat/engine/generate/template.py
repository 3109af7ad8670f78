"""The chat template of a model: a program from elsewhere, limited in time, in memory and in what it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, meta

from kvchat.engine.generate.limits import LimitExceededError, limited
from kvchat.engine.generate.sandbox import BoundedEnvironment
from kvchat.protocol.template_args import GIVEN
from kvchat.text_file import unmarked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS, BYTES = 2.0, 2**27  # a template takes milliseconds, and a few times the conversation
SOURCE = 2**18  # characters; the longest in use have a tenth of that
KEPT_CODE = 4


class ChatTemplate:
    """The template of ``tokenizer``: it gives what the tokenizer's ``apply_chat_template`` gives with ``variables``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._tokenizer = tokenizer
        self._variables = variables
        self._environment = BoundedEnvironment()

    def render(self, messages: Sequence[Mapping[str, Any]], clock: datetime) -> str:
        """The text of a conversation, at whose end the model answers; ``clock`` is the time that the template is told.

        Raises:
            LimitExceededError: the template takes too long, or makes too much.
            Exception: whatever the template raises.
        """
        self._environment.clock = clock
        return limited(lambda: self._rendered(list(messages)), SECONDS, BYTES)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables that the template looks at, but for those that every template is given."""
        source = self._tokenizer.chat_template
        if not isinstance(source, str) or len(source) > SOURCE:
            return ()
        try:
            parsed = self._environment.parse(unmarked(source))
        except (TemplateError, RecursionError):  # told where it is rendered
            return ()
        known = meta.find_undeclared_variables(parsed) - GIVEN - self._tokenizer.special_tokens_map.keys()
        return tuple(sorted(known - self._environment.globals.keys()))

    def _rendered(self, messages: list[Mapping[str, Any]]) -> str:
        source = self._tokenizer.get_chat_template()
        if not isinstance(source, str):
            raise TypeError(f"it is no text but {type(source).__name__}")
        if len(source) > SOURCE:
            raise LimitExceededError(f"It has {len(source):,} characters itself")
        code = _compile(unmarked(source))
        template = Template.from_code(self._environment, code, self._environment.make_globals(None))
        self._environment.begin(messages)
        try:
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokenizer.special_tokens_map,
                **self._variables,
            )
        finally:
            self._environment.forget()


@lru_cache(KEPT_CODE)
def _compile(source: str) -> CodeType:
    return BoundedEnvironment().compile(source)
