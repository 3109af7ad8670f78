"""Modes with parameters to run the tests over: one row per mode and setting."""

# Mode and parameters by row; budgets are so small that tokens are dropped after a few dozen.
ROWS = {
    "full": ("full", {}),
    "full-resident": ("full", {"resident": 64}),
    "full-window": ("full", {"resident": 64, "draft": "window"}),
    "streaming": ("streaming", {"budget": 64, "sink": 4, "R": 8, "sigma": 6, "delta": 5}),
    "streaming-plain": ("streaming", {"budget": 64, "sink": 4, "R": 1, "sigma": 0, "delta": 0}),
    "streaming-slack": ("streaming", {"budget": 64, "sink": 7, "R": 4, "sigma": 30, "delta": 3}),
    "streaming-no-sink": ("streaming", {"budget": 64, "sink": 0}),
    "streaming-paper": ("streaming", {"budget": 64, "profile": "paper"}),
    "streaming-off": ("streaming", {"budget": 64, "sink": 4, "R": 0}),
    "freeze": ("freeze", {"K": 12, "tau": 0.9, "k": 1.0}),
    "freeze-paper": ("freeze", {"profile": "paper", "K": 12}),
    "freeze-raw": ("freeze", {"profile": "paper", "score": "raw", "K": 12, "tau": 4.0, "k": 0.7, "floor": 30}),
    "freeze-budget": ("freeze", {"K": 12, "budget": 70, "k": 0.7}),
    "sync": ("sync", {"budget": 80, "m": 3}),
    "sync-paper": ("sync", {"budget": 80, "profile": "paper", "representatives": "retrieval", "m": 3}),
    "sync-two": ("sync", {"budget": 70, "m": 4, "rho": 0.3, "clusters": 2}),
    "sync-resident": ("sync", {"budget": 80, "m": 5, "offload": False}),
    "sync-dynamic": ("sync", {"budget": 64, "m": 1, "rho": 0.0}),
    "speculative": ("speculative", {"budget": 80, "sink": 8, "window": 24}),
    "speculative-four-bits": (
        "speculative",
        {"budget": 70, "sink": 5, "window": 19, "index": "bits4", "first_full": False},
    ),
    "speculative-last": ("speculative", {"budget": 64, "sink": 3, "window": 16, "query": "last", "rest": "none"}),
    "speculative-no-tokens": ("speculative", {"budget": 64, "sink": 20, "window": 44}),
    "freekv": ("speculative", {"budget": 80, "sink": 8, "window": 24, "tau": 0.7}),
    "freekv-odd": ("speculative", {"budget": 90, "sink": 5, "window": 19, "tau": 0.7, "first_full": False}),
    "freekv-sync": ("speculative", {"budget": 80, "sink": 3, "window": 17, "tau": 2.0}),
    "freekv-reuse": ("speculative", {"budget": 80, "sink": 0, "window": 16, "tau": -2.0}),
    "freekv-paper": ("speculative", {"budget": 80, "profile": "paper", "tau": 0.7}),
    "freekv-no-pages": ("speculative", {"budget": 64, "sink": 20, "window": 44, "tau": 0.7}),
    "freekv-blocks": ("speculative", {"budget": 90, "sink": 4, "window": 32, "index": "blocks", "query": "own"}),
    "freekv-bits": ("speculative", {"budget": 90, "sink": 4, "window": 32, "unit": "page", "query": "own"}),
}
# Methods of other papers; budgets are so small that tokens are dropped, and chosen ones evicted.
COMPARED = {
    "quest": ("quest", {"budget": 64, "whole_layers": 0}),
    "quest-behind-whole-layers": ("quest", {"budget": 70}),
    "arkvale": ("arkvale", {"budget": 80}),
    "shadowkv": ("shadowkv", {"budget": 80}),
    "raas": ("raas", {"budget": 64}),
    "raas-nine-pages": ("raas", {"budget": 72}),
    "razor": ("razor", {"budget": 64}),
    "snapkv": ("snapkv", {"budget": 70, "window": 20}),
    "snapkv-paper": ("snapkv", {"budget": 64}),
    "pyramidkv": ("pyramidkv", {"budget": 64, "window": 24, "beta": 7}),
    "cake": ("cake", {"budget": 64, "window": 20, "tau1": 1.3, "tau2": 0.7}),
    "h2o": ("h2o", {"budget": 64}),
}
# The first row of each mode and the unusual settings, for tests that need not run on all rows. The core has two rows
# of each mode, one at an even index and one at an odd one, so that ``grids.thinned`` pairs a mode with every cell.
FIRST = {mode: row for row, (mode, _) in reversed(ROWS.items())}
ROWS |= COMPARED
CORE = [
    *FIRST.values(),
    "full-resident",
    "streaming-slack",
    "speculative-four-bits",
    "freekv",
    "freekv-odd",
    "sync-two",
    "freeze-budget",
]
# The core, and every index, unit and query that speculative may have.
MET = [*CORE, "speculative-last", "freekv-blocks", "freekv-bits"]
MIXED = ("plain", "window", "softcap", "sinks", "unrotated")
