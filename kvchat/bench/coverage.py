"""Coverage: the share of full attention that falls on the tokens a mode reads, by layer and KV head, step by step.

After a prompt that full attention prefills, each text is decoded in the mode with its own next tokens. Books are what a
model usually reads. Facts are questions about the prompt, answered with full attention's words: there a single head may
have to read a single sentence. Each result also has the share that as many tokens would cover if they were chosen by
their true attention mass, in whole pages and one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvchat.bench.frame import Cell, Frame, ModelChoice, Result, Row, experiment, mean, methods, parsed
from kvchat.bench.recall_tasks import case
from kvchat.bench.settings import Coverage
from kvchat.bench.texts import passages
from kvchat.bench.walk import Walk
from kvchat.config.modes import FullParameters, ModeParameters, SpeculativeParameters, parse
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.kv.inspect import BUDGETS as CHOICES
from kvchat.kv.inspect import seeing_all
from kvchat.kv.modes.sync_heads import TokenChoice
from kvchat.models.load import LoadedModel

DEPTHS = (0.1, 0.5, 0.9)  # of the facts, in turn
KEYS = 4  # facts in a text, one of which is asked for
ANSWER_TOKENS = 16
WORTH = 0.005  # share of the attention that other sinks or another window must add to be chosen


class Forced(NamedTuple):
    """A prompt and the tokens decoded after it; without tokens, the greedy answer of full attention."""

    kind: str
    prompt: Sequence[int]
    tokens: Sequence[int]


def run(settings: Coverage, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each text and variant, ``summary`` for kind and variant.

    Raises:
        UsageError: no text is long enough; KvchatError: the model cannot be loaded, or all modes refuse.
    """
    frame, found = frame or Frame(), methods(settings.modes)
    model = choice.load(frame.progress)
    walk, texts = Walk(model), list(_texts(settings, model.tokenizer))
    head = experiment(
        "coverage",
        "share of full attention that falls on the tokens read, and on the best choice of as many pages or tokens",
        asdict(settings) | choice.settings(),
        found,
        model,
    )

    def rows(cell: Cell) -> list[Row]:
        number = cell["text"]
        texts[number] = text = _with_tokens(walk, texts[number])
        return [row(walk, text, parsed(cell["variant"]))]

    kinds, variants = dict.fromkeys(text.kind for text in texts), dict.fromkeys(settings.modes)
    return frame.measure(
        head,
        [{"text": number, "variant": variant} for number in range(len(texts)) for variant in settings.modes],
        rows,
        lambda row: f"{row['kind']}: {row['variant']:<48} {mean(_flat(row['covered'])):.1%}",
        lambda rows: [summarized(rows, kind, each) for kind in kinds for each in variants],
    )


def row(walk: Walk, text: Forced, parameters: ModeParameters) -> Row:
    """Decode a text in a mode; return mean shares over its steps by layer and KV head, and the tokens read.

    Raises:
        KvchatError: the mode refuses.
    """
    walk.begin(text.prompt, parameters, len(text.tokens))
    steps, read = list[Tensor](), list[float]()
    for token in text.tokens:
        walk.step(token)
        steps.append(walk.coverable())
        read.append(walk.tokens_read())
    shares = torch.stack(steps).double()
    covered, pages, best = (_rounded(each) for each in shares.mean(0))
    along = [round(share, 5) for share in shares[:, 0].mean((1, 2)).tolist()]
    return {
        "kind": text.kind,
        "steps": len(steps),
        "read_mean": mean(read),
        "covered": covered,
        "best_pages": pages,
        "best_tokens": best,
        "least": _rounded(shares[:, 0].amin(0)),
        "along": along,
    }


def choose(model: LoadedModel, settings: Coverage, enough: float, report: Callable[[str], object]) -> TokenChoice:
    """Return the smallest budget with which speculative mode covers ``enough`` of the attention, in books and in facts.

    Four bits are tried before a larger budget. Other sinks or another window are chosen if they cover ``WORTH`` more.
    If no choice covers enough, the one that covers most is returned. ``settings`` describe the texts; ``report`` is
    called with a line after each.

    Raises:
        UsageError: no text is long enough.
    """
    walk, texts = Walk(model), list(_texts(settings, model.tokenizer))
    looked_at = seeing_all(model.probe.specs, settings.context)

    def measured(variants: Sequence[TokenChoice]) -> list[float]:
        """Return the share that each variant covers in the kind of text where it covers least."""
        found: dict[str, list[Tensor]] = {}
        for number, text in enumerate(texts):
            texts[number] = text = _with_tokens(walk, text)
            rows = [row(walk, text, parse(SpeculativeParameters.name, variant.params)) for variant in variants]
            shares = torch.tensor([row["covered"] for row in rows])[:, looked_at].mean((1, 2))
            report(f"text {number + 1} of {len(texts)}, {text.kind}: {shares.min():.1%} to {shares.max():.1%} covered")
            found.setdefault(text.kind, []).append(shares)
        kinds: list[float] = torch.stack([torch.stack(each).mean(0) for each in found.values()]).amin(0).tolist()
        return kinds

    rising = [TokenChoice("", 0.0, budget, index) for budget in CHOICES for index in ("bits2", "bits4")]
    covered = measured(rising)
    best = next((at for at, share in enumerate(covered) if share >= enough), covered.index(max(covered)))
    chosen, share = rising[best], covered[best]
    others = [replace(chosen, sink=16), replace(chosen, window=chosen.budget // 4)]
    for other, more in zip(others, measured(others), strict=True):
        if more > share + WORTH:
            chosen, share = other, more
    read = f"{len(texts)} texts of {settings.context:,} tok"
    return replace(chosen, measured_on=read, covered=round(share, 4))


def summarized(rows: Sequence[Row], kind: str, variant: str) -> Row:
    """Combine all texts of one kind in one variant into one row; layers and heads are counted from 0."""
    place = {"kind": kind, "variant": variant}
    mine = [row for row in rows if place.items() <= row.items()]
    if not mine:
        return place | {"refused": next(row["refused"] for row in rows if row["variant"] == variant)}
    covered = torch.tensor([row["covered"] for row in mine]).mean(0)
    layer, head = divmod(int(covered.argmin()), covered.shape[1])
    return place | {
        "read_mean": mean(row["read_mean"] for row in mine),
        "covered": float(covered.mean()),
        "best_pages": mean(_flat(row["best_pages"] for row in mine)),
        "best_tokens": mean(_flat(row["best_tokens"] for row in mine)),
        "worst_head": f"layer {layer}, head {head}",
        "worst_covered": float(covered.min()),
        "worst_best_tokens": float(torch.tensor([row["best_tokens"] for row in mine]).mean(0)[layer, head]),
        "least": min(_flat(row["least"] for row in mine)),
    }


def _texts(settings: Coverage, tokenizer: Any) -> Iterator[Forced]:
    books = settings.passages and passages(settings.texts, settings.context + settings.tokens, tokenizer)
    for book in (books or [])[: settings.passages]:
        yield Forced("books", book.ids[: settings.context], book.ids[settings.context :])
    for number in range(settings.facts):
        seed, depth = f"{settings.seed}/{number}", DEPTHS[number % len(DEPTHS)]
        turns = case("keys", settings.context, depth, KEYS, seed, tokenizer).turns
        yield Forced("facts", PromptEncoder(tokenizer).encode(turns, Stored()).ids, ())


def _with_tokens(walk: Walk, text: Forced) -> Forced:
    """Return ``text``; if it has no tokens, add the greedy answer of full attention, including the end token."""
    if text.tokens:
        return text
    logits, drawn = walk.begin(text.prompt, FullParameters(), ANSWER_TOKENS), list[int]()
    while len(drawn) < ANSWER_TOKENS and walk.model.eos_ids.isdisjoint(drawn):
        drawn.append(int(logits.argmax()))
        logits = walk.step(drawn[-1])
    return text._replace(tokens=drawn)


def _rounded(shares: Tensor) -> list[list[float]]:
    return [[round(share, 5) for share in layer] for layer in shares.tolist()]


def _flat(values: Any) -> list[float]:
    return [values] if isinstance(values, float) else [number for value in values for number in _flat(value)]
