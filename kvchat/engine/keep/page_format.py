"""What full pages are kept in, changed between two tokens; in words."""

from __future__ import annotations

from kvchat.kv.state import KVState
from kvchat.protocol.messages import HostDtype


def keep_pages(state: KVState, host_dtype: HostDtype) -> str:
    """Keep pages that get full from now on in the model's number format or in int8; what that means now.

    Raises:
        DoesNotFitError: the host has no memory for the first of them; nothing changed.
    """
    state.round_pages(host_dtype == "int8")
    full = state.host.kinds[: state.total // state.geometry.page]
    rounded, pages = sum(full), len(full)
    if state.rounds:
        before = f" {pages - rounded:,} of {pages:,} pages stay exact." if pages else ""
        return f"Pages of K/V that get full are kept in 8 bits from now on.{before}"
    stay = f" {rounded:,} of {pages:,} pages are in 8 bits: /rebuild makes them exact." if rounded else ""
    return f"Pages of K/V that get full are kept exactly from now on.{stay}"
