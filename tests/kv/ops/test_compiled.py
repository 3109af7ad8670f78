"""The compiled loops: their results, and machines without numba, OpenMP or a cache folder."""

import sys

import numba
import numpy as np
import pytest
import torch

from kvchat.kv.attention import AttentionSpec, attend, products
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops import cpu_ops, key_codes
from kvchat.kv.ops.numba import loops, pages, tokens
from kvchat.kv.ops.selection import heaviest, mask_of, unread_part

NONE = np.zeros(0, np.bool_)


def test_the_cpu_uses_compiled_loops():
    assert cpu_ops.compiled_loops() is pages


@pytest.mark.parametrize("error", [ImportError, OSError, MemoryError])
def test_torch_is_used_if_numba_cannot_be_loaded(error, monkeypatch):
    class FailingFinder:
        @staticmethod
        def find_spec(name, *_):
            if name == "kvchat.kv.ops.numba.pages":
                raise error("no such library, or no memory for it")

    monkeypatch.setattr(sys, "meta_path", [FailingFinder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "kvchat.kv.ops.numba.pages")
    monkeypatch.delattr("kvchat.kv.ops.numba.pages")
    assert cpu_ops.imported.__wrapped__(cpu_ops.PAGES) is None


@pytest.mark.parametrize("folder", ["/dev/null/no-folder", "/proc/no-folder"])
def test_loops_compile_without_a_cache_folder(folder, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", folder)

    @loops.compiled("void(f4[::1])")
    def double(x):
        for i in range(len(x)):
            x[i] *= 2

    numbers = np.arange(3, dtype=np.float32)
    double(numbers)
    assert numbers.tolist() == [0, 2, 4]


def test_equal_pages_are_taken_in_order_and_keep_their_slots():
    scores = np.zeros((1, 2, 9), np.float32)
    resident, placed = np.array([[7, 4, EMPTY, 3]]), np.zeros((1, 4), np.int64)
    pages.choose(scores, 3, 8, resident, placed)
    assert placed.tolist() == [[5, 4, 6, 3]]


def test_softmax_is_accurate_to_the_last_place():
    spread = np.linspace(-85, 0, 4001, dtype=np.float32)
    scores = np.concatenate([spread, np.float32([-300, -1e30, -np.inf])])
    weights, powers = np.ones(len(scores), np.float32), np.empty(len(scores), np.float32)
    pages.add_softmax(scores, weights, powers)
    exact = np.exp(scores.astype(np.float64))
    assert np.allclose(powers, exact, rtol=2**-23, atol=2e-38)
    assert np.allclose(weights - 1, exact / exact.sum(), atol=2**-23)


@pytest.mark.parametrize("scores", [[np.nan, np.inf, np.inf], [np.inf, np.inf], [-np.inf, -np.inf], [np.nan] * 20])
def test_nan_and_infinite_numbers_do_not_crash(scores):
    weights = np.zeros(len(scores), np.float32)
    pages.add_softmax(np.float32(scores), weights, np.empty_like(weights))
    query = np.full((1, 2, 4), scores[0], np.float32)
    words = np.ones((1, 3, 32 + 16), np.uint32)
    table, result = np.zeros((1, 40), np.int32), np.zeros((1, 2, 4), np.float32)
    stored = np.ones(96 * 4, np.float32)
    choice = query, words, words.view(np.uint16), 16, 2, 96, 0, 4, 80, 96, 20, NONE, np.zeros((1, 3, 4), np.uint16), 1
    attention = query, 1.0, 0.0, np.empty((0, 0), np.float32), stored, 0, 4, stored, 0, 4, table, result
    tokens.choose_and_attend(*choice, *attention)
    tokens.attend_tokens(*attention, 0, np.empty((0, 0, 0), np.float32))


@pytest.mark.parametrize("left_over", [0, 3])
@pytest.mark.parametrize("far", [8, 9, 1])
def test_the_best_tokens_are_listed_at_any_distance(far, left_over):
    """Even if each is in a different block, as in a long conversation."""
    k, first, n = 20, 4, 8 * 300 + left_over
    bits = np.full(-(-n // tokens.LANES) * tokens.LANES, -5, np.int32)
    bits[:n] = 5
    best = 16 + far * np.arange(k)
    bits[best] = 100 + np.arange(k)
    table = np.full(first + k + 7 + 20, 77, np.int32)
    named = tokens._list_read(bits, 0, first, first + n - 1, first + n + 7, k, NONE, table[:-20])
    assert table[:named].tolist() == [*range(first), *(first + best), *range(first + n, first + n + 7)]
    assert named == first + k + 7
    assert (table[-20:] == 77).all()


@pytest.mark.parametrize("compresses", [False, tokens.COMPRESSES])
def test_keep_gives_the_same_without_the_compress_instruction(compresses, monkeypatch):
    monkeypatch.setattr(tokens, "COMPRESSES", compresses)
    keep = tokens._keep

    @numba.njit
    def kept(bits, least, values, places):
        found = 0
        for at in range(0, len(bits), 16):
            found = keep(bits, at, least, values, places, found)
        return found

    bits = torch.randint(-9, 9, (40 * 16,), dtype=torch.int32, generator=torch.Generator().manual_seed(2)).numpy()
    bits[64:96] = -1
    values, places = np.empty((2, len(bits) + 16), np.int32)
    found = kept(bits, 3, values, places)
    assert places[:found].tolist() == (bits >= 3).nonzero()[0].tolist()
    assert values[:found].tolist() == bits[bits >= 3].tolist()


@pytest.mark.parametrize("scores", [[-3.5, -2.25, -8], [-1, 0, 1e30, 5], [-np.inf, -1e30], [-0.0]])
def test_the_highest_score_is_found(scores):
    assert tokens._highest(np.float32(scores)) == max(np.float32(scores))


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_selection_and_attention_do_not_depend_on_thread_count(threads, joins):
    generator = torch.Generator().manual_seed(threads)
    heads, group, d, n, k = 3, 2, 16, 1000, 300
    keys, values = torch.randn((2, heads, n, d), generator=generator).unbind()
    query, asking = torch.randn((2, heads * group, d), generator=generator).unbind()
    pinned = torch.zeros(500, dtype=torch.bool)
    pinned[[3, 400]] = True
    known, first, last = n - n % 32, 4, n - 40
    index = key_codes.encode(keys[:, :known], 32, 2)
    scores = key_codes.token_scores(asking, index, 32, 2, 0.25)
    masked = torch.arange(known) < first
    masked |= torch.arange(known) > last
    masked[: len(pinned)] |= pinned
    best = heaviest(scores, torch.zeros_like(masked), masked, k)
    always = torch.tensor([*range(first), 400, *range(last + 1, n)])
    wanted = torch.cat((best, always.expand(heads, -1)), 1).sort(1).values.to(torch.int32)
    table, result = np.zeros((heads, wanted.shape[1] + 50), np.int32), np.empty((heads, group, d), np.float32)
    stored = (keys.reshape(-1).numpy(), n * d, d, values.reshape(-1).numpy(), n * d, d)
    of_heads = [x.reshape(heads, group, d).numpy() for x in (asking, query)]
    words = index.view(torch.uint32).numpy(), index.view(torch.uint16).numpy()
    attention = of_heads[1], 0.25, 0.0, np.empty((0, 0), np.float32), *stored
    means = values[:, :known].view(heads, -1, 32, d).mean(2).bfloat16()
    unread = ~(masked | mask_of(best, known))
    excess = key_codes.excess(asking, index, 32, 2, 0.25)
    added = unread_part(scores, unread, excess, means) if joins else None
    loops.use_threads(threads)
    joined = means.view(torch.uint16).numpy() if joins else np.empty((0, 0, 0), np.uint16)
    for _ in range(20):
        choice = of_heads[0], *words, 16, 2, known, 0, first, last, n, k, pinned.numpy(), joined
        assert tokens.choose_and_attend(*choice, 1, *attention, table, result) == wanted.shape[1]
        assert table[:, : wanted.shape[1]].tolist() == wanted.tolist()
        assert (table[:, wanted.shape[1] :] == EMPTY).all()
        at = wanted.long()[:, :, None].expand(-1, -1, d)
        read = products(keys.gather(1, at), values.gather(1, at))
        exact = attend(query.view(heads, group, d), read, None, AttentionSpec(0.25), None, added)[0]
        assert np.allclose(result, exact.numpy(), atol=1e-6)
        table[:], result[:] = 0, 0
    if joins:
        alone = np.empty((heads, group, d + 1), np.float32)
        tokens.choose_and_attend(*choice, 0, *attention, table, alone)
        assert np.allclose(alone, added.numpy(), atol=1e-5)
        assert table[:, : wanted.shape[1]].tolist() == wanted.tolist()


def test_loops_have_one_thread_without_a_usable_openmp(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert not loops._has_threads()
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.omppool", None)
    assert not loops._has_threads()


@pytest.mark.skipif(not loops.HAS_THREADS, reason="no OpenMP here")
def test_loops_use_no_more_threads_than_available():
    loops.use_threads(10_000)
    assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS
    loops.use_threads(1)
    assert numba.get_num_threads() == 1
