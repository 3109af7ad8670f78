"""Runners filled with random K/V, as the benchmarks fill them."""

import torch

from kvchat.bench import model_shapes
from kvchat.bench.frame import parsed
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.kv.modes import build


def filled(model, mode, tokens):
    """A runner with ``tokens`` tokens of random K/V, in ``mode``."""
    runner = ModelRunner(model, build(parsed("streaming", 128), geometry_of(model), traits_of(model)))
    model_shapes.fill(runner.kv, tokens)
    with torch.inference_mode():
        runner.kv.switch(mode)
    return runner
