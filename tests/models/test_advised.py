"""How a model's files advise that answers are drawn."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from kvchat.models import checkpoint
from kvchat.protocol.messages import TEMPERATURE, Sampling


@pytest.mark.parametrize(
    ("said", "expected", "told"),
    [
        ({}, Sampling(temperature=TEMPERATURE), []),
        ({"temperature": 0.3}, Sampling(temperature=0.3), []),
        ({"temperature": 1.9, "top_k": 1}, Sampling(temperature=1.9, top_k=1), ["temperature 1.9", "top_k 1"]),
        ({"top_p": 0.95, "min_p": 0.0}, Sampling(temperature=TEMPERATURE, top_p=0.95), ["top_p 0.95"]),
        ({"repetition_penalty": 1.1}, Sampling(temperature=TEMPERATURE, repetition_penalty=1.1), ["1.1"]),
        ({"temperature": 70, "top_k": 20}, Sampling(temperature=TEMPERATURE), ["temperature 70", "out of range"]),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, Sampling(temperature=0), ["likeliest"]),
        ({"do_sample": True, "temperature": 0.6}, Sampling(temperature=0.6), []),
        ({"temperature": 0.0}, Sampling(temperature=TEMPERATURE), ["out of range"]),
        ({"stop_strings": ["###", "", 5]}, Sampling(temperature=TEMPERATURE, stop=("###",)), []),
        ({"stop_strings": "###"}, Sampling(temperature=TEMPERATURE, stop=("###",)), []),
        ({"typical_p": 0.9, "num_beams": 4}, Sampling(temperature=TEMPERATURE), ["typical_p, num_beams are left out"]),
        ({"typical_p": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0}, Sampling(temperature=TEMPERATURE), []),
        ({"top_k": 20, "suppress_tokens": [7]}, Sampling(temperature=TEMPERATURE, top_k=20), ["suppress_tokens is"]),
        ({"temperature": 0.6, "top_k": "all"}, Sampling(temperature=TEMPERATURE), ["top_k all"]),
    ],
)
def test_all_of_it_is_taken_or_nothing_and_that_is_told(said, expected, told):
    config = GenerationConfig()
    for name, value in said.items():
        setattr(config, name, value)
    assert checkpoint.sampling(config) == expected
    assert bool(checkpoint.note(config)) == bool(told)
    assert all(words in checkpoint.note(config) for words in told)


def test_a_gguf_file_may_advise_it_too():
    config = GenerationConfig()
    checkpoint.take_from_gguf({"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "other": 1}, config)
    assert checkpoint.sampling(config) == Sampling(temperature=0.5, top_k=40)
    checkpoint.take_from_gguf({"general.sampling.temp": 0.0}, config)
    assert checkpoint.sampling(config) == Sampling(temperature=0)
