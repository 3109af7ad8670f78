"""Loads a model, talks with it, switches its KV mode: in a process of its own, or from Python."""

from kvchat.libraries import prepare_transformers

prepare_transformers()  # before any module of the engine imports it
