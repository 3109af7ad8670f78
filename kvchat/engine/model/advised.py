"""How a model's files advise that answers are drawn and end: taken whole, or not at all."""

from __future__ import annotations

from typing import Any

from kvchat.protocol.messages import TEMPERATURE, Sampling

MAX_TEMPERATURE = 2.0  # more is a mistake in its file
# What each field may be; transformers' names of them are kvchat's.
LEAST_AND_MOST = {
    "temperature": (1e-5, MAX_TEMPERATURE),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 0.99),
    "repetition_penalty": (0.01, 100.0),
}
# What would change answers too and is not done here; without effect at 0 or 1.
UNKNOWN = (
    *("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_repetition_penalty"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "num_beams", "penalty_alpha"),
)
OF_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def sampling(generation_config: Any) -> Sampling:
    """What ``generation_config`` advises, kvchat's own where that says nothing or a field of it is out of range."""
    named = _named(generation_config)
    if any(not _is_within(name, value) for name, value in named.items()):
        named = {}
    temperature = 0.0 if _is_greedy(generation_config) else TEMPERATURE
    return Sampling(**{"temperature": temperature, **named}, stop=_stop(generation_config))


def note(generation_config: Any) -> str:
    """A sentence about what is advised beside a temperature, or why nothing is taken; else empty."""
    named = _named(generation_config)
    if wrong := [f"{name} {value}" for name, value in named.items() if not _is_within(name, value)]:
        return f"How its generation config says that answers are drawn is left out: {', '.join(wrong)} is out of range."
    unknown = [name for name in UNKNOWN if getattr(generation_config, name, None) not in (None, 0, 1, [], {})]
    left_out = f" Its {', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} left out." if unknown else ""
    listed = ", ".join(f"{name} {value:g}" for name, value in named.items())
    if _is_greedy(generation_config):
        listed = ", ".join(filter(None, ["always the likeliest token", listed]))
    elif not set(named) - {"temperature"}:
        return left_out.strip()
    told = f"Answers are drawn as its generation config says: {listed}. A temperature that you give takes its place."
    return told + left_out


def take_from_gguf(values: dict[str, Any], generation_config: Any) -> None:
    """Put what a GGUF file's metadata advise into ``generation_config``."""
    for key, name in OF_GGUF.items():
        if type(values.get(key)) in (int, float):
            setattr(generation_config, name, values[key])
    if generation_config.temperature == 0:  # llama.cpp's way to say so
        generation_config.do_sample = False


def _named(generation_config: Any) -> dict[str, Any]:
    names = ["repetition_penalty"] if _is_greedy(generation_config) else LEAST_AND_MOST
    found = {name: getattr(generation_config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _is_greedy(generation_config: Any) -> bool:
    """True if nothing is to be drawn: transformers then looks at no other field but the repetition penalty."""
    return getattr(generation_config, "do_sample", None) is False


def _stop(generation_config: Any) -> tuple[str, ...]:
    found = getattr(generation_config, "stop_strings", None)
    texts = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return tuple(text for text in texts if isinstance(text, str) and text)


def _is_within(name: str, value: Any) -> bool:
    least, most = LEAST_AND_MOST[name]
    is_number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most
