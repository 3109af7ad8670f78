"""The chat template of a model: a program from elsewhere, limited in time, in memory and in what it makes.

jinja's sandbox is set up as transformers does it. Between two operations of the interpreter a template can be stopped,
within one it cannot: ``'x' * 10**10`` is one. So whatever can make much of little is refused before it runs: operators,
literals, filters, calls and the joining of text. Every value then weighs at most the limit, and what the other
operations do to it takes an instant.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from types import CodeType, GeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from kvchat import units
from kvchat.files import unmarked
from kvchat.process import resident_bytes
from kvchat.protocol.messages import GIVEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SECONDS, BYTES = 2.0, 2**27  # a template takes milliseconds, and a few times the conversation
SOURCE = 2**18  # characters; the longest in use have a tenth of that
KEPT_CODE = 4
LIMIT = 2**20  # what a value may weigh beside twice the conversation
BITS = 2**14  # of an integer; more than Python would write as text
HELD = 4  # times the limit, of what is remembered
FEW = 32  # times that an operation may repeat what it is given without being asked how much that is
# Filters and methods whose work grows with the product of what they are given.
REPEATING = frozenset(
    {
        *("batch", "center", "expandtabs", "indent", "join", "ljust", "rjust", "round", "slice", "to_bytes", "tojson"),
        *("translate", "truncate", "urlize", "wordwrap", "xmlattr", "zfill"),
        # They search character by character.
        *("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"),
    }
)
SCOPES = frozenset({"_loop_vars", "_block_vars"})  # what jinja adds to the arguments of a call
STRFTIME_GROWTH = 256  # the C library's own limit
NUMBER = re.compile(r"\d+")
NESTED = re.compile(r"\{[^{}]*\{")  # a width that is an argument: {:{width}}
Result = TypeVar("Result")
POLL_S = 0.02
LOOKS = 100  # turns of a loop: at each the interpreter looks for errors that another thread has set
BEGINS_S = 5.0


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


class BoundedCode(CodeGenerator):
    """Code that asks the environment about every literal and every ``~``."""

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._bounded(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._bounded(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._bounded(super().visit_Tuple, node, frame)
        else:  # what is assigned to
            super().visit_Tuple(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):  # nothing runs while a template is compiled
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _bounded(self, visit: Callable[..., None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.bounded(")
        visit(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, whose values may weigh ``limit`` each.

    Text weighs its characters, a collection what is in it and 1 for each of its places. Templates are told that it is
    the time of ``clock``.
    """

    code_generator_class = BoundedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        theirs = chat_template_utils._compile_jinja_template("").environment
        super().__init__(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            extensions=[type(extension) for extension in theirs.extensions.values()],
            optimized=False,  # folding constants is running them
        )
        self.clock = datetime.now()

        def strftime_now(format: str) -> str:
            return self.clock.strftime(format)

        self.globals.update(theirs.globals, strftime_now=strftime_now)
        self.filters = {name: self._bounded_filter(name, filter_) for name, filter_ in theirs.filters.items()}
        self._weights: dict[int, tuple[object, int]] = {}
        self._remembered = 0
        self.limit = 0

    def begin(self, conversation: Any) -> None:
        """Begin to render ``conversation``, by which the limit is set."""
        self.forget()
        self.limit = LIMIT
        self.limit += 2 * self.weight(conversation)

    # ---- what is asked

    def bounded(self, value: Any) -> Any:
        """``value``; a generator is asked about with each thing that it gives.

        Raises:
            LimitExceededError: it weighs too much.
        """
        if isinstance(value, GeneratorType):
            return self._bounded_items(value)
        self._refuse_above_limit(self.weight(value))
        return value

    def joined(self, parts: tuple[Any, ...]) -> str:
        """The result of ``~``, which joins ``parts`` as text."""
        self._refuse_above_limit(self._weigh(parts))
        return str_join(parts)

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of the whole, of a macro or of a block."""
        return "".join(self._bounded_items(pieces))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._refuse_above_limit(self._weight_of_result(operator, left, right))
        return self.bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        subject = getattr(method, "__self__", None)
        named = [value for name, value in kwargs.items() if name not in SCOPES]
        self._check_call(getattr(method, "__name__", ""), subject, (*args, *named))
        return self.bounded(super().call(context, obj, *args, **kwargs))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or a context comes first

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            subject, *others = (*args[passed:], *kwargs.values())
            self._check_call("%" if name == "format" else name, subject, tuple(others))
            return self.bounded(function(*args, **kwargs))

        return bounded

    # ---- what things weigh

    def weight(self, value: Any) -> int:
        """The weight of ``value``; that of what is no text, number or collection is 1."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return 1 if value.bit_length() <= BITS else self.limit + 1
        if isinstance(value, range):
            return len(value)
        if isinstance(value, list | tuple | dict):
            known = self._weights.get(id(value))
            return known[1] if known else self._remember(value)
        return self._weigh(value) if isinstance(value, Collection) else 1

    def _weigh(self, collection: Collection[Any]) -> int:
        values = collection.values() if isinstance(collection, dict) else ()
        return len(collection) + sum(map(self.weight, collection)) + sum(map(self.weight, values))

    def _remember(self, collection: Collection[Any]) -> int:
        """Weigh a collection once: nothing in the sandbox changes one. It is held so that its id stays its own."""
        weight = self._weigh(collection)
        self._remembered += weight + 1
        if self._remembered > HELD * self.limit:
            self.forget()
        self._weights[id(collection)] = collection, weight
        return weight

    def forget(self) -> None:
        """Let go of what was weighed."""
        self._weights.clear()
        self._remembered = 0

    def _bounded_items(self, items: Iterable[Any]) -> Iterator[Any]:
        weight = 0
        for item in items:
            weight += 1 + self.weight(item)
            self._refuse_above_limit(weight)
            yield item

    def _weight_of_result(self, operator: str, left: Any, right: Any) -> int:
        """At least the weight of what an operator gives."""
        if isinstance(left, int) and isinstance(right, int):
            return self._weight_of_integer(operator, left, right)
        if operator == "*":
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            repeats = isinstance(times, int) and isinstance(repeated, str | bytes | list | tuple)
            return self.weight(repeated) * max(times, 1) if repeats else 1
        if operator == "%" and isinstance(left, str | bytes):
            text = left if isinstance(left, str) else left.decode("latin-1")
            return self._weight_of_formatted(text, right, repeats=text.count("%("), widths=text.count("*"))
        return self.weight(left) + self.weight(right)

    def _weight_of_integer(self, operator: str, left: int, right: int) -> int:
        bits = 1
        if operator == "*":
            bits = left.bit_length() + right.bit_length()
        elif operator == "**" and abs(left) > 1:
            bits = left.bit_length() * abs(right)
        return 1 if bits <= BITS else self.limit + 1

    def _weight_of_formatted(self, text: str, values: Any, repeats: int, widths: int) -> int:
        """At least the weight of ``text`` with ``values`` in it, ``repeats`` times and as the width at ``widths``."""
        written = sum(int(number[:10]) for number in NUMBER.findall(text))
        given = max((abs(value) for value in _flat([values]) if isinstance(value, int)), default=0)
        return len(text) + written + widths * given + max(repeats, 1) * self.weight(values)

    def _check_call(self, name: str, subject: Any, others: tuple[Any, ...]) -> None:
        """Refuse a filter or a method that would make much of ``subject`` and its other arguments."""
        self._refuse_above_limit(self.weight(subject))
        self._refuse_above_limit(self._weigh(others))
        if name in REPEATING:
            self._refuse_above_limit(self._weight_of_repeated(subject, others))
        elif name == "replace" and len(others) >= 2:
            text, old, new = str(subject), str(others[0]), str(others[1])
            self._refuse_above_limit(len(text) + text.count(old) * len(new))
        elif name == "%":
            self._refuse_above_limit(self._weight_of_result("%", subject, others))
        elif name in ("format", "format_map") and isinstance(subject, str):
            nested = len(NESTED.findall(subject))
            repeats = subject.count("{") - subject.count("{}")
            self._refuse_above_limit(self._weight_of_formatted(subject, others, repeats, nested))
        elif name == "strftime_now":
            self._refuse_above_limit(self._weigh(others) * STRFTIME_GROWTH)

    def _weight_of_repeated(self, subject: Any, others: tuple[Any, ...]) -> int:
        given = max((abs(other) for other in others if isinstance(other, int)), default=0)
        times = max(given, *map(self._most, others), 1)
        small, large = sorted((self._most(subject), times))
        return max(given, small * large if small > FEW else 0)

    def _most(self, value: Any) -> int:
        """The most that ``value`` can weigh, also if it is still to be generated."""
        return self.limit if isinstance(value, Iterator) else self.weight(value)

    def _refuse_above_limit(self, weight: int) -> None:
        if weight > self.limit:
            raise LimitExceededError(f"It makes something of more than {self.limit:,} characters, items or digits")


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and those of the collections among them."""
    for value in values:
        if isinstance(value, dict):
            yield from _flat(value.values())
        elif isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


class LimitExceededError(Exception):
    """Raised inside the work that is stopped; its text says what was too much."""


class _StoppedError(Exception):
    """Raised in the worker thread to stop it."""


def limited(work: Callable[[], Result], seconds: float, nbytes: int) -> Result:
    """Return ``work()``; stop it after ``seconds``, or once the process has grown by ``nbytes``.

    It is stopped between two operations of the interpreter: a single long one runs to its end. Where the system does
    not tell a process's memory only the time is limited.

    Raises:
        LimitExceededError: it was stopped; MemoryError: it asked for more than there is.
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
                ctypes.pythonapi.PyThreadState_SetAsyncExc(worker, ctypes.py_object(_StoppedError))
                return

    watcher = CheckedThread(watch)
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
    except _StoppedError:
        raise LimitExceededError(reasons[0]) from None


class CheckedThread:
    """Runs ``work`` on a new thread. ``threading.Thread`` would wait forever for one that finds no memory to start.

    The process waits for it before it exits: torch aborts a process that exits while a thread copies.

    Raises:
        MemoryError: it did not begin.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._begun, self._over = threading.Event(), threading.Event()
        self._work = work
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:  # the system refuses one
            raise MemoryError(str(error)) from None
        if not self._begun.wait(BEGINS_S):
            self._work = lambda: None  # should it begin after all
            raise MemoryError("a thread could not begin")

    @property
    def is_over(self) -> bool:
        """True once the work has ended."""
        return self._over.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the work has ended, at most ``seconds``."""
        self._over.wait(seconds)

    def _run(self) -> None:
        self._begun.set()
        atexit.register(self.join)
        try:
            self._work()
        finally:
            self._over.set()
            atexit.unregister(self.join)
