"""The tensors of a model by their names in its files: those that are loaded, and those that quantization packs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvchat import stored_tensors

DRAFTING = re.compile(r"(?:^|\.)mtp\.")  # layers that draft further tokens
MASKS = re.compile(r"(?:^|\.)(?:attn|attention)\.(?:masked_)?bias$")  # causal ones, which GPT-2 and its kin once stored
# Towers and what leads from them to the text. The names of 99 multimodal classes of transformers 5.23 were looked at.
TOWERS = re.compile(
    r"(?:^|[._])(?:vision|visual|image|img|video|audio|speech|sound|vqmodel|\w*projector|aligner|connector|resampler"
    r"|merger|qformer|mlp1|talker|token2wav|code2wav)(?:[._]|$)"
)
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|embed_in|wte|token_embd)$")
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)$")
TABLES = re.compile(r"emb|(?:^|\.)w[tp]e$")  # also of positions and layers, which nothing packs
EXPERTS = re.compile(r"\.experts(?:\.|$)|_exps$|\.block_sparse_moe\.\w+_linear$")  # no Linears once they are loaded


@dataclass(frozen=True)
class Elements:
    """Elements of the weights that are not packed in the files.

    ``linear``: of the Linears but the head; ``embedding``: of the tokens' table; ``head``: None where that is it;
    ``experts``: of a mixture's.
    """

    linear: int = 0
    embedding: int = 0
    head: int | None = None
    experts: int = 0


def is_loaded(name: str, is_multimodal: bool) -> bool:
    """True if a tensor is a weight of the text part of a model."""
    return not (DRAFTING.search(name) or MASKS.search(name) or (is_multimodal and TOWERS.search(name)))


def count(tensors: Iterable[tuple[str, int]], packed: Iterable[str] = ()) -> Elements:
    """The elements of ``tensors``, names and elements; ``packed`` are the modules of weights packed already."""
    linear = embedding = experts = 0
    head = 0 if any(map(HEAD.search, packed)) else None
    for name, elements in tensors:
        module = stored_tensors.owner(name)
        if EMBEDDING.search(module):
            embedding += elements
        elif HEAD.search(module):
            head = (head or 0) + elements
        elif EXPERTS.search(module):
            experts += 0 if name.endswith("bias") else elements
        elif name.endswith(".weight") and not TABLES.search(module):
            linear += elements
    return Elements(linear, embedding, head, experts)
