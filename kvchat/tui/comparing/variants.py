"""Variants of a comparison, as a person writes them: ``streaming budget=256 sync``."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from kvchat.config import modes
from kvchat.conversations.comparison import label
from kvchat.errors import UsageError
from kvchat.protocol.messages import MAX_VARIANTS, Sampling, Variant
from kvchat.tui.prompt.assignments import parse_assignments
from kvchat.tui.prompt.words import resolve

SEEDS = 2**31


def parse_variants(words: Sequence[str]) -> list[Variant]:
    """Parse ``["streaming", "budget=256", "sync"]``: each mode is followed by its parameters.

    Raises:
        UsageError: it begins with a parameter, or names too many modes or an unknown one.
    """
    groups: list[list[str]] = []
    for word in words:
        if "=" not in word:
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            raise UsageError(f"{word} belongs to no mode.", hint="A mode comes first: full streaming budget=256")
    if len(groups) > MAX_VARIANTS:
        raise UsageError(
            f"{len(groups)} modes are too many.", f"At most {MAX_VARIANTS} are compared at once.", "Leave some out."
        )
    known = modes.mode_names()
    return [Variant(resolve(mode, known, "KV mode"), parse_assignments(words)) for mode, *words in groups]


def completed(variants: Sequence[Variant], mode: str) -> tuple[Variant, ...]:
    """At least two variants to compare, where ``mode`` is the present one.

    Raises:
        UsageError: one is unknown, has a parameter that is refused or stands there twice.
    """
    chosen, present = tuple(variants), Variant(mode if mode != modes.REFERENCE else modes.COMPARED)
    if len(chosen) < 2:
        first = Variant(modes.REFERENCE)
        chosen = (first, *([one for one in chosen if one != first] or [present]))
    for variant in chosen:
        modes.parse(variant.mode, variant.params)
    if len(set(map(label, chosen))) < len(chosen):
        raise UsageError("A mode is named twice.", hint="Give one another budget: sync sync budget=256")
    return chosen


def seeded(sampling: Sampling) -> Sampling:
    """The sampling with a seed, drawn where none is given: all variants have the same random numbers."""
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbelow(SEEDS))
