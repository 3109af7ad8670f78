"""Find, describe, load and check the models that kvchat runs."""

from kvchat.libraries import prepare_transformers

prepare_transformers()  # before any module of this package imports it
