"""Finds, describes, loads and checks the models that kvchat runs."""

from kvchat.libraries import refuse_in_transformers

refuse_in_transformers()  # before any module of this package imports it
