"""The size of the host pool by what it holds, for the pool itself and for who plans it."""

from __future__ import annotations

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.arrangement import RoundedByPage, arrangement_of, layer_bytes

# Pinned in steps that double up to this many bytes over all layers: a step costs a call per layer and about 0.5 s/GiB.
STEP_BYTES = 256 * 2**20


def pool_bytes(geometry: Geometry, tokens: int, context: int, rounds: bool = False) -> int:
    """Bytes that a model's pool takes once it holds ``tokens``, in 8-bit pages where it ``rounds``.

    For more than the ``context`` and its next token room is made only where a conversation goes beyond it.
    """
    lies = RoundedByPage(geometry) if rounds else arrangement_of(geometry)
    room = pool_tokens(geometry, tokens, 0 if geometry.unified else step_tokens(geometry, lies.page_bytes))
    if tokens <= context + 1:
        room = min(room, max(context + 1, geometry.grown(0)))
    # Beside 8-bit pages the exact pool is as large as an empty conversation's.
    return geometry.layers * (layer_bytes(geometry, geometry.grown(0), room) if rounds else layer_bytes(geometry, room))


def pool_tokens(geometry: Geometry, tokens: int, step: int) -> int:
    """Tokens that a pool has room for once it holds ``tokens``: the same, whichever way it grew to them."""
    room = geometry.grown(0)
    while room < tokens:
        room = geometry.round_up(max(geometry.grown(room + 1), room + min(room, step)))
    return room


def step_tokens(geometry: Geometry, page_bytes: int) -> int:
    """Tokens that a pinned pool grows by at least, whose pages have ``page_bytes`` in each layer."""
    return STEP_BYTES // (geometry.layers * page_bytes) * geometry.page
