"""tokens: choose each KV head's next tokens by their quantized keys (``ops.key_codes``), and assign their slots.

Encoding keys is one launch, without torch's copies of them in 32 and 64 bits. Choosing is two launches, whose shapes do
not depend on the contents: one scores all tokens in blocks of pages, the other finds each KV head's best tokens and
their slots. If one program cannot hold all tokens, the best of each chunk are found first. Nothing is sorted
(``select.top``). Estimating the attention to unread tokens takes two more launches: parts by blocks of pages, and
``attend.join``. Codes are unpacked in registers, and not read where no token may be chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.ops import key_codes
from kvchat.kv.ops.triton.append import with_dense_rows
from kvchat.kv.ops.triton.attend import join
from kvchat.kv.ops.triton.language import LOG2E, LOWEST, padded
from kvchat.kv.ops.triton.select import top

PAGES = 16  # pages that one program scores
LEAST_BLOCKS = 64  # blocks with one scoring program each: kernels are compiled for so many, and again at each doubling
# Tokens among which one program chooses: compiled for so many, and again at each doubling. More are chunked first.
FEWEST, MOST, CHUNK = 4096, 16384, 8192
PER_WARP, PER_WARP_OF_CHUNK = 1024, 512
CHOSEN, RESIDENT = tl.constexpr(1), tl.constexpr(2)  # marks of tokens
INTEGERS = tl.constexpr(8388608.0)  # 2 ** 23: from here on the lowest bit of a float32 is 1
INTEGER_BITS = tl.constexpr(0x4B000000)


@triton.jit(do_not_specialize=["tokens", "pages", "head_stride", "token_stride"])
def _pack_keys(
    keys,
    rows,
    edges,
    tokens,
    pages,
    head_stride,
    token_stride,
    BITS: tl.constexpr,
    D_K: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
):
    """Pack one word of each token of a page, and the lowest and highest keys of its channels.

    ``edges`` is ``rows`` in 16 bits. Tokens beyond the last repeat the page's first key.
    """
    page, head, word = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    per: tl.constexpr = 32 // BITS
    line, i = tl.arange(0, PAGE_ROWS), tl.arange(0, per)
    stored, col = line < tl.minimum(tokens - page * PAGE, PAGE), word * per + i
    token = (page * PAGE + tl.where(stored, line, 0)).to(tl.int64)
    at = keys + head * head_stride + token[:, None] * token_stride + col[None, :]
    key = tl.load(at, mask=(col < D_K)[None, :], other=0).to(tl.float32)
    low = tl.min(key, 0).to(edges.dtype.element_ty)
    high = tl.max(key, 0).to(edges.dtype.element_ty)
    begin = (head * pages + page) * (WORDS * (PAGE + per))
    edge = edges + 2 * (begin + WORDS * PAGE) + col
    tl.store(edge, low)
    tl.store(edge + WORDS * per, high)
    lowest = low.to(tl.float32)
    scale = tl.maximum(high.to(tl.float32) - lowest, 1.1754943508222875e-38)[None, :]
    share = tl.minimum(tl.maximum(tl.div_rn(key - lowest[None, :], scale), 0), 1)
    # Round half to even, as torch does.
    code = (share * ((1 << BITS) - 1) + INTEGERS).to(tl.int32, bitcast=True) & ((1 << BITS) - 1)
    tl.store(rows + begin + word * PAGE + line, tl.sum(code << (i * BITS)[None, :], 1), mask=line < PAGE)


@triton.jit(
    do_not_specialize=["pages", "blocks"], do_not_specialize_on_alignment=["hidden", "masked", "highest", "totals"]
)
def _token_scores(
    query,
    index,
    hidden,
    masked,
    scores,
    highest,
    totals,
    pages,
    blocks,
    query_stride,
    scaling,
    CHOOSES: tl.constexpr,
    IS_BF16: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    D_K: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
):
    """Score the tokens of some pages, with ``LOWEST`` for those that may not be chosen.

    Per block, store the highest score of the tokens that are not hidden, and the sum of ``exp(score - highest)``. Each
    key is unpacked once for four queries, whose sums fit the registers.
    """
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    per: tl.constexpr = 32 // BITS
    page = block * PAGES + tl.arange(0, PAGES)
    line = tl.arange(0, PAGE_ROWS)
    token = page[:, None] * PAGE + line[None, :]
    stored = (page < pages)[:, None] & (line < PAGE)[None, :]
    seen, may = stored, stored
    if CHOOSES:
        seen = stored & (tl.load(hidden + token, mask=stored, other=1) == 0)
        may = seen & (tl.load(masked + token, mask=stored, other=1) == 0)
    some = tl.sum(tl.sum(seen.to(tl.int32), 1), 0) > 0
    begin = index + (head * pages + page) * (WORDS * (PAGE + per))
    for first in range(0, GROUP, 4):
        row = head * GROUP + first
        s0 = tl.zeros((PAGES, PAGE_ROWS), tl.float32)
        s1, s2, s3 = s0, s0, s0
        if some:
            at = begin[:, None] + line[None, :]
            following = tl.load(at, mask=stored, other=0)
            for word in range(WORDS):
                codes, at = following, at + PAGE
                following = tl.load(at, mask=stored & (word + 1 < WORDS), other=0)  # prefetched, because it takes long
                edges = begin + WORDS * PAGE + word * (per // 2)
                for i in tl.static_range(per):  # unrolled, so that all edges of a word are in flight at once
                    if i % 2 == 0:  # two 16-bit edges share a word
                        lows = tl.load(edges + i // 2, mask=page < pages, other=0)
                        highs = tl.load(edges + (WORDS * (per // 2) + i // 2), mask=page < pages, other=0)
                    if i == per // 2:
                        codes = codes >> 16
                    key = _keys(codes, lows, highs, i % (per // 2), BITS, IS_BF16)
                    col = word * per + i
                    asked = query + row * query_stride + col
                    s0 += key * _element(asked, (col < D_K) & (first < GROUP))
                    if GROUP > 1:
                        s1 += key * _element(asked + query_stride, (col < D_K) & (first + 1 < GROUP))
                    if GROUP > 2:
                        s2 += key * _element(asked + 2 * query_stride, (col < D_K) & (first + 2 < GROUP))
                    if GROUP > 3:
                        s3 += key * _element(asked + 3 * query_stride, (col < D_K) & (first + 3 < GROUP))
        for i in tl.static_range(4):
            if i < GROUP:
                sums = s0 if i == 0 else s1 if i == 1 else s2 if i == 2 else s3
                found, is_row = tl.where(seen, sums * scaling, LOWEST), first + i < GROUP
                kept = tl.where(may, found, LOWEST)
                tl.store(scores + (row + i) * (pages * PAGE) + token, kept, mask=stored & is_row)
                if CHOOSES:
                    most = tl.max(tl.max(found, 1), 0)
                    total = tl.sum(tl.sum(tl.where(seen, tl.exp(found - most), 0.0), 1), 0)
                    tl.store(highest + (row + i) * blocks + block, most, mask=is_row)
                    tl.store(totals + (row + i) * blocks + block, total, mask=is_row)


@triton.jit
def _keys(codes, lows, highs, PLACE: tl.constexpr, BITS: tl.constexpr, IS_BF16: tl.constexpr):
    """Return the keys of the codes at ``PLACE`` of their words; an odd place has its edges in the upper halves."""
    low, high = _edge(lows, PLACE % 2, IS_BF16), _edge(highs, PLACE % 2, IS_BF16)
    most: tl.constexpr = ((1 << BITS) - 1) << (PLACE * BITS)
    # In such a float the lowest bit is 1, so the masked bits are ``2 ** (PLACE * BITS)`` times the code.
    code = ((codes & most) | INTEGER_BITS).to(tl.float32, bitcast=True) - INTEGERS
    return low[:, None] + code * ((high - low) * (1.0 / most))[:, None]


@triton.jit
def _element(query, is_there):
    return tl.load(query, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def _edge(word, UPPER: tl.constexpr, IS_BF16: tl.constexpr):
    """Return one of the two 16-bit numbers in a word."""
    if IS_BF16:
        return ((word & -65536) if UPPER else (word << 16)).to(tl.float32, bitcast=True)
    half = ((word >> 16) if UPPER else word).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bits(
    scores,
    highest,
    totals,
    listed,
    head,
    first,
    place,
    found,
    blocks,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the bits of the weights of a head's items from ``first`` on, -1 for items that must not be chosen.

    Weights are nonnegative, so their bits have the same order. Items are ``found`` tokens, or ``listed`` ones.
    """
    if LISTED:
        bits = tl.load(listed + (head * found + first) + place, mask=place < found - first, other=-1)
    else:
        block, group = tl.arange(0, BLOCKS), tl.arange(0, GROUP_ROWS)
        there = (group < GROUP)[:, None] & (block < blocks)[None, :]
        of_block = (head * GROUP + group)[:, None] * blocks + block[None, :]
        most = tl.load(highest + of_block, mask=there, other=LOWEST)
        limits = tl.max(most, 1)
        shares = tl.load(totals + of_block, mask=there, other=0.0)
        sums = tl.maximum(tl.sum(shares * tl.exp(most - limits[:, None]), 1), 1e-30)
        weight = tl.zeros(place.shape, tl.float32)
        for g in range(GROUP):
            score = tl.load(
                scores + ((head * GROUP + g) * found + first) + place, mask=place < found - first, other=LOWEST
            )
            limit, total = tl.sum(tl.where(group == g, limits, 0.0), 0), tl.sum(tl.where(group == g, sums, 0.0), 0)
            weight = tl.where(score > LOWEST, weight + tl.exp(score - limit) / (total * GROUP), -1.0)
        bits = tl.where(weight < 0, -1, weight.to(tl.int32, bitcast=True))
    return bits


@triton.jit(
    do_not_specialize=["found", "blocks", "kept"],
    do_not_specialize_on_alignment=[
        "scores",
        "highest",
        "totals",
        "marks",
        "listed",
        "listed_bits",
        "best",
        "best_bits",
    ],
)
def _best_of_chunk(
    scores,
    highest,
    totals,
    marks,
    listed,
    listed_bits,
    best,
    best_bits,
    found,
    blocks,
    kept,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the ``kept`` best of a chunk and the bits of their weights, in order of position, padded with -1."""
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, first = tl.arange(0, CHUNK), chunk * CHUNK
    bits = _bits(
        scores, highest, totals, listed_bits, head, first, place, found, blocks, LISTED, GROUP, GROUP_ROWS, BLOCKS
    )  # fmt: skip
    begin = (head * tl.num_programs(1) + chunk) * kept
    best, best_bits = best + begin, best_bits + begin
    tl.store(best_bits + place, -1, mask=place < kept)
    taken = top(bits, kept)
    at = tl.cumsum(taken, 0) - 1
    tl.debug_barrier()  # other threads wrote -1 there
    tl.store(best_bits + at, bits, mask=taken > 0)
    if LISTED:
        token = tl.load(listed + (head * found + first) + place, mask=taken > 0)
    else:
        token = first + place
        tl.store(marks + (head * found + first) + place, tl.zeros((CHUNK,), tl.int8), mask=place < found - first)
    tl.store(best + at, token, mask=taken > 0)


@triton.jit(
    do_not_specialize=["tokens", "found", "blocks", "k", "resident_stride"],
    do_not_specialize_on_alignment=["scores", "highest", "totals", "marks", "listed", "listed_bits", "resident"],
)
def _place_tokens(
    scores,
    highest,
    totals,
    marks,
    listed,
    listed_bits,
    resident,
    fresh,
    placed,
    tokens,
    found,
    blocks,
    k,
    resident_stride,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FOUND: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Place the ``k`` best: those with a slot keep it, the others take slots of tokens that are not chosen."""
    head = tl.program_id(0).to(tl.int64)
    item, slot = tl.arange(0, FOUND), tl.arange(0, SLOTS)
    bits = _bits(
        scores, highest, totals, listed_bits, head, 0, item, found, blocks, LISTED, GROUP, GROUP_ROWS, BLOCKS
    )  # fmt: skip
    taken = top(bits, k) > 0
    mark, token = marks + head * tokens, item
    if LISTED:
        token = tl.load(listed + head * found + item, mask=taken, other=0)
        tl.store(mark + token, CHOSEN, mask=taken)
    else:
        tl.store(mark + item, taken.to(tl.int8), mask=item < tokens)
    # Other threads read what was written, here and below.
    tl.debug_barrier()
    held = tl.load(resident + head * resident_stride + slot, mask=slot < k, other=-1)
    there = (held >= 0) & (held < tokens)
    stays = there & (tl.load(mark + held, mask=there, other=0) == CHOSEN)
    tl.store(mark + held, RESIDENT, mask=stays)
    tl.debug_barrier()
    missing = (tl.load(mark + token, mask=taken, other=0) == CHOSEN).to(tl.int32)
    tl.store(fresh + head * k + (tl.cumsum(missing, 0) - 1), token, mask=missing > 0)
    tl.debug_barrier()
    free = ((slot < k) & (stays == 0)).to(tl.int32)
    rank = tl.cumsum(free, 0) - 1
    comes = tl.load(fresh + head * k + rank, mask=(free > 0) & (rank < tl.sum(missing, 0)), other=-1)
    tl.store(placed + head * k + slot, tl.where(stays, held, comes).to(tl.int64), mask=slot < k)


@triton.jit(do_not_specialize=["pages"])
def _unread_parts(
    query,
    edges,
    scores,
    marks,
    means,
    sums,
    extremes,
    pages,
    query_stride,
    scaling,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    COLS_K: tl.constexpr,
    COLS_V: tl.constexpr,
):
    """Compute ``selection.unread_part`` of some pages for ``attend.join``; ``edges`` is the index in 16 bits."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    per: tl.constexpr = 32 // BITS
    page, line = block * PAGES + tl.arange(0, PAGES), tl.arange(0, PAGE_ROWS)
    col_k, col_v = tl.arange(0, COLS_K), tl.arange(0, COLS_V)
    is_page, row = (page < pages)[:, None], (head * pages + page)[:, None]
    token = page[:, None] * PAGE + line[None, :]
    stored = is_page & (line < PAGE)[None, :]
    unread = stored & (tl.load(marks + head * (pages * PAGE) + token, mask=stored, other=1) == 0)
    low = edges + row * (2 * WORDS * (PAGE + per)) + 2 * WORDS * PAGE + col_k[None, :]
    in_k = is_page & (col_k < D_K)[None, :]
    lows = tl.load(low, mask=in_k, other=0.0).to(tl.float32)
    steps = (tl.load(low + WORDS * per, mask=in_k, other=0.0).to(tl.float32) - lows) * (scaling / ((1 << BITS) - 1))
    in_v = is_page & (col_v < D_V)[None, :]
    mean = tl.load(means + row * D_V + col_v[None, :], mask=in_v, other=0.0).to(tl.float32)
    for g in range(GROUP):
        asks = head * GROUP + g
        score = tl.load(scores + asks * (pages * PAGE) + token, mask=unread, other=LOWEST)
        most = tl.max(score, 1)
        mass = tl.sum(tl.where(score > LOWEST, tl.exp(score - most[:, None]), 0.0), 1)
        asked = tl.load(query + asks * query_stride + col_k, mask=col_k < D_K, other=0.0).to(tl.float32)
        off = steps * asked[None, :]
        level = tl.where(mass > 0, (most - tl.sum(off * off, 1) / 24) * LOG2E, LOWEST)  # ``key_codes.excess``
        highest = tl.max(level, 0)
        weight = mass * tl.exp2(level - highest)
        part = asks * tl.num_programs(1) + block
        tl.store(sums + part * D_V + col_v, tl.sum(weight[:, None] * mean, 0), mask=col_v < D_V)
        tl.store(extremes + part * 2, highest)
        tl.store(extremes + part * 2 + 1, tl.sum(weight, 0))


def encode(keys: Tensor, page: int, bits: int) -> Tensor:
    """Implement ``key_codes.encode``."""
    keys = keys if keys.stride(2) == 1 else keys.contiguous()
    heads, tokens, d_k = keys.shape
    pages, words = triton.cdiv(tokens, page), key_codes.width_of(d_k, bits) * bits // key_codes.WORD
    rows = torch.empty((heads, pages, key_codes.words_of(d_k, page, bits)), dtype=torch.int32, device=keys.device)
    _pack_keys[(pages, heads, words)](
        keys,
        rows,
        rows.view(key_codes.edge_dtype(keys.dtype)),
        tokens,
        pages,
        *keys.stride()[:2],
        bits,
        d_k,
        page,
        words,
        triton.next_power_of_2(page),
        num_warps=1,
    )
    return rows


def token_scores(query: Tensor, index: Tensor, page: int, bits: int, scaling: float) -> Tensor:
    """Implement ``key_codes.token_scores``."""
    return _scored(query, index, page, bits, scaling, ())[0]


def choosable(k: int) -> bool:
    """Return True if the kernels can choose ``k`` tokens."""
    return k <= CHUNK // 2


def choose_tokens(
    query: Tensor,
    index: Tensor,
    bits: int,
    scaling: float,
    hidden: Tensor,
    masked: Tensor,
    resident: Tensor,
    means: Tensor | None,
    page: int,
) -> tuple[Tensor, Tensor | None]:
    """Implement ``TorchOps.choose_tokens`` if they are ``choosable``."""
    scored = scores, highest, _ = _scored(query, index, page, bits, scaling, (hidden, masked))
    (heads, group, tokens), blocks, k = scores.shape, highest.shape[2], resident.shape[1]
    marks = torch.empty((heads, tokens), dtype=torch.int8, device=query.device)
    groups = group, triton.next_power_of_2(group)
    of_blocks = max(LEAST_BLOCKS, triton.next_power_of_2(blocks))
    listed, found = torch.empty((2, heads, 0), dtype=torch.int32, device=query.device), tokens
    while found > (MOST if found == tokens else CHUNK):  # listed items take more registers
        chunks, longer = triton.cdiv(found, CHUNK), listed
        listed = longer.new_empty((2, heads, chunks * k))
        _best_of_chunk[(heads, chunks)](
            *scored,
            marks,
            *longer,
            *listed,
            found,
            blocks,
            k,
            found < tokens,
            *groups,
            of_blocks,
            CHUNK,
            num_warps=CHUNK // PER_WARP_OF_CHUNK,
        )
        found = chunks * k
    fresh = torch.empty((heads, k), dtype=torch.int32, device=query.device)
    placed = torch.empty((heads, k), dtype=torch.int64, device=query.device)
    of_found = max(FEWEST, triton.next_power_of_2(found))
    sizes = tokens, found, blocks, k, resident.stride(0)
    shapes = found < tokens, *groups, of_blocks, of_found, triton.next_power_of_2(k)
    _place_tokens[(heads,)](
        *scored, marks, *listed, resident, fresh, placed, *sizes, *shapes, num_warps=of_found // PER_WARP
    )
    if means is None:
        return placed, None
    query, means, d_k, d_v = with_dense_rows(query), means.contiguous(), query.shape[1], means.shape[2]
    sums = scores.new_empty((heads, group, blocks, d_v))
    extremes = scores.new_empty((heads, group, blocks, 2))
    _unread_parts[(heads, blocks)](
        query,
        index.contiguous().view(key_codes.edge_dtype(query.dtype)),
        scores,
        marks,
        means,
        sums,
        extremes,
        tokens // page,
        query.stride(0),
        scaling,
        bits,
        group,
        d_k,
        d_v,
        page,
        key_codes.width_of(d_k, bits) * bits // key_codes.WORD,
        PAGES,
        triton.next_power_of_2(page),
        padded(d_k),
        padded(d_v),
        num_warps=4,
    )
    return placed, join(sums, extremes)


def _scored(
    query: Tensor, index: Tensor, page: int, bits: int, scaling: float, masks: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores ``[H, G, token]``, and the highest and the sum of exponentials of each block ``[H, G, block]``.

    ``masks`` are the hidden and the masked tokens, or empty.
    """
    query, index = with_dense_rows(query), index.contiguous()
    (heads, pages, _), d_k = index.shape, query.shape[1]
    group, tokens, words = len(query) // heads, pages * page, key_codes.width_of(d_k, bits) * bits // key_codes.WORD
    blocks = triton.cdiv(pages, PAGES)
    scores = torch.empty((heads, group, tokens), dtype=torch.float32, device=query.device)
    highest, totals = torch.empty((2, heads, group, blocks), dtype=torch.float32, device=query.device)
    _token_scores[(heads, blocks)](
        query,
        index,
        *([mask.view(torch.uint8) for mask in masks] or [index, index]),
        scores,
        highest,
        totals,
        pages,
        blocks,
        query.stride(0),
        scaling,
        bool(masks),
        key_codes.edge_dtype(query.dtype) == torch.bfloat16,
        bits,
        group,
        d_k,
        page,
        words,
        PAGES,
        triton.next_power_of_2(page),
        num_warps=4,
    )
    return scores, highest, totals
