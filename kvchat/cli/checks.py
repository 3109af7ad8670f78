"""Runs several checks of what a person wrote, and tells of all that is wrong at once."""

from __future__ import annotations

from collections.abc import Callable

from kvchat.errors import UsageError


def check_all(*checks: Callable[[], object]) -> None:
    """Run all checks.

    Raises:
        UsageError: what any of them refused.
    """
    refusals = []
    for check in checks:
        try:
            check()
        except UsageError as refused:
            refusals.append(str(refused))
    if refusals:
        raise UsageError("\n".join(refusals))
