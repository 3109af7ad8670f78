"""Values given at run time, receipts and sums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvchat.config.modes import choosable
from kvchat.conversations.conversation import Conversation
from kvchat.errors import UsageError
from kvchat.protocol.figures import Price, Snapshot, Stats
from kvchat.protocol.messages import Finished, Loaded, Sampling, Switched
from kvchat.tui.prompt.arguments import change, describe, describe_sampling
from kvchat.tui.state import RECEIPT, SETTLED_TOKENS, SUMS, ChatState, describe_modes, describe_price, summarize
from kvchat.tui.widgets.bars import STATUS
from kvchat.tui.widgets.messages import SwitchNote


def state(mode: str = "full") -> ChatState:
    return ChatState(Conversation(), Sampling(), mode)


def test_a_receipt_names_both_modes_and_counts():
    s = state("streaming")
    s.first_mode = "full"
    stats = Stats(generated_tokens=1200, total_tokens=14203, read_share=0.04, ttft_s=0.41, decode_tokens_per_s=58.2)
    line = s.receipt(Finished("length", "text", stats))
    assert (
        line == "1,200 tok · 58.2 tok/s · TTFT 0.41 s · full → streaming · read 4 % of 14,203 · token limit, /continue"
    )
    switched = replace(stats, switches=({"at": 57, "before": "full", "mode": "streaming"},))
    assert "full → streaming at 57 · read" in s.receipt(Finished("length", "text", switched))
    odd = replace(stats, switches=({"at": "x"},))
    assert s.receipt(Finished("length", "text", odd)) == line


def test_a_mode_that_only_the_engine_knows_has_no_parameters():
    assert state("no such").parameters == {}
    assert "temperature" in describe(state("no such"))


def test_modes_are_listed_with_prices():
    s = state("full")
    prices = (Price("sync", 2**20, seconds=0.004), Price("freeze", refusal="too small"))
    s.snapshot = Snapshot("full", {}, 0, 0, 0, 0, 0, prices=prices)
    lines = describe_modes(s).split("\n")
    assert len(lines) == len(choosable()) + 1, "and the title of a group"
    assert [line.split()[1] for line in lines if line.startswith("●")] == ["full"]
    s.auto = "auto: full, 12 ms a token"
    assert [line.split()[1] for line in describe_modes(s).split("\n") if line.startswith("●")] == ["auto", "full"]
    assert sum(line.endswith("(1.0 MiB · 4 ms)") for line in lines) == 1
    assert sum(line.endswith("(refused)") for line in lines) == 1
    assert describe_price(Price("sync", 2**20)) == "1.0 MiB"


def test_a_long_answer_counts_more_than_a_short_one():
    short = Stats(generated_tokens=10, decode_tokens_per_s=100.0, read_share=1.0, recall_hit_rate=1.0)
    long = Stats(generated_tokens=990, decode_tokens_per_s=10.0, read_share=0.1)
    rows = {line[:14].strip(): line[14:].strip() for line in summarize([short, long]).split("\n")}
    assert rows["speed"] == "10.1 tok/s"
    assert rows["read"] == "11 %"
    assert rows["hit rate"] == "100 %"
    assert "corrected" not in rows
    corrected = [Stats(generated_tokens=10, corrected_share=1.0), Stats(generated_tokens=30, corrected_share=0.2)]
    assert summarize(corrected).split("\n")[-1].split() == ["corrected", "40", "%"]


def test_a_receipt_tells_the_share_of_corrected_heads():
    stats = Stats(corrected_share=0.97, mean_cosine=0.586)
    assert state().receipt(Finished("eos", "text", stats)).endswith("· corrected 97 %, mean C 0.59")


def test_a_receipt_tells_the_least_of_the_attention_that_was_covered():
    stats = Stats(coverage=0.966, lowest_coverage=0.934)
    assert state().receipt(Finished("eos", "text", stats)).endswith("· covered 93 %")
    answers = [replace(stats, generated_tokens=30), Stats(generated_tokens=10, coverage=0.866, lowest_coverage=0.8)]
    rows = {line[:14].strip(): line[14:].strip() for line in summarize([*answers, Stats()]).split("\n")}
    assert rows["covered"] == "94 %"


def test_a_receipt_tells_what_recall_took_and_what_was_waited_for():
    stats = Stats(recall_ms_p50=1.24, recall_ms_p95=3.0, exposed_ms_p50=1.24, exposed_ms_p95=3.0)
    assert state().receipt(Finished("eos", "text", stats)).endswith("fetched in 1.2 / 3.0 ms")
    hidden = replace(stats, exposed_ms_p50=0.0, exposed_ms_p95=0.4, recall_bytes_per_s=12.3e9)
    line = state().receipt(Finished("eos", "text", hidden))
    assert line.endswith("fetched in 1.2 / 3.0 ms at 12.3 GB/s · waited 0.0 / 0.4 ms")
    assert "fetched" not in state().receipt(Finished("eos", "text", Stats()))


def test_every_word_of_a_receipt_is_explained():
    stats = Stats(
        generated_tokens=3, decode_tokens_per_s=5.0, ttft_s=0.2, read_share=0.5, total_tokens=9, corrected_share=0.1,
        lowest_coverage=0.93,
        mean_cosine=0.5, recall_ms_p50=1.0, recall_ms_p95=2.0, exposed_ms_p50=0.0, exposed_ms_p95=1.0,
    )  # fmt: skip
    served = state()
    served.info = Loaded("m", "", 0, "cpu", "", 0, 0, 0, 0, 0, "server", {}, server="vLLM")
    stats = replace(stats, prompt_tokens=9, reused_tokens=3)
    length, *parts = served.receipt(Finished("eos", "text", stats)).split(" · ")
    explained = {word for word in {**RECEIPT, **STATUS} if any(word in part for part in parts)}
    assert length == "3 tok"
    assert [part for part in parts if not any(word in part for word in explained)] == ["full"]
    assert set(RECEIPT) <= explained
    assert all("median" in RECEIPT[word] and "95th" in RECEIPT[word] for word in ("fetched in", "waited"))


def test_every_row_of_the_sums_is_explained():
    known = Stats(decode_tokens_per_s=1, ttft_s=1, read_share=1, coverage=1, recall_hit_rate=1, corrected_share=1)
    told = summarize([replace(known, generated_tokens=1)])
    assert [line[:14].strip() for line in told.split("\n")] == list(SUMS)


def test_answers_are_summed():
    assert "There are no answers yet" in summarize([])
    lines = summarize([Stats(generated_tokens=10, ttft_s=0.5), Stats(generated_tokens=2000)]).split("\n")
    assert {len(line) for line in lines} == {28}
    assert lines[1].split() == ["generated", "2,010", "tok"]
    assert lines[4].split() == ["first", "token", "0.50", "s"]


# ---- Sampling by name


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("temperature", "0", 0.0),
        ("top_p", "0.5", 0.5),
        ("min_p", "0.1", 0.1),
        ("repetition_penalty", "1.5", 1.5),
        ("top_k", "40", 40),
        ("seed", "7", 7),
        ("seed", "none", None),
        ("stop", "\\n\\n", ("\n\n",)),
        ("stop", "none", ()),
        ("max_new_tokens", "20", 20),
    ],
)
def test_values(key, text, value):
    assert getattr(change(Sampling(seed=1), key, text), key) == value


@pytest.mark.parametrize(
    ("key", "text"), [("temperature", "-1"), ("temperature", "nan"), ("top_p", "0"), ("top_k", "1.5"), ("seed", "x")]
)
def test_refused_values_say_what_is_allowed(key, text):
    with pytest.raises(UsageError, match=rf"{key}.*'{text}'.*number"):
        change(Sampling(), key, text)


def test_only_what_differs_is_described():
    assert describe_sampling(Sampling()) == "defaults"
    assert describe_sampling(Sampling(top_k=40, seed=3)) == "top_k 40 · seed 3"


# ---- The line a live switch writes


def note(speed: float | None = 41.0, **changes: object) -> SwitchNote:
    return SwitchNote(Switched("full", "speculative", {}, 14203, 0, 0.0, **changes), speed)


def test_the_second_figure_comes_after_64_tokens():
    line = note()
    assert str(line.content) == "full -> speculative · at 14,203 tok · 41 tok/s"
    line.count(1, now=10.0)
    line.count(SETTLED_TOKENS - 1, now=11.0)
    assert not line.settled
    line.count(1, now=12.0)
    assert str(line.content) == "full -> speculative · at 14,203 tok · 41 -> 32 tok/s"


def test_an_answer_that_ends_earlier_fills_it_in():
    line = note()
    line.close(now=5.0)
    assert not line.settled
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert "41 -> 58 tok/s" in str(line.content)


def test_a_speed_after_it_alone_is_told_from_one_before_it():
    line = note(None)
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert str(line.content).endswith(" · then 58 tok/s")


@pytest.mark.parametrize("tokens", [0, SETTLED_TOKENS])
def test_too_few_tokens_or_too_little_time_tell_no_speed_and_those_of_the_next_answer_do_not_count(tokens):
    line = note()
    line.count(1, now=10.0)
    line.count(tokens, now=10.00001)
    line.close(now=10.00002)
    line.count(SETTLED_TOKENS, now=20.0)
    assert str(line.content) == str(note().content)


def test_nothing_known_nothing_said_and_what_was_reduced_is():
    assert str(note(None).content) == "full -> speculative · at 14,203 tok"
    assert "120 tok computed with less context" in str(note(reduced_tokens=120).content)
