"""The beginning of GGUF files, written by hand: the format's package is not always installed."""

from __future__ import annotations

import struct


def gguf_header(*tensors: tuple[str, tuple[int, ...], int]) -> bytes:
    """A header with a value of every form and ``tensors``: name, shape and number of the type."""
    values = [
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("llama.context_length") + struct.pack("<II", 4, 4096),
        _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("b"),
        _text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.0, 1.0),
    ]
    infos = [
        _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0) for name, shape, kind in tensors
    ]
    return struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)) + b"".join(values + infos)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
