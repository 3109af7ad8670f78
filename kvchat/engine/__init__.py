"""Loads a model, answers with it and switches its KV mode, in a separate process or directly from Python."""

from kvchat.libraries import prepare_transformers

prepare_transformers()  # before any module of the engine imports transformers
