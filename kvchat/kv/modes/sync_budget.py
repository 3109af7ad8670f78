"""The budget of sync's followers, from a share of the memory that full mode takes."""

from __future__ import annotations

from kvchat.errors import DoesNotFitError


def paper_k(mem: float, tokens: int, kv_heads: int, representatives: int) -> float:
    """Tokens per follower so that ``mem`` of a full cache's bytes are used; the rows of the paper's tables fit this.

    Raises:
        DoesNotFitError: the representatives alone take as much.
    """
    refuse_small_mem(mem, kv_heads, representatives)
    return tokens * (mem * kv_heads - representatives) / (kv_heads - representatives)


def refuse_small_mem(mem: float, kv_heads: int, representatives: int) -> None:
    """Refuse a share of memory that the representatives alone exceed.

    Raises:
        DoesNotFitError: with the floor.
    """
    floor = representatives / kv_heads
    if mem <= floor:
        raise DoesNotFitError(
            f"Sync does not fit {mem:.0%} of the K/V.",
            f"{representatives} of {kv_heads} KV heads keep everything, which takes {floor:.0%} already.",
            f"Give mem over {floor:.2f}, or fewer clusters.",
        )
