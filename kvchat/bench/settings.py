"""What each measurement can be asked for: a setting is a field, with the option of the command line that gives it.

Imports no torch: the command line refuses what is wrong, and helps, before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from typer import Argument, Option

from kvchat.bench.frame import parsed, with_budgets
from kvchat.config.modes import MIN_BUDGET

VARIANT = "MODE[:KEY=VALUE,...]"
NATURAL = "natural"
Modes = Annotated[tuple[str, ...], Option("--mode", metavar=VARIANT, help="a variant; repeatable")]
Texts = Annotated[tuple[str, ...], Option("--text", metavar="FILE", help="a text file, UTF-8; repeatable")]
Seed = Annotated[int, Option(help="the same seed gives the same cases")]
Shape = Annotated[str, Option(help="random weights in the shape of llama-3.1-8b, qwen2.5-7b, ... instead of a model")]


def named(names: str) -> tuple[str, ...]:
    """The names between commas; nothing for ``none``."""
    return tuple(name for name in names.split(",") if name not in ("", "none"))


@dataclass(frozen=True)
class Variants:
    """Measured in ``modes``, each at each of ``budgets`` if it names none; in the standard ones without modes.

    Raises:
        UsageError: an unknown mode or parameter, or a value out of range.
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
    """Divergence from full attention, token by token. In KL, top-1 agreement, perplexity and attention covered.

    No ``texts`` are the shipped books.
    """

    context: Annotated[int, Option(min=1, help="tokens before the decoded ones")] = 2048
    tokens: Annotated[int, Option(min=1, help="decoded tokens of a passage")] = 400
    passages: Annotated[int | None, Option(min=1, help="passages at most (default: all)")] = None
    texts: Texts = ()


@dataclass(frozen=True)
class Coverage(Variants):
    """Attention covered by what each mode reads. Also by the best choice of as many, and in the worst head.

    No ``texts`` are the shipped books.
    """

    STANDARD_BUDGETS = (128, 256, 512, 1024, 2048)

    context: Annotated[int, Option(min=1, help="tokens before the decoded ones")] = 3072
    tokens: Annotated[int, Option(min=1, help="decoded tokens of a passage")] = 32
    passages: Annotated[int, Option(min=0, help="passages of books at most")] = 3
    facts: Annotated[int, Option(min=0, help="questions about the content of such a text")] = 6
    texts: Texts = ()
    seed: Seed = 0


@dataclass(frozen=True)
class Recall(Variants):
    """Facts found in long texts. By task, length, depth, mode and budget.

    ``inside`` 0 is a question that is a turn of its own; in the task switches it is the measurement's own number.
    """

    tasks: Annotated[
        tuple[str, ...],
        Option("--task", help="passkey keys chain fact name switches; repeatable"),
    ] = ("passkey", "keys", "chain", "name")
    lengths: Annotated[tuple[int, ...], Option("--length", min=16, help="tokens of a text, about; repeatable")] = (
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
    cases: Annotated[int, Option(min=1, help="conversations of each length and depth")] = 4
    keys: Annotated[int, Option(help="number of facts in tasks with several")] = 4
    inside: Annotated[int, Option(min=0, help="tokens of an answer before the question, in the same turn")] = 0
    seed: Seed = 0


@dataclass(frozen=True)
class Paper:
    """Tables and figures of a mode's paper, next to measured values.

    ``modes`` and ``budgets`` are those of a study that compares modes; none are all, at the study's budget.

    Raises:
        UsageError: an unknown mode or parameter, or a value out of range.
    """

    paper: Annotated[str, Argument(metavar="PAPER", help="asr-kf-egr, lazy-pruning, synckv or freekv")]
    parts: Annotated[tuple[str, ...], Option("--part", help="only this table or figure, as table-1; repeatable")] = ()
    sizes: Annotated[
        tuple[str, ...], Option("--set", metavar="KEY=VALUE", help="one of the study's sizes; repeatable")
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
    """Time per decoded token, memory and traffic. Compared with transformers' caches in the same run.

    ``change_rates`` are "natural" or shares of 1. ``baselines`` None takes those that suit the device.

    Raises:
        UsageError: an unknown mode or parameter, or a value out of range.
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
    steps: Annotated[int, Option(min=1, help="tokens of a round that count")] = 64
    rounds: Annotated[int, Option(min=1, help="rounds; each variant runs once per round")] = 5
    baselines: Annotated[
        tuple[str, ...] | None,
        Option(
            parser=named,
            metavar="NAMES",
            help="dynamic, static, offloaded, generate, llama.cpp; by commas, or none",
        ),
    ] = None
    prefill: Annotated[bool, Option("--prefill", help="read a prompt with random weights too")] = False
    load: Annotated[int, Option(min=0, help="busy processes under which everything is measured again")] = 0

    def __post_init__(self) -> None:
        for mode in self.modes:
            parsed(mode, self.budget)


@dataclass(frozen=True)
class Draft:
    """Speed and acceptance of drafts. Each answer is also written without them."""

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
        int, Option(min=1, help="rounds, of which the fastest counts; each draft kind runs once in each")
    ] = 2


@dataclass(frozen=True)
class Prefill:
    """Time and memory of processing a prompt. Compared with one forward of transformers in the same run.

    Raises:
        UsageError: as ``Decode``.
    """

    shape: Shape = ""
    lengths: Annotated[tuple[int, ...], Option("--length", min=1, help="tokens of a prompt; repeatable")] = (512, 2048)
    turn: Annotated[int, Option(min=1, help="tokens of a second prompt after it")] = 64
    mode: Annotated[str, Option(metavar=VARIANT, help="the KV mode")] = "streaming"
    rounds: Annotated[int, Option(min=1, help="rounds; both run once per round")] = 3

    def __post_init__(self) -> None:
        parsed(self.mode)


@dataclass(frozen=True)
class Peers(Variants):
    """kvchat compared with llama.cpp and transformers. In one run: start, prompt, decoding and peak memory of each.

    A context of 0 is the longest of the model. ``peers`` None are those that are installed.
    """

    STANDARD = ("full", "streaming", "speculative")

    contexts: Annotated[
        tuple[int, ...],
        Option("--context", min=0, help="prompt tokens before decoding; 0: the longest; repeatable"),
    ] = (512, 2048, 4096, 0)
    peers: Annotated[
        tuple[str, ...] | None,
        Option(parser=named, metavar="NAMES", help="xllamacpp, llama_cpp, transformers; by commas, or none"),
    ] = None
    steps: Annotated[int, Option(min=2, help="decoded tokens that count")] = 32
    rounds: Annotated[int, Option(min=1, help="rounds; each peer runs once per round")] = 3
