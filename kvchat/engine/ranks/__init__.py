"""Tensor parallelism by heads: the processes besides the engine that each hold some of a model's heads."""
