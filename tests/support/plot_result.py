"""A result of ``bench decode`` as plots take it."""

RESULT = {
    "experiment": "decode",
    "model": {"name": "tiny", "dtype": "float32"},
    "environment": {"gpu": None, "processor": "a processor", "threads": 2, "torch": "2", "transformers": "5"},
    "floor_ms": 1.5,
    "rows": [
        {"context": 512, "variant": "dynamic", "ms": 4.0, "tokens_per_s": 250.0},
        {"context": 512, "variant": "offloaded", "failed": "The offloaded cache needs a GPU."},
        {"context": 512, "variant": "full", "change_rate": "natural", "ms": 3.0, "tokens_per_s": 333.0},
        {"context": 8192, "variant": "full", "change_rate": "natural", "ms": 8.0, "tokens_per_s": 125.0},
        {
            "context": 8192,
            "variant": "speculative",
            "change_rate": 0.5,
            "ms": 5.0,
            "tokens_per_s": 200.0,
        },
    ],
}
