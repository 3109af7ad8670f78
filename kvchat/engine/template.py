"""The chat template of a model: a program from elsewhere, limited in time and memory.

transformers' sandbox keeps it from files and from changing what it is given. Between two operations of the interpreter
it can be stopped, within one it cannot: ``10 ** 10**9`` may cost the engine's process, which people can restart.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import Template, meta
from transformers.utils import chat_template_utils

from kvchat import units
from kvchat.files import unmarked
from kvchat.process import resident_bytes
from kvchat.protocol.messages import RESERVED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SECONDS, BYTES = 2.0, 2**27  # a template takes milliseconds, and a few times the conversation
Result = TypeVar("Result")
POLL_S = 0.02
TOOLS = "tools"  # the variable that tools are given in
# The kind of model, of those that transformers knows, whose calls are written as in a template with such a tag.
WRITTEN_AS = {"<function=": "qwen3_5", "<tool_call>": "qwen3", "<|tool_call>": "gemma4"}
LOOKS = 100  # turns of a loop: at each the interpreter looks for errors that another thread has set


class ChatTemplate:
    """The template of ``tokenizer``: it gives what the tokenizer's ``apply_chat_template`` gives with ``variables``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._tokenizer = tokenizer
        self._variables = variables

    def render(self, messages: Sequence[Mapping[str, Any]], clock: datetime) -> str:
        """The text of a conversation, at whose end the model answers; ``clock`` is the time that the template is told.

        Raises:
            LimitExceededError: the template takes too long, or too much memory.
            Exception: whatever the template raises.
        """
        given = {
            **self._tokenizer.special_tokens_map,
            TOOLS: None,
            **self._variables,
            "messages": list(messages),
            "documents": None,
            "add_generation_prompt": True,
            "strftime_now": clock.strftime,
        }
        try:
            return limited(lambda: self._compiled().render(given), SECONDS, BYTES)
        except MemoryError:
            raise LimitExceededError("It takes more memory than there is") from None

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables that the template looks at, but for those that every template is given."""
        return tuple(sorted(self._names(self.source) - RESERVED - {TOOLS}))

    @property
    def calls(self) -> str:
        """How the model calls tools: transformers' response template as JSON; empty where nobody knows, or none are.

        It is the tokenizer's own, else the one for models whose template writes calls between the same tags.
        """
        source = self._source([])
        if TOOLS not in self._names(source):
            return ""
        try:
            from transformers.cli.serving.utils import get_response_template
        except ImportError:  # of an older version
            return ""
        like = next((kind for tag, kind in WRITTEN_AS.items() if tag in source), "")
        found = get_response_template(self._tokenizer, SimpleNamespace(config=SimpleNamespace(model_type=like)))
        return json.dumps(found) if found else ""

    @property
    def source(self) -> str:
        """The template itself: of several that have names the one for tools, if they are among the variables."""
        return self._source(self._variables.get(TOOLS))

    def _names(self, source: str) -> set[str]:
        environment = self._compiled().environment
        known: set[str] = meta.find_undeclared_variables(environment.parse(source))
        known.difference_update(self._tokenizer.special_tokens_map, environment.globals)
        return known

    def _compiled(self) -> Template:
        # apply_chat_template would tell the template the present time. Seen in transformers 5.23.
        compiled: Template = chat_template_utils._compile_jinja_template(self.source)
        return compiled

    def _source(self, tools: Any) -> str:
        source: str = self._tokenizer.get_chat_template(tools=tools)
        return unmarked(source)


class LimitExceededError(Exception):
    """Raised in place of the work that was stopped; its text says what was too much."""


class _Stopped(BaseException):
    """Raised in the thread that works to stop it. No ``Exception``: jinja takes some of those for values."""


def limited(work: Callable[[], Result], seconds: float, nbytes: int) -> Result:
    """Return ``work()``; stop it after ``seconds``, or once the process has grown by ``nbytes``.

    It is stopped between two operations of the interpreter: a single long one runs to its end. Where the system does
    not tell a process's memory only the time is limited.

    Raises:
        LimitExceededError: it was stopped.
    """
    reasons: list[str] = []
    done, worker = threading.Event(), ctypes.c_ulong(threading.get_ident())
    ends, largest = time.monotonic() + seconds, (resident_bytes() or 0) + nbytes

    def watch() -> None:
        while not done.wait(POLL_S):
            if time.monotonic() > ends:
                reasons.append(f"It takes more than {units.seconds(seconds)}")
            elif (resident_bytes() or 0) > largest:
                reasons.append(f"It takes more than {units.size(nbytes, 0)} of memory")
            if reasons:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(worker, ctypes.py_object(_Stopped))
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        try:
            return work()
        finally:
            done.set()
            watcher.join()
            # One that came too late is raised here. Taking it back (None) would leave Python 3.11's flag of such errors
            # set for good: every call then looks for one, and a traced generator never goes on.
            for _ in range(LOOKS if reasons else 0):
                pass
    except _Stopped:
        raise LimitExceededError(reasons[0]) from None
