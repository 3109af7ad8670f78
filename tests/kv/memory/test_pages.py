"""Copies of pages, exact and 8-bit ones in any order: each is found, and a beginning is that of all."""

from __future__ import annotations

import random

import torch

from kvchat.kv.memory.pages import Pages, copied, full_precision_pages, has_quantized

LAYERS = 2


def mixed(quantized: list[bool], dequantized: set[int] = frozenset()) -> Pages:
    """Pages whose elements are their number."""
    of = {kind: torch.tensor([page for page, each in enumerate(quantized) if each is kind]) for kind in (False, True)}
    full_precision, eight_bit = ([of[kind].to(dtype)[:, None].clone() for _ in range(LAYERS)] for kind, dtype in
                      ((False, torch.float32), (True, torch.uint8)))  # fmt: skip
    return Pages(quantized, full_precision, eight_bit, dequantized)


def test_each_page_is_found_among_those_of_its_kind():
    dice = random.Random(0)
    for pages in range(9):
        quantized = [dice.random() < 0.4 for _ in range(pages)]
        kept = mixed(quantized)
        for count in range(pages + 1):
            begun = kept.beginning(count)
            assert list(begun.quantized) == quantized[:count]
            assert begun.nbytes == LAYERS * sum(1 if is_quantized else 4 for is_quantized in quantized[:count])
            for page in range(count):
                found = begun.stored(page)
                assert [int(layer) for layer in found] == [page] * LAYERS
                assert (found[0].dtype is torch.uint8) is quantized[page]


def test_tokens_of_a_page_that_was_dequantized_stay_quantized():
    kept = mixed([False, False, False], {1})
    assert has_quantized(kept)
    assert not has_quantized(kept.beginning(1))
    assert has_quantized(mixed([False, True]))
    assert full_precision_pages(mixed([False, True])) == 1


def test_a_copy_has_memory_of_its_own():
    layers = [torch.arange(8.0).view(4, 2) for _ in range(LAYERS)]
    taken = copied(layers, [3, 1])
    layers[0].zero_()
    assert taken[0].tolist() == [[6, 7], [2, 3]]
    assert copied(layers, [])[1].shape == (0, 2)
