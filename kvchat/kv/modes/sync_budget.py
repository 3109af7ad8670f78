"""The budget of sync's followers, from a share of the memory that full mode takes."""

from __future__ import annotations

from kvchat.errors import DoesNotFitError

MEM = 0.5  # of full's K/V, the paper's
FOLLOWER_PART = 3  # one token of so many a follower keeps at least, where mem is not given


def default_mem(kv_heads: int, representatives: int) -> float:
    """The paper's 50 %, or so much that a follower keeps a third of the tokens."""
    return max(MEM, (representatives + (kv_heads - representatives) / FOLLOWER_PART) / kv_heads)


def paper_k(mem: float, tokens: int, kv_heads: int, representatives: int) -> float:
    """Tokens per follower if ``mem`` of a full cache held these and all tokens of the representatives, and no more.

    The rows of the paper's tables fit this, but Llama-70B's at 20 %. ``Sync.k_of`` takes off what else is allocated.

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
            f"{representatives} of {kv_heads} KV heads keep everything, which already takes {floor:.0%}.",
            f"Use mem over {floor:.2f}, or fewer clusters.",
        )
