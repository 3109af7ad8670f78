"""How the threads that torch computes with wait for each other; used before torch is imported."""

from __future__ import annotations

import os

# Both are OpenMP's own: whoever sets one of them has chosen.
WAIT_POLICY, SPIN_COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"


def wait_without_spinning() -> None:
    """Let OpenMP's threads sleep while they wait, unless the environment says how they shall wait.

    By default they spin, which is only fast while every thread has a core of its own: beside any other load they spin
    for threads that are not running, and decoding becomes many times slower. OpenMP reads the environment once, when
    torch is imported.
    """
    if SPIN_COUNT not in os.environ:
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")
