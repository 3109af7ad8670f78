"""A tokenizer with one token per byte, and a chat template that puts each turn between two added tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MARKERS = ("<turn>", "</turn>")
SIZE = 256 + len(MARKERS)
TEMPLATE = (
    "{% for m in messages %}{{ '<turn>' + m.role + '\n' + m.content + '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)


def byte_level(normalizer=None, markers=MARKERS, **added: bool) -> PreTrainedTokenizerBase:
    """One token per byte; the markers around a turn are added tokens with the given properties."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return finished(backend, normalizer, added, markers)


def finished(backend: Tokenizer, normalizer, added: dict[str, bool], markers=MARKERS) -> PreTrainedTokenizerBase:
    if normalizer is not None:
        backend.normalizer = normalizer
    add = backend.add_special_tokens if added.get("special", True) else backend.add_tokens
    add([AddedToken(marker, **{"special": True, "normalized": False, **added}) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = TEMPLATE.replace(MARKERS[0], markers[0]).replace(MARKERS[1], markers[1])
    return tokenizer
