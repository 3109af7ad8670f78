"""Proposes weights and a mode for a planned model: the first combination that fits, the best first.

In each mode bits of the weights are given up before the mode is. First all K/V is read, then what a mode retrieves,
then less of that: none of these reads over the link. Then full mode does, and reads for every token what has no room on
the device, gigabytes in a long conversation; last comes a window alone, which forgets most of what was said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvchat import install
from kvchat.config import modes
from kvchat.config.modes import MIN_BUDGET
from kvchat.kv.memory import available
from kvchat.models import repacking
from kvchat.models.quantize import quantization
from kvchat.protocol.figures import MemoryPlan, ModeNeed, Proposal
from kvchat.units import size

WEIGHTS = ("none", "int8", "nf4")  # 8 bits give up little, 4 bits more


def propose(made: MemoryPlan, smaller: Sequence[ModeNeed] = ()) -> Proposal | None:
    """The first combination that fits, None where none does. The modes of ``made`` have all that they want.

    ``smaller`` is what the mode that retrieves needs with smaller budgets than the one in force, the largest first.
    """
    weights = [name for name in dict.fromkeys((made.by_default, *WEIGHTS, *made.weights)) if name in made.weights]
    for mode, need, spills in _ways(made, smaller):
        for quantize in weights:
            if not need.refusal and _fits(made, quantize, need, spills):
                absent = quantization.absent_packages(quantize, torch.device(made.device))
                command = install.extra(install.EXTRA_OF[quantize]) if absent else ""
                bits = (*_lost_bits(made, quantize), *_lost_pages(made))
                lost = (*bits, *_lost_reading(made, quantize, mode, need, spills))
                return Proposal(quantize, mode, need.params.get("budget"), lost, command)
    return None


def has_room(made: MemoryPlan, quantize: str, need: ModeNeed) -> bool:
    """True if what the device holds fits it, with the margin that is always left."""
    return _beside_kv(made, quantize) + need.device_bytes <= available.usable(made.device_free)


def _ways(made: MemoryPlan, smaller: Sequence[ModeNeed]) -> Iterator[tuple[str, ModeNeed, bool]]:
    """Modes and what they need, the best first, and whether what has no room is read over the link."""
    yield modes.REFERENCE, made.modes[modes.REFERENCE], False
    for need in (made.modes[modes.COMPARED], *smaller):
        yield modes.COMPARED, need, False
    yield modes.REFERENCE, made.modes[modes.REFERENCE], True
    yield modes.HOLDS_LEAST, made.modes[modes.HOLDS_LEAST], False


def _fits(made: MemoryPlan, quantize: str, need: ModeNeed, spills: bool) -> bool:
    """True if all of it fits the free memory."""
    read = replace(need, device_bytes=MIN_BUDGET * made.token_bytes) if spills else need
    on_host = made.host_pool + made.snapshots
    if made.device == "cpu":
        everything = _beside_kv(made, quantize) + read.device_bytes + on_host
        return not spills and everything <= available.usable(made.host_free)
    return has_room(made, quantize, read) and on_host <= available.usable(made.host_free)


def _beside_kv(made: MemoryPlan, quantize: str) -> int:
    """Bytes on the device beside the K/V that are read."""
    return made.weights[quantize] + made.state + made.workspace


def _spilled(made: MemoryPlan, quantize: str) -> int:
    """Bytes that full mode reads over the link for a token: what does not fit the device, at the end."""
    room = available.usable(made.device_free) - _beside_kv(made, quantize)
    return int(max(0, made.context * made.token_bytes - room) * made.host_share)


def _lost_bits(made: MemoryPlan, quantize: str) -> Iterator[str]:
    bits = quantization.BITS.get(quantize)
    if not bits:
        return
    if 0 < made.file_bits <= repacking.AT_MOST.get(quantize, 0):
        if made.packed:  # in other steps than these
            yield f"precision of the weights: the files' {made.file_bits:.1f} bits are rounded again, to {bits}"
    else:
        instead = f"the file's {made.file_bits:.1f}" if made.file_bits else made.dtype
        yield f"precision of the weights: {bits} bits instead of {instead}"


def _lost_pages(made: MemoryPlan) -> Iterator[str]:
    if made.given.get("host_dtype") == "int8":
        yield f"precision of the K/V: full pages are stored in 8 bits instead of {made.dtype}, nearly exact"


def _lost_reading(made: MemoryPlan, quantize: str, mode: str, need: ModeNeed, spills: bool) -> Iterator[str]:
    # Someone who chose how much stays on the device has it fit, and reads over the link all the same.
    if link := _spilled(made, quantize) if spills else need.link_bytes:
        yield f"speed: at the end {size(link)} are read over the link for every token"
    if lost := modes.registered()[mode].gives_up:
        yield lost
    if budget := need.params.get("budget"):
        in_force = made.modes[mode].params["budget"]
        less = f"; the budget in force is {in_force:,}" if budget < in_force else ""
        yield f"more than {budget:,} tokens read by a head for a token{less}"
