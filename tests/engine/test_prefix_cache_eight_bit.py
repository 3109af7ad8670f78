"""Keeping conversations whose full pages are in 8 bits."""

from __future__ import annotations

import pytest
import torch
from support.kept_chat import OTHER, TALE, Chat, came_back
from support.tiny_runner import PARAMS, loaded, mode_of, prefilled, token_ids

from kvchat.models.recurrent import TAIL
from kvchat.protocol.messages import Turn

HYBRID = "lfm2"
SAID = 1 + len(TALE)  # with what the encoder puts before it


def pair(tmp_path, name: str, row: str = "full") -> tuple[Chat, Chat]:
    """A session in which ``TALE`` was answered, never closed, and one that is yet to open that conversation."""
    chat, later = (Chat(tmp_path, loaded(name), row) for _ in range(2))
    for one in (chat, later):
        one.runner.kv.state.quantize_pages(True)
    chat.say("a", TALE)
    chat.answer()
    return chat, later


def assert_alike(chat: Chat, later: Chat) -> None:
    more = token_ids(40, seed=2)
    assert torch.equal(*(prefilled(one.runner, more) for one in (chat, later)))
    for token in token_ids(6, seed=3):
        assert torch.equal(*(one.runner.step(token) for one in (chat, later)))


def stored(chat: Chat, layer: int) -> torch.Tensor:
    return torch.stack(chat.runner.kv.state.host.dense(layer, SAID))


def opened(chat: Chat, later: Chat) -> list:
    return list(later.cache.resume("a", (Turn("user", chat.stored.text[1:]),)))


@pytest.mark.parametrize("saved", [0, 2**30])
def test_what_was_cut_off_inside_an_8_bit_page_is_still_known_to_be_rounded(tmp_path, saved):
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
    assert came_back(chat.cache.resume("a", (Turn("user", TALE[:50]),)))[0] == 51
    assert chat.runner.kv.state.first_quantized == 32


@pytest.mark.parametrize("where", ["current", "memory", "disk"])
def test_another_conversation_takes_rounded_tokens_only_while_they_are_wanted(tmp_path, where):
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


@pytest.mark.parametrize("row", PARAMS)
def test_logits_are_those_of_a_session_that_entered_its_mode_anew(tmp_path, row):
    """Also in sync mode, whose slots hold exactly what the host pool has quantized since."""
    chat, later = pair(tmp_path, "llama", row)
    assert came_back(opened(chat, later)) == (SAID + 9, "disk")
    for layer in range(chat.runner.kv.state.geometry.layers):
        assert torch.equal(stored(chat, layer), stored(later, layer))
    if PARAMS[row][0] != "full":
        with torch.inference_mode():
            chat.runner.kv.switch(mode_of(chat.runner.model, row))
    assert_alike(chat, later)


def test_a_hybrid_goes_on_as_in_a_session_never_closed(tmp_path):
    chat, later = pair(tmp_path, HYBRID)
    assert came_back(opened(chat, later)) == (SAID + 9, "disk")
    assert_alike(chat, later)


def test_what_a_hybrid_reads_again_is_exact_where_a_session_never_closed_has_it_rounded(tmp_path):
    chat, later = pair(tmp_path, HYBRID)
    for one in (later, chat):  # the first one reads the file before either writes it again
        one.say("a", TALE[:-1] + "?" + OTHER)
    page = chat.runner.kv.state.geometry.page
    whole = (SAID - TAIL) // page * page  # the next one gets full again, with other scales
    for layer in range(chat.runner.kv.state.geometry.layers):
        quantized, exact = stored(chat, layer), stored(later, layer)
        assert torch.equal(quantized[:, :, :whole], exact[:, :, :whole])
        assert 0 < (quantized - exact).abs().max() < 0.01 * quantized.abs().max()
