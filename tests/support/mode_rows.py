"""Modes with parameters to run the tests over: one row per mode and setting."""

from __future__ import annotations

PROB_MAX = {"score": "prob_max", "smooth": 0.8, "tau": 3.0, "k": 0.5}
# Freeze's defaults are for long conversations: with these, tokens freeze from the first steps on.
SMALL = {"min_active": 0, "window": 12, "history": 30, "stagger": 2, "tau": 0.9}
# Mode and parameters by row; small enough that every set is reduced after some tens of tokens.
ROWS = {
    "full": ("full", {}),
    "streaming": ("streaming", {"budget": 64, "sink": 4, "R": 8, "sigma": 6, "delta": 5}),
    "streaming-plain": ("streaming", {"budget": 64, "sink": 4, "R": 1, "sigma": 0, "delta": 0}),
    "streaming-slack": ("streaming", {"budget": 64, "sink": 7, "R": 4, "sigma": 30, "delta": 3}),
    "streaming-no-sink": ("streaming", {"budget": 64, "sink": 0}),
    "streaming-off": ("streaming", {"budget": 64, "sink": 4, "R": 0}),
    "freeze": ("freeze", {**SMALL, "min_active": 75, "stagger": 4, "k": 1.0}),
    "freeze-keenest": ("freeze", {**SMALL, "min_active": 75, "stagger": 4, **PROB_MAX}),
    "freeze-paper": ("freeze", {"profile": "paper", "window": 12}),
    "freeze-layers": (
        "freeze",
        {**SMALL, "per_layer": True, "moves": 3, "same_step": True, "score": "scaled", "tau": 1.2, "k": 0.7},
    ),
    "freeze-ceiling": (
        "freeze",
        {**SMALL, "max_active": 70, "wake": False, "tau": 0.5, "k": 0.7, "score": "prob_rel", "smooth": 0.0},
    ),
    "sync": ("sync", {"budget": 80, "window": 16, "m": 3}),
    "sync-two": ("sync", {"budget": 70, "window": 9, "m": 4, "rho": 0.3, "clusters": 2, "staggered": True}),
    "sync-resident": ("sync", {"budget": 80, "window": 16, "m": 5, "offload": False}),
    "sync-dynamic": ("sync", {"budget": 64, "window": 5, "m": 1, "rho": 0.0}),
    "speculative": ("speculative", {"budget": 80, "sink": 8, "window": 24, "tau": 0.7}),
    "speculative-odd": ("speculative", {"budget": 90, "sink": 5, "window": 19, "tau": 0.7, "first_full": False}),
    "speculative-sync": ("speculative", {"budget": 80, "sink": 3, "window": 17, "tau": 2.0}),
    "speculative-reuse": ("speculative", {"budget": 80, "sink": 0, "window": 16, "tau": -2.0}),
    "speculative-no-pages": ("speculative", {"budget": 64, "sink": 20, "window": 44}),
}
# The first row of each mode and the unusual settings, for tests that need not run on all rows.
FIRST = {mode: row for row, (mode, _) in reversed(ROWS.items())}
CORE = [*FIRST.values(), "streaming-slack", "speculative-odd", "sync-two", "freeze-ceiling"]
MIXED = ("plain", "window", "softcap", "sinks", "unrotated")
