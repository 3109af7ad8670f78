"""The last tokens of a conversation, set aside in host memory and put back byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvchat import units
from kvchat.errors import DoesNotFitError
from kvchat.kv.memory import available
from kvchat.kv.memory.pages import Pages, has_rounded
from kvchat.kv.state import KVState


@dataclass(frozen=True)
class SetAside:
    """Tokens ``start`` to ``total``: whole ``pages``, from that of ``start`` on.

    ``control`` marks the chat's control tokens; ``pins``, ``query`` and ``after_step`` are the state's.
    """

    start: int
    total: int
    pages: Pages
    control: Tensor
    pins: tuple[int, ...]
    query: Tensor
    after_step: bool


@torch.inference_mode()
def set_aside(state: KVState, start: int) -> SetAside:
    """Copy the tokens from ``start`` on; nothing changes.

    Raises:
        DoesNotFitError: the host has no memory for a copy.
    """
    _check_room(state, start)
    _wait_for_device(state)
    pages = state.host.copied(start // state.geometry.page)
    control, query = state.control[start : state.total].clone(), state.query.clone()
    return SetAside(start, state.total, pages, control, state.pins, query, state.after_step)


@torch.inference_mode()
def put_back(state: KVState, aside: SetAside) -> None:
    """Store ``aside`` after the first ``aside.start`` tokens, in place of all that follow them.

    Those first tokens must not have changed. The slots are left as they are: a refill is due.
    """
    _wait_for_device(state)
    state.prepare_rounded(has_rounded(aside.pages))
    state.host.put(aside.start // state.geometry.page, aside.pages)
    state.host.total = aside.total
    state.control[aside.start :] = False
    state.control[aside.start : aside.total] = aside.control
    state.query.copy_(aside.query)
    state.after_step = aside.after_step


def _check_room(state: KVState, start: int) -> None:
    tokens = state.total - start
    kinds = state.host.kinds[start // state.geometry.page :]
    needed, free = sum(map(state.host.page_bytes, kinds)), available.usable(available.host_free())
    if needed > free:
        raise DoesNotFitError(
            "There is not enough host memory to set the conversation aside.",
            f"K/V of {tokens:,} tokens take {units.size(needed, 2)}; {units.size(free, 2)} are free.",
            "Free memory, or do it in a shorter conversation; what is stored is as it was.",
        )


def _wait_for_device(state: KVState) -> None:
    """Wait until the last step's writes to the pool have arrived and no stream reads it."""
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
