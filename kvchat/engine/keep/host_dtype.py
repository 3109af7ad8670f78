"""Changes the number format of full pages between two tokens, and describes the change."""

from __future__ import annotations

from typing import get_args

from kvchat.errors import UsageError, did_you_mean
from kvchat.kv.state import KVState
from kvchat.protocol.messages import HostDtype


def is_rounded(host_dtype: HostDtype) -> bool:
    """True if pages of this format are 8-bit ones.

    Raises:
        UsageError: there is no such format.
    """
    if host_dtype not in (known := get_args(HostDtype)):
        raise UsageError(f'Pages of K/V cannot be kept in "{host_dtype}".'[:200], did_you_mean(host_dtype, known))
    return host_dtype == "int8"


def keep_pages(state: KVState, host_dtype: HostDtype) -> str:
    """Keep pages that get full from now on in the model's number format or in int8; return a sentence about it.

    Raises:
        UsageError: no such format; DoesNotFitError: no host memory for the first page. Nothing changed.
    """
    state.round_pages(is_rounded(host_dtype))
    if state.rounds:
        full = state.host.kinds[: state.total // state.geometry.page]
        exact, pages = full.count(False), len(full)
        before = f" {exact:,} of {pages:,} pages stay exact." if pages else ""
        return f"Pages of K/V that get full are kept in 8 bits from now on.{before}"
    rounded, pages = len(state.left_rounded), state.geometry.pages(state.total)
    stay = f" {rounded:,} of {pages:,} pages are in 8 bits: /rebuild makes them exact." if rounded else ""
    return f"Pages of K/V that get full are kept exactly from now on.{stay}"
