"""Conversations of a tiny model, parked in memory and saved on disk; its tokens are characters."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.grids import sampled
from support.integrity import check_integrity
from support.kept_chat import OTHER, TALE, Chat, flip_byte, notes, resumed_from
from support.memory_faults import MemoryRunsOut, out_of_memory
from support.tiny_runner import PARAMS, EmptyTokenizer, load_tiny, mode_of, prefill_logits, token_ids

from kvchat.engine import prefix_cache
from kvchat.engine.prefix_cache import SavedFolder, WriteBehind, rows_of
from kvchat.engine.prompt import Stored
from kvchat.engine.runner import ModelRunner
from kvchat.kv.memory.page_file import HEADER_BYTES, DamagedFileError
from kvchat.models.recurrent import TAIL
from kvchat.protocol.messages import Turn


def test_reopened_conversation_is_restored_exactly_from_memory(tmp_path):
    chat = Chat(tmp_path, saved=0)
    assert chat.say("a", TALE) == []
    one = chat.runner.kv.state.host.dense(0, chat.runner.kv.total)
    before = [tensor.clone() for tensor in one]
    total = len(chat.stored.ids)
    assert chat.say("b", OTHER) == []
    assert chat.cache.parked_bytes > 0
    assert resumed_from(chat.cache.resume("a", (Turn("user", TALE),))) == (total, "memory")
    assert chat.stored.ids == [ord(c) for c in f"<{TALE}"]
    after = chat.runner.kv.state.host.dense(0, chat.runner.kv.total)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    check_integrity(chat.runner.kv.state)


def test_least_recently_used_conversation_is_dropped(tmp_path):
    """Even with room for one, the next conversation is restored."""
    for room, names, parked in ((2.5, "1234", ["2", "3"]), (1.5, "1212", ["1"])):
        chat = Chat(tmp_path, saved=0)
        most = int(room * chat.runner.kv.state.geometry.token_bytes * 320)
        chat.cache._keeping = replace(chat.keeping, parked_bytes=most)
        for name in names:
            events = chat.say(name, name + TALE)
        assert chat.cache.parked_bytes <= most
        assert list(chat.cache._parked) == parked
    assert resumed_from(events)[1] == "memory"


@pytest.mark.parametrize("lacks", ["room", "memory", "memory after all"])
def test_conversation_that_cannot_be_parked_is_reported_once(tmp_path, monkeypatch, lacks):
    chat = Chat(tmp_path, saved=0, parked=1000 if lacks == "room" else 2**30)
    if lacks == "memory":
        none = SimpleNamespace(host_free=lambda: 0, usable=lambda free: free)
        monkeypatch.setattr(prefix_cache, "available", none)
    if lacks == "memory after all":
        monkeypatch.setattr(prefix_cache, "parked", out_of_memory)
    assert notes(chat.say("a", TALE)) == []
    (note,) = notes(chat.say("b", OTHER))
    assert "processed again" in note
    assert notes(chat.say("a", TALE)) == []
    assert chat.cache.parked_bytes == 0


def test_disabled_parking_and_saved_conversations_are_not_reported(tmp_path):
    for kept in ({"parked": 0, "saved": 0}, {"parked": 1000}):
        chat = Chat(tmp_path, **kept)
        assert notes([*chat.say("a", TALE), *chat.say("b", OTHER)]) == []


def test_saved_conversations_prepare_no_new_rows(tmp_path, monkeypatch):
    chat = Chat(tmp_path)
    for name, text in (("a", TALE), ("b", OTHER), ("c", "3" + TALE)):
        chat.say(name, text)
        chat.written()
    made = []
    monkeypatch.setattr(prefix_cache, "rows_of", lambda *given: made.append(given) or rows_of(*given))
    chat.cache.save()
    assert made == []
    chat.say("c", "3" + TALE + OTHER)
    assert len(made) == 1


def test_shared_prefix_comes_from_another_conversation(tmp_path):
    chat = Chat(tmp_path)
    chat.say("a", TALE + OTHER)
    chat.say("b", OTHER)
    tokens, where = resumed_from(chat.say("c", TALE + "and then"))
    assert (tokens, where) == (1 + len(TALE), "memory")
    again = chat.restarted(tmp_path)
    tokens, where = resumed_from(again.say("d", TALE + "but"))
    assert (tokens, where) == (1 + len(TALE), "disk")
    again.written()
    one = Chat(tmp_path, chat.runner.model).say("d", TALE + "but")
    assert resumed_from(one) == (1 + len(TALE) + 3, "disk")


def test_saved_pages_are_not_rewritten(tmp_path):
    chat = Chat(tmp_path)
    chat.say("a", TALE)
    chat.written()
    path = tmp_path / "kv" / "a.kv"
    before = path.read_bytes()
    record = chat.cache._file(path).record_bytes(False)
    chat = chat.restarted(tmp_path)
    chat.say("a", TALE + OTHER)
    (job,) = chat.cache._writer._jobs
    assert job.first == (1 + len(TALE)) // 32
    chat.written()
    assert path.read_bytes()[: 4096 + job.first * record] == before[: 4096 + job.first * record]
    assert len(chat.cache._file(path).rows()) == 1 + len(TALE + OTHER)


def test_reduced_tokens_stay_marked_after_a_restart(tmp_path):
    chat = Chat(tmp_path)
    chat.say("a", TALE)
    chat.cache.interrupt()
    chat.runner.step(65)
    chat.stored.extend([65], reduced=True)
    chat.cache.save()
    chat = chat.restarted(tmp_path)
    chat.say("a", TALE + "A!")
    assert chat.stored.first_reduced == 1 + len(TALE)
    assert chat.stored.reduced_tokens == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"revision": "1"}, "another revision"),
        ({"weights": "int8"}, "another quantization"),
        ({"fingerprint": "1"}, "another training"),
        ({"tokenizer": EmptyTokenizer(vocabulary={"a": 1})}, "another tokenizer"),
        ({"tokenizer": EmptyTokenizer("x")}, "another chat"),
        ({"name": "other"}, ""),  # the application reports a changed model
    ],
)
def test_kv_of_another_model_is_refused_and_replaced(tmp_path, changes, reason):
    chat = Chat(tmp_path)
    chat.say("a", TALE)
    chat = chat.restarted(tmp_path, model=replace(chat.runner.model, **changes))
    found = notes(chat.say("a", TALE))
    assert [reason in note for note in found] == [True] * bool(reason)
    assert resumed_from(chat.restarted(tmp_path).say("a", TALE))


def test_directory_in_place_of_a_file_is_skipped(tmp_path):
    chat = Chat(tmp_path)
    chat.say("a", TALE)
    chat.written()
    (tmp_path / "kv" / "b.kv").mkdir()
    chat = chat.restarted(tmp_path)
    assert not notes(chat.say("c", TALE)), "that of another conversation is skipped"
    (note,) = notes(chat.restarted(tmp_path).say("b", TALE))
    assert "directory" in note


@pytest.mark.parametrize(("records", "at", "left"), [(0, 4, 0), (3, -1, 64)])
def test_damaged_page_is_reported_and_earlier_pages_are_kept(tmp_path, records, at, left):
    chat = Chat(tmp_path)
    chat.say("a", TALE)
    chat.cache.interrupt()
    with torch.inference_mode():
        chat.runner.kv.state.control[200:210] = True
    chat.stored.saved = 0
    chat.cache.save()
    chat.written()
    path = tmp_path / "kv" / "a.kv"
    flip_byte(path, HEADER_BYTES + records * chat.cache._file(path).record_bytes(False) + at)
    chat = chat.restarted(tmp_path)
    events = list(chat.cache.resume("a", (Turn("user", TALE),)))
    assert ["damaged" in note for note in notes(events)] == [True]
    assert not left or resumed_from(events) == (left, "disk")
    assert chat.runner.kv.total == left
    assert not chat.runner.kv.state.control.any()


def test_resume_closed_at_a_note_saves_nothing_under_that_name(tmp_path):
    chat = Chat(tmp_path)
    chat.say("b", OTHER)
    chat.written()
    flip_byte(tmp_path / "kv" / "b.kv", 0)
    chat = chat.restarted(tmp_path, parked=0)
    chat.say("a", TALE)
    chat.written()
    with chat.cache.changing():
        opening = chat.cache.resume("b", (Turn("user", OTHER),))
        assert "damaged" in next(opening).text
        opening.close()
    chat.written()
    assert chat.cache._file(tmp_path / "kv" / "a.kv").rows()["id"].tolist() == [ord(c) for c in f"<{TALE}"]
    with pytest.raises(DamagedFileError):
        chat.cache._file(tmp_path / "kv" / "b.kv").rows()


def test_failed_save_is_retried_next_time(tmp_path):
    chat = Chat(tmp_path)
    chat.say("a", TALE)
    chat.cache.interrupt()
    chat.stored.saved = 0
    with MemoryRunsOut(1):
        chat.cache.save()
    chat.cache.save()
    chat.written()
    assert len(chat.cache._file(tmp_path / "kv" / "a.kv").rows()) == 1 + len(TALE)


def test_full_disk_is_reported_once(tmp_path, monkeypatch):
    chat = Chat(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvchat.kv.memory.page_file._write", full)
    for text, reported in ((TALE, 0), (TALE + "a", 1), (TALE + "ab", 0)):
        with chat.cache.changing():
            assert len(list(chat.cache.open("a", ()))) == reported
        chat.say("a", text)
        chat.written()
    assert (tmp_path / "kv" / "a.kv").stat().st_size == 0


def test_deleted_conversation_is_not_parked(tmp_path):
    chat = Chat(tmp_path, saved=0)
    chat.say("a", TALE)
    chat.say("b", OTHER)
    chat.cache.forget("a")
    chat.cache.forget("b")
    chat.say("c", "x")
    assert chat.cache.parked_bytes == 0


def test_file_written_during_deletion_is_deleted(tmp_path):
    chat = Chat(tmp_path)
    chat.say("b", OTHER)
    chat.say("a", TALE)
    chat.cache.forget("a")  # the application had moved its file away before there was one
    chat.written()
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["b.kv"]
    chat.cache.save()
    chat.say("c", "x")
    chat.written()
    assert not (tmp_path / "kv" / "a.kv").exists()


def test_undeletable_file_is_not_an_error(tmp_path, monkeypatch):
    chat = Chat(tmp_path)
    chat.say("a", TALE)
    chat.written()

    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    chat.cache.forget("a")
    assert chat.cache.parked_bytes == 0


def test_opening_a_conversation_does_not_save_the_previous_one_as_it(tmp_path):
    chat = Chat(tmp_path)
    chat.say("a", TALE)
    chat.written()
    with chat.cache.changing():
        list(chat.cache.open("b", (Turn("user", OTHER),)))
    chat.written()
    assert not (tmp_path / "kv" / "b.kv").exists() or len(chat.cache._file(tmp_path / "kv" / "b.kv").rows()) <= 1
    assert chat.runner.kv.total == len(chat.stored.ids) <= 1


def test_switching_conversations_does_not_interrupt_writing(tmp_path, monkeypatch):
    chat = Chat(tmp_path)
    monkeypatch.setattr(WriteBehind, "begin", lambda writer, jobs: None)  # interrupted before the first page
    chat.say("a", TALE)
    monkeypatch.undo()
    with chat.cache.changing():
        list(chat.cache.resume("b", (Turn("user", OTHER),)))
    chat.written()
    assert len(chat.cache._file(tmp_path / "kv" / "a.kv").rows()) == 1 + len(TALE)


def test_two_processes_do_not_mix_a_conversations_branches(tmp_path):
    one, beginning = Chat(tmp_path), TALE[:95]  # three pages, with what the encoder puts before it
    other = Chat(tmp_path, one.runner.model)
    one.say("a", beginning)
    one.written()
    other.say("a", beginning[:40] + OTHER[:55])
    other.written()
    for restored in (40 + 1, 1 + len(TALE)):  # the other's branch is kept as it is, then replaced entirely
        one.say("a", TALE)
        one.written()
        again = Chat(tmp_path, one.runner.model)
        assert resumed_from(again.cache.resume("a", (Turn("user", TALE),))) == (restored, "disk")
        assert again.stored.ids == [ord(c) for c in f"<{TALE}"][:restored]


def next_logits(runner: ModelRunner, more: list[int]) -> list[torch.Tensor]:
    return [prefill_logits(runner, more), *(runner.step(token) for token in token_ids(6, seed=3))]


@pytest.mark.parametrize(("row", "dtype"), sampled(PARAMS, [torch.float32, torch.bfloat16, torch.float16]), ids=str)
def test_resumed_logits_match_a_session_never_closed(tmp_path, row, dtype):
    """In most modes, a session that re-entered its mode, as a switch does: what was dropped or frozen, and the slot of
    each token (the order of a sum), is not saved.
    """
    names = ["llama", "gemma3", "deepseek_v3", "phi", "qwen3", "olmo2"]
    name = names[list(PARAMS).index(row) % len(names)]
    chat = Chat(tmp_path, load_tiny(name, dtype=dtype), row)
    tokens = int(torch.randint(70, 300, (1,), generator=torch.Generator().manual_seed(len(row))))
    ids = token_ids(tokens)
    prefill_logits(chat.runner, ids[:-9])
    chat.stored.extend(ids[:-9])
    for token in ids[-9:]:
        chat.runner.step(token)
        chat.stored.extend([token])
    chat.cache.current = "a"
    chat.stored.mark_text("".join(map(chr, ids)))
    chat.cache.save()
    chat.written()

    later = Chat(tmp_path, chat.runner.model, row)
    later.loop.encoder.render = lambda turns: "".join(map(chr, ids))
    assert resumed_from(later.cache.resume("a", (Turn("user", "all"),))) == (tokens, "disk")
    assert later.stored.ids == ids
    if PARAMS[row][0] not in ("full", "sync"):
        with torch.inference_mode():
            chat.runner.kv.switch(mode_of(chat.runner.model, row))
    more = token_ids(5, seed=2)
    for mine, its in zip(next_logits(later.runner, more), next_logits(chat.runner, more), strict=True):
        assert torch.equal(mine, its)


def test_least_recently_used_files_are_deleted_first(tmp_path):
    folder = SavedFolder(tmp_path, limit=100)
    for age, name in enumerate(("new", "old", "oldest")):
        path = folder.path(name)
        path.write_bytes(b"x" * 30)
        os.utime(path, (1000 - age, 1000 - age))
    os.utime(folder.path("oldest"))
    assert folder.make_room(folder.path("mine"), 40) == 40
    assert [path.stem for path in folder.latest_first()] == ["oldest", "new"]


def test_file_over_the_limit_deletes_no_others(tmp_path):
    absent = SavedFolder(tmp_path / "absent", limit=100)
    assert absent.make_room(absent.path("mine"), 500) == 100
    assert absent.path("../../x").parent == tmp_path / "absent", "an imported id cannot name a path outside"
    folder = SavedFolder(tmp_path, limit=100)
    for name in ("one", "other"):
        folder.path(name).write_bytes(b"x" * 30)
    assert folder.make_room(folder.path("mine"), 101) == 40
    assert len(folder.latest_first()) == 2
    assert folder.make_room(folder.path("mine"), 100) == 100
    assert folder.latest_first() == []


# ---- The text of stored ids


def test_stored_text_matches_only_at_marks():
    stored = Stored()
    stored.extend([1, 2])
    stored.mark_text("ab")
    stored.extend([3, 4])
    stored.mark_text("abcd")
    assert stored.matched_prefix("abcde") == (4, 4)
    assert stored.matched_prefix("abc") == (2, 2)
    assert stored.matched_prefix("x") == (0, 0)
    assert [stored.matched_prefix_from("abcde", chars) for chars in (2, 3, 5)] == [(2, 2), (4, 4), None]
    assert stored.matched_prefix_from("abce", 3) is None
    stored.truncate(3)
    assert (stored.ids, stored.text, stored.marks) == ([1, 2, 3], "ab", [(2, 2)])
    stored.mark_text("aX")
    assert (stored.text, stored.marks) == ("aX", [(3, 2)])


# ---- Conversations whose full pages are in 8 bits


HYBRID = "lfm2"
TALE_TOKENS = 1 + len(TALE)  # with what the encoder puts before it


def pair(tmp_path, name: str, row: str = "full") -> tuple[Chat, Chat]:
    """A session in which ``TALE`` was answered, never closed, and one that has not resumed it yet."""
    chat, later = (Chat(tmp_path, load_tiny(name), row) for _ in range(2))
    for one in (chat, later):
        one.runner.kv.state.quantize_pages(True)
    chat.say("a", TALE)
    chat.answer()
    return chat, later


def assert_same_logits(chat: Chat, later: Chat) -> None:
    more = token_ids(40, seed=2)
    assert torch.equal(*(prefill_logits(one.runner, more) for one in (chat, later)))
    for token in token_ids(6, seed=3):
        assert torch.equal(*(one.runner.step(token) for one in (chat, later)))


def dense_kv(chat: Chat) -> list[torch.Tensor]:
    """Keys and values of each layer."""
    state = chat.runner.kv.state
    return [torch.stack(state.host.dense(layer, TALE_TOKENS)) for layer in range(state.geometry.layers)]


def resume(chat: Chat, later: Chat) -> list:
    return list(later.cache.resume("a", (Turn("user", chat.stored.text[1:]),)))


@pytest.mark.parametrize("saved", [0, 2**30])
def test_truncated_8_bit_page_is_still_known_as_quantized(tmp_path, saved):
    chat = Chat(tmp_path, saved=saved)
    state = chat.runner.kv.state
    chat.say("a", TALE[:40])
    state.quantize_pages(True)
    chat.say("a", TALE)
    state.quantize_pages(False)
    chat.say("a", TALE[:50])  # the second page is a full-precision one again, of quantized tokens
    assert (list(state.host.dequantized), any(state.host.quantized), state.first_quantized) == ([1], False, 32)
    if saved:
        chat = chat.restarted(tmp_path)
    else:
        chat.say("b", OTHER)
        assert chat.runner.kv.state.first_quantized == chat.runner.kv.total
    assert resumed_from(chat.cache.resume("a", (Turn("user", TALE[:50]),)))[0] == 51
    assert chat.runner.kv.state.first_quantized == 32


@pytest.mark.parametrize("where", ["current", "memory", "disk"])
def test_quantized_tokens_are_shared_only_in_8_bits(tmp_path, where):
    chat = Chat(tmp_path)
    chat.say("a", TALE[:40])
    chat.runner.kv.state.quantize_pages(True)
    chat.say("a", TALE)
    if where == "memory":
        chat.say("b", OTHER)
    if where == "disk":
        chat = chat.restarted(tmp_path)
    for quantizes, taken in ((True, 1 + len(TALE)), (False, 32)):
        chat.runner.kv.state.quantize_pages(quantizes)
        list(chat.cache.resume(f"after {quantizes}", (Turn("user", f"{TALE}and then"),)))
        assert chat.runner.kv.total == taken


@pytest.mark.parametrize(("name", "row"), [*(("llama", row) for row in PARAMS), (HYBRID, "full")])
def test_resumed_logits_match_a_session_that_reentered_its_mode(tmp_path, name, row):
    """Also in sync mode, whose slots hold in full precision what the host pool has quantized since."""
    chat, later = pair(tmp_path, name, row)
    assert resumed_from(resume(chat, later)) == (TALE_TOKENS + 9, "disk")
    assert all(map(torch.equal, dense_kv(chat), dense_kv(later)))
    if PARAMS[row][0] != "full":
        with torch.inference_mode():
            chat.runner.kv.switch(mode_of(chat.runner.model, row))
    assert_same_logits(chat, later)


def test_hybrid_recomputes_quantized_tokens_exactly(tmp_path):
    chat, later = pair(tmp_path, HYBRID)
    for one in (later, chat):  # the first one reads the file before either rewrites it
        one.say("a", TALE[:-1] + "?" + OTHER)
    page = chat.runner.kv.state.geometry.page
    whole = (TALE_TOKENS - TAIL) // page * page  # the next page fills up again, with other scales
    for quantized, exact in zip(dense_kv(chat), dense_kv(later), strict=True):
        assert torch.equal(quantized[:, :, :whole], exact[:, :, :whole])
        assert 0 < (quantized - exact).abs().max() < 0.01 * quantized.abs().max()
