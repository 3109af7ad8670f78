"""jinja's sandbox as transformers sets it up, in which no single operation makes anything large.

Between two operations of the interpreter a template can be stopped (``limits``), within one it cannot: ``'x' * 10**10``
is one. So whatever can make much of little is refused before it runs: operators, literals, filters, calls and the
joining of text. Every value then weighs at most the limit, and what the other operations do to it takes an instant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from kvchat.engine.generate.limits import LimitExceededError

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
