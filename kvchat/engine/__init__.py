"""Loads a model, talks with it, switches its KV mode: in a process of its own, or from Python."""

from kvchat.hub_kernels import refuse_in_transformers

refuse_in_transformers()  # before any module of the engine imports it
