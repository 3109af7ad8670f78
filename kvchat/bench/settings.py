"""The settings of each measurement: one field each, with its option on the command line.

It imports no torch, so that the command line shows help and refuses wrong values quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from typer import Argument, Option

from kvchat.bench.frame import parsed, with_budgets
from kvchat.config.modes import MIN_BUDGET

VARIANT = "MODE[:KEY=VALUE,...]"
NATURAL = "natural"
Modes = Annotated[tuple[str, ...], Option("--mode", metavar=VARIANT, help="a mode and its parameters; repeatable")]
Texts = Annotated[tuple[str, ...], Option("--text", metavar="FILE", help="measure on this UTF-8 text file; repeatable")]
Seed = Annotated[int, Option(help="the same seed gives the same cases")]
Shape = Annotated[str, Option(help="random weights in the shape of llama-3.1-8b, qwen2.5-7b, ... instead of a model")]


def named(names: str) -> tuple[str, ...]:
    """Return the names between commas, or () for ``none``."""
    return tuple(name for name in names.split(",") if name not in ("", "none"))


@dataclass(frozen=True)
class Variants:
    """Measures ``modes``, each at each of ``budgets`` unless it sets one; by default the standard ones.

    Raises:
        UsageError: a mode or parameter is unknown, or a value is out of range.
    """

    STANDARD: ClassVar[tuple[str, ...]] = ("streaming", "speculative", "freeze", "sync")
    STANDARD_BUDGETS: ClassVar[tuple[int, ...]] = (512,)

    modes: Modes = ()
    budgets: Annotated[
        tuple[int, ...], Option("--budget", help="tokens per KV head, for modes that name no budget; repeatable")
    ] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        budgets = self.budgets if self.modes else self.budgets or self.STANDARD_BUDGETS
        object.__setattr__(self, "modes", with_budgets(self.modes or self.STANDARD, budgets))


@dataclass(frozen=True)
class Agreement(Variants):
    """Measure divergence from full attention. Reports KL, top-1 agreement, perplexity and attention covered.

    Without ``texts`` it uses the bundled books.
    """

    context: Annotated[int, Option(min=1, help="tokens before the decoded ones")] = 2048
    tokens: Annotated[int, Option(min=1, help="decoded tokens of a passage")] = 400
    passages: Annotated[int | None, Option(min=1, help="maximum number of passages (default: all)")] = None
    texts: Texts = ()


@dataclass(frozen=True)
class Coverage(Variants):
    """Measure the attention covered by each mode. Compares it with the best choice of as many tokens, also by head.

    Without ``texts`` it uses the bundled books.
    """

    STANDARD_BUDGETS = (128, 256, 512, 1024, 2048)

    context: Annotated[int, Option(min=1, help="tokens before the decoded ones")] = 3072
    tokens: Annotated[int, Option(min=1, help="decoded tokens of a passage")] = 32
    passages: Annotated[int, Option(min=0, help="maximum number of passages from books")] = 3
    facts: Annotated[int, Option(min=0, help="number of texts with a question about their content")] = 6
    texts: Texts = ()
    seed: Seed = 0


@dataclass(frozen=True)
class Recall(Variants):
    """Measure how many facts in long texts are found. Reports results by task, length, depth, mode and budget.

    ``inside`` 0 asks the question in its own turn; for the task switches it means ``recall.INSIDE``.
    """

    tasks: Annotated[
        tuple[str, ...],
        Option("--task", help="passkey keys chain fact name switches; repeatable"),
    ] = ("passkey", "keys", "chain", "name")
    lengths: Annotated[tuple[int, ...], Option("--length", min=16, help="tokens of a text, roughly; repeatable")] = (
        1000,
        3000,
    )
    depths: Annotated[tuple[float, ...], Option("--depth", help="depth of the fact, from 0 to 1; repeatable")] = (
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
    )
    cases: Annotated[int, Option(min=1, help="conversations per length and depth")] = 4
    keys: Annotated[int, Option(help="number of facts in tasks with several")] = 4
    inside: Annotated[int, Option(min=0, help="ask after this many tokens of an answer, in the same turn")] = 0
    seed: Seed = 0


@dataclass(frozen=True)
class Paper:
    """Reproduce tables and figures of a mode's paper. Shows published values next to measured ones.

    ``modes`` and ``budgets`` are for a study that compares modes; by default all modes, at the study's budget.

    Raises:
        UsageError: a mode or parameter is unknown, or a value is out of range.
    """

    paper: Annotated[str, Argument(metavar="PAPER", help="asr-kf-egr, lazy-pruning, synckv or freekv")]
    parts: Annotated[tuple[str, ...], Option("--part", help="a table or figure, such as table-1; repeatable")] = ()
    sizes: Annotated[
        tuple[str, ...], Option("--set", metavar="KEY=VALUE", help="set one of the study's sizes; repeatable")
    ] = ()
    modes: Modes = ()
    budgets: Annotated[
        tuple[int, ...], Option("--budget", help="tokens per KV head where modes are compared; repeatable")
    ] = ()
    texts: Texts = ()

    def __post_init__(self) -> None:
        with_budgets(self.modes, self.budgets)


@dataclass(frozen=True)
class Decode:
    """Measure time per decoded token, memory and traffic. Compares with transformers' caches in the same run.

    ``change_rates`` are "natural" or shares of 1. Without ``baselines`` it uses those that suit the device.

    Raises:
        UsageError: a mode or parameter is unknown, or a value is out of range.
    """

    shape: Shape = ""
    contexts: Annotated[
        tuple[int, ...], Option("--context", min=1, help="tokens before the measured ones; repeatable")
    ] = (512, 8192)
    modes: Modes = ("full", "full:resident=512", "streaming", "speculative", "freeze", "sync")
    budget: Annotated[int, Option(help="tokens per KV head")] = 512
    change_rates: Annotated[
        tuple[str, ...],
        Option("--change-rate", help="share of speculative's pages that is new at each step, or natural; repeatable"),
    ] = (NATURAL,)
    steps: Annotated[int, Option(min=1, help="measured tokens per round")] = 64
    rounds: Annotated[int, Option(min=1, help="rounds; each variant runs once per round")] = 5
    baselines: Annotated[
        tuple[str, ...] | None,
        Option(
            parser=named,
            metavar="NAMES",
            help="dynamic, static, offloaded, generate, llama.cpp; separated by commas, or none",
        ),
    ] = None
    prefill: Annotated[bool, Option("--prefill", help="process a prompt even with random weights")] = False
    load: Annotated[int, Option(min=0, help="measure again while this many other processes are busy")] = 0

    def __post_init__(self) -> None:
        for mode in self.modes:
            parsed(mode, self.budget)


@dataclass(frozen=True)
class Draft:
    """Measure speed and acceptance of drafts. Each answer is also generated without drafts."""

    drafts: Annotated[tuple[str, ...], Option("--draft", help="lookup window auto; repeatable")] = (
        "lookup",
        "window",
        "auto",
    )
    tasks: Annotated[tuple[str, ...], Option("--task", help="quote edit list code story; repeatable")] = (
        "quote",
        "edit",
        "list",
        "code",
        "story",
    )
    temperatures: Annotated[
        tuple[float, ...], Option("--temperature", min=0, help="0 always takes the most likely token; repeatable")
    ] = (0.0, 0.8)
    contexts: Annotated[
        tuple[int, ...], Option("--context", min=0, help="tokens of books before the task; repeatable")
    ] = (3000,)
    resident: Annotated[
        int | None, Option(min=MIN_BUDGET, help="tokens kept on a GPU; the rest is streamed from RAM")
    ] = None
    tokens: Annotated[int, Option(min=8, help="tokens of an answer")] = 100
    rounds: Annotated[
        int, Option(min=1, help="rounds; each kind of drafts runs once per round, and the fastest counts")
    ] = 2


@dataclass(frozen=True)
class Prefill:
    """Measure time and memory of prefill. Compares with one forward pass of transformers in the same run.

    Raises:
        UsageError: the same as ``Decode``.
    """

    shape: Shape = ""
    lengths: Annotated[tuple[int, ...], Option("--length", min=1, help="tokens of a prompt; repeatable")] = (512, 2048)
    turn: Annotated[int, Option(min=1, help="tokens of a second turn after it")] = 64
    mode: Annotated[str, Option(metavar=VARIANT, help="the KV mode")] = "streaming"
    rounds: Annotated[int, Option(min=1, help="rounds; both run once per round")] = 3

    def __post_init__(self) -> None:
        parsed(self.mode)


@dataclass(frozen=True)
class Peers(Variants):
    """Compare kvchat with llama.cpp and transformers. Measures start, prefill, decoding and peak memory of each.

    A context of 0 is the model's longest. Without ``peers`` it uses those that are installed.
    """

    STANDARD = ("full", "streaming", "speculative")

    contexts: Annotated[
        tuple[int, ...],
        Option("--context", min=0, help="prompt tokens before decoding; 0: the longest; repeatable"),
    ] = (512, 2048, 4096, 0)
    peers: Annotated[
        tuple[str, ...] | None,
        Option(parser=named, metavar="NAMES", help="xllamacpp, llama_cpp, transformers; separated by commas, or none"),
    ] = None
    steps: Annotated[int, Option(min=2, help="measured decoded tokens")] = 32
    rounds: Annotated[int, Option(min=1, help="rounds; each peer runs once per round")] = 3
