import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.eight_bit_pages import quantize
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.memory.page_file import HEADER_BYTES, TOKEN, DamagedFileError, End, PageFile, blocks_of
from kvchat.kv.memory.pages import Pages

PAGE = 4
TOKENS = 14


def geometry(dtype=torch.float32) -> Geometry:
    return Geometry(layers=2, q_heads=2, kv_heads=2, d_k=3, d_v=2, dtype=dtype, page=PAGE)


def pages_of(tokens: int, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    g = geometry(dtype)
    generator = torch.Generator().manual_seed(seed)
    shape = (g.pages(tokens), g.kv_heads, 2, g.page, g.d)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(g.layers)]


class Target:
    """A pool that takes the pages read."""

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.layers = layers

    def put(self, first: int, pages: Pages) -> None:
        for layer, kept in zip(self.layers, pages.full_precision, strict=True):
            layer[first : first + len(kept)] = kept


def page_of(layers: list[torch.Tensor], page: int) -> bytes:
    return blocks_of([layer[page] for layer in layers])


def rows_of(tokens: int, seed: int = 0):
    rows = np.zeros(tokens, TOKEN)
    rows["id"] = np.random.default_rng(seed).integers(0, 1000, tokens)
    rows["chars"] = -1
    return rows


def write_file(path, tokens=TOKENS, dtype=torch.float32, seed=0, first=0, identity=None) -> PageFile:
    file = PageFile(path, geometry(dtype), identity or {"model": "a"})
    layers, rows = pages_of(tokens, dtype, seed), rows_of(tokens, seed)
    for page in range(first, len(layers[0])):
        file.write(page, rows[page * PAGE : (page + 1) * PAGE], page_of(layers, page))
    return file


def usable_tokens(path) -> int:
    """Tokens that a reader accepts from a damaged copy of ``write_file``, with equal K/V; 0 if it rejects the file."""
    file, into = PageFile(path, geometry(), {"model": "a"}), pages_of(TOKENS, seed=9)
    try:
        rows = file.rows()
    except DamagedFileError:
        return 0
    there = file.read(Target(into), len(rows))
    assert rows[:there].tobytes() == rows_of(TOKENS)[:there].tobytes()
    for layer, stored in zip(into, pages_of(TOKENS), strict=True):
        assert torch.equal(layer[: there // PAGE], stored[: there // PAGE])
    return there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_pages_are_read_back_bit_for_bit(tmp_path, dtype):
    file = write_file(tmp_path / "folder" / "a.kv", dtype=dtype)
    into = pages_of(TOKENS, dtype, seed=9)
    assert file.rows().tobytes() == rows_of(TOKENS).tobytes()
    assert file.read(Target(into), TOKENS) == TOKENS
    assert all(torch.equal(a, b) for a, b in zip(into, pages_of(TOKENS, dtype), strict=True))
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700


def test_new_pages_are_appended(tmp_path):
    path = tmp_path / "a.kv"
    file = write_file(path, tokens=10)
    whole = HEADER_BYTES + 2 * file.record_bytes(False)
    before = path.read_bytes()[:whole]
    layers, rows = pages_of(TOKENS), rows_of(TOKENS)
    for page in (2, 3):
        file.write(page, rows[page * PAGE : (page + 1) * PAGE], page_of(layers, page))
    assert path.read_bytes()[:whole] == before
    assert len(file.rows()) == TOKENS


def test_a_branch_replaces_later_pages(tmp_path):
    file = write_file(tmp_path / "a.kv")
    file.write(1, rows_of(TOKENS, seed=5)[4:7], page_of(pages_of(TOKENS, seed=5), 1))
    assert file.rows()["id"].tolist() == [*rows_of(TOKENS)["id"][:4], *rows_of(TOKENS, seed=5)["id"][4:7]]


def test_truncated_files_keep_their_complete_pages(tmp_path):
    """As left by a process that was killed while writing: any number of the last bytes may be missing."""
    path = tmp_path / "a.kv"
    record, data = write_file(path).record_bytes(False), path.read_bytes()
    for length in [*range(0, HEADER_BYTES, 512), *range(HEADER_BYTES - 2, len(data), 19), len(data)]:
        path.write_bytes(data[:length])
        whole = max(0, length - HEADER_BYTES) // record
        assert usable_tokens(path) == min(TOKENS, whole * PAGE)


def test_changed_bytes_are_detected(tmp_path):
    path = tmp_path / "a.kv"
    record, data = write_file(path).record_bytes(False), path.read_bytes()
    places = random.Random(0).sample(range(len(data)), 120)
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert usable_tokens(path) == max(0, place - HEADER_BYTES) // record * PAGE


def test_pages_of_two_histories_are_not_mixed(tmp_path):
    one, other = tmp_path / "one.kv", tmp_path / "other.kv"
    record = write_file(one).record_bytes(False)
    write_file(other, seed=1)
    cut = HEADER_BYTES + 2 * record
    one.write_bytes(one.read_bytes()[:cut] + other.read_bytes()[cut:])
    assert usable_tokens(one) == 2 * PAGE


@pytest.mark.parametrize(
    ("identity", "dtype", "reason"),
    [
        ({"model": "b"}, torch.float32, "another model"),
        ({"model": "a", "chat template": "x"}, torch.float32, "another chat template"),
        ({"model": "a"}, torch.float16, "another number format of K/V"),
    ],
)
def test_files_of_another_model_or_format_are_rejected(tmp_path, identity, dtype, reason):
    path = write_file(tmp_path / "a.kv").path
    with pytest.raises(DamagedFileError, match=reason):
        PageFile(path, geometry(dtype), identity).rows()


@pytest.mark.parametrize("data", [b"", b"PK\3\4" * 2000, b"KVCHATKV\xff\xff\xff\xff" + b"[" * 9000])
def test_invalid_files_are_rejected(tmp_path, data):
    path = tmp_path / "a.kv"
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="damaged"):
        PageFile(path, geometry(), {"model": "a"}).rows()


def test_pages_are_not_appended_to_another_history(tmp_path):
    one = write_file(tmp_path / "a.kv", tokens=8)
    other = write_file(tmp_path / "a.kv", tokens=8, seed=1)  # another process with the same conversation
    with pytest.raises(DamagedFileError, match="another history"):
        one.write(2, rows_of(TOKENS)[8:12], page_of(pages_of(TOKENS), 2))
    assert other.rows()["id"].tolist() == rows_of(8, seed=1)["id"].tolist()


def test_pages_overwritten_after_rows_are_not_read(tmp_path):
    write_file(tmp_path / "a.kv")
    reader, into = PageFile(tmp_path / "a.kv", geometry(), {"model": "a"}), pages_of(TOKENS, seed=9)
    assert len(reader.rows()) == TOKENS
    write_file(tmp_path / "a.kv", seed=1)
    assert reader.read(Target(into), TOKENS) == 0
    assert reader.end() == End()


def killed_while_writing(path, seconds: float) -> None:
    """Let another process write one history after another to ``path``, and kill it after ``seconds``."""
    histories = [
        (rows_of(TOKENS, seed), [page_of(pages_of(TOKENS, seed=seed), page) for page in range(4)]) for seed in range(3)
    ]
    if (child := os.fork()) == 0:
        try:
            while True:
                for rows, blocks in histories:
                    file = PageFile(path, geometry(), {"model": "a"})
                    for page in range(4):
                        file.write(page, rows[page * PAGE :][:PAGE], blocks[page], query=b"query" if page == 3 else b"")
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_files_of_a_killed_writer_hold_one_history(tmp_path):
    moments = random.Random(0)
    for _ in range(15):
        path = tmp_path / "a.kv"
        killed_while_writing(path, moments.uniform(0, 0.02))
        file, into = PageFile(path, geometry(), {"model": "a"}), pages_of(TOKENS, seed=9)
        try:
            rows = file.rows()
        except (DamagedFileError, FileNotFoundError):
            continue
        if not len(rows):
            continue
        there = file.read(Target(into), len(rows))
        assert there == len(rows)
        seed = next(seed for seed in range(3) if rows[0]["id"] == rows_of(TOKENS, seed)[0]["id"])
        assert rows.tobytes() == rows_of(TOKENS, seed)[: len(rows)].tobytes()
        for page in range(-(-there // PAGE)):
            assert page_of(into, page) == page_of(pages_of(TOKENS, seed=seed), page)


def test_pages_are_not_appended_to_a_deleted_file(tmp_path):
    file = write_file(tmp_path / "a.kv")
    file.path.unlink()
    with pytest.raises(DamagedFileError):
        file.write(2, rows_of(PAGE), page_of(pages_of(TOKENS), 2))
    assert not file.path.exists()


def test_truncated_8_bit_pages_stay_marked(tmp_path):
    g, path = geometry(), tmp_path / "a.kv"
    file, rows = PageFile(path, g, {"model": "a"}), rows_of(TOKENS)
    for page in range(4):
        file.write(page, rows[page * PAGE : (page + 1) * PAGE], page_of(pages_of(TOKENS), page), dequantized=page == 2)
    reader, pool = PageFile(path, g, {"model": "a"}), EightBitPool(HostPool(g, torch.device("cpu")))
    reader.rows()
    assert reader.full_precision_pages == 2
    assert reader.read(pool, TOKENS) == TOKENS
    pool.total = TOKENS
    assert (pool.dequantized, any(pool.quantized), pool.quantized_pages) == ({2}, False, [2])
    write_file(tmp_path / "b.kv")
    exact = PageFile(tmp_path / "b.kv", g, {"model": "a"})
    exact.rows()
    assert exact.full_precision_pages == len(exact.links)


STATES = [(9, b"older state"), (TOKENS, b"the newest one")]


def with_end(path) -> PageFile:
    file = write_file(path)
    size = file._query_bytes
    file.write(3, rows_of(TOKENS)[12:], page_of(pages_of(TOKENS), 3), query=bytes(range(size)), states=STATES)
    return file


def test_the_query_and_states_are_read_back(tmp_path):
    with_end(tmp_path / "a.kv")
    file = PageFile(tmp_path / "a.kv", geometry(), {"model": "a"})
    file.rows()
    end = file.end()
    assert end.query == bytes(range(file._query_bytes))
    assert [(state.tokens, file.state(state)) for state in end.states] == STATES
    file.write(3, rows_of(TOKENS)[12:], page_of(pages_of(TOKENS), 3))
    assert file.end() == End()


def test_changed_bytes_of_the_query_and_states_are_detected(tmp_path):
    path = tmp_path / "a.kv"
    start, data = with_end(path).links[-1].end, path.read_bytes()
    for place in range(start, len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        file = PageFile(path, geometry(), {"model": "a"})
        assert len(file.rows()) == TOKENS
        end = file.end()
        good = [(state.tokens, whole) for state in end.states if (whole := file.state(state))]
        is_in_states = len(damaged) - place <= sum(len(state) for _, state in STATES)
        assert len(good) == (1 if is_in_states else 0)
        assert set(good) < set(STATES)


def test_one_file_holds_full_precision_and_8_bit_pages(tmp_path):
    g, path = Geometry(2, 2, 2, 4, 4, torch.bfloat16, PAGE), tmp_path / "a.kv"
    noise = torch.Generator().manual_seed(1)
    exact = [torch.randn((4, 2, 2, PAGE, 4), generator=noise).bfloat16() for _ in range(2)]
    pages = Pages([False, True, True, False], [x[[0, 3]] for x in exact], [quantize(x[1:3], g) for x in exact])
    file, rows = PageFile(path, g, {"model": "a"}), rows_of(TOKENS)
    for page in range(4):
        file.write(page, rows[page * PAGE : (page + 1) * PAGE], blocks_of(pages.stored(page)))
    assert path.stat().st_size == HEADER_BYTES + 2 * (file.record_bytes(False) + file.record_bytes(True))
    reader, pool = PageFile(path, g, {"model": "a"}), EightBitPool(HostPool(g, torch.device("cpu")))
    assert len(reader.rows()) == TOKENS
    assert reader.full_precision_pages == 1
    assert reader.read(pool, TOKENS) == TOKENS
    pool.total = TOKENS
    assert pool.quantized == pages.quantized
    for page in range(4):
        assert blocks_of(pool.stored(page)) == blocks_of(pages.stored(page))
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + file.record_bytes(False) + file.record_bytes(True) - 1] ^= 1  # in the first 8-bit page's codes
    path.write_bytes(data)
    assert reader.read(EightBitPool(HostPool(g, torch.device("cpu"))), TOKENS) == PAGE
