"""Values set at run time, receipts and totals."""

from dataclasses import replace

import pytest
from support.message import lacks

from kvchat.config.modes import choosable, next_mode
from kvchat.conversations.conversation import Conversation
from kvchat.errors import UsageError
from kvchat.protocol import messages
from kvchat.protocol.client import Crashed
from kvchat.protocol.figures import Price, Snapshot, Stats
from kvchat.protocol.messages import (
    Failed,
    Finished,
    Loaded,
    Loading,
    Peeked,
    Prefilled,
    Preparing,
    Rebuilt,
    Recovered,
    Sampling,
    Started,
    Switch,
    Switched,
    SwitchRefused,
    Text,
)
from kvchat.tui import events
from kvchat.tui.prompt.arguments import change, describe, describe_sampling
from kvchat.tui.state import (
    RECEIPT,
    SETTLED_TOKENS,
    SUMS,
    ChatState,
    Phase,
    describe_modes,
    describe_price,
    describe_switch,
    summarize,
)
from kvchat.tui.widgets.bars import STATUS
from kvchat.tui.widgets.messages import SwitchNote


def state(mode: str = "full") -> ChatState:
    return ChatState(Conversation(), Sampling(), mode)


def test_receipts_show_both_modes_and_the_counts():
    s = state("streaming")
    s.first_mode = "full"
    stats = Stats(generated_tokens=1200, total_tokens=14203, read_share=0.04, ttft_s=0.41, decode_tokens_per_s=58.2)
    line = s.receipt(Finished("length", "text", stats))
    assert line == (
        "1,200 tok · 58.2 tok/s · first token 0.41 s · full → streaming · read 4 % of 14,203 · token limit, /continue"
    )
    switched = replace(stats, switches=({"at": 57, "before": "full", "mode": "streaming"},))
    assert "full → streaming · read" in s.receipt(Finished("length", "text", switched))
    odd = replace(stats, switches=({"at": "x"},))
    assert s.receipt(Finished("length", "text", odd)) == line


def test_an_unknown_mode_has_no_parameters():
    assert state("no such").parameters == {}
    assert "temperature" in describe(state("no such"))


def test_modes_are_listed_with_prices():
    s = state("full")
    prices = (Price("sync", 2**20, seconds=0.004), Price("freeze", refusal="too small"))
    s.snapshot = Snapshot("full", {}, 0, 0, 0, 0, 0, prices=prices)
    lines = describe_modes(s).split("\n")
    assert len(lines) == len(choosable()) + 1, "plus a group title"
    assert [line.split()[1] for line in lines if line.startswith("●")] == ["full"]
    s.auto = "auto: full, 12 ms a token"
    assert [line.split()[1] for line in describe_modes(s).split("\n") if line.startswith("●")] == ["auto", "full"]
    assert sum(line.endswith("(1.0 MiB · 4 ms)") for line in lines) == 1
    assert sum(line.endswith("(refused)") for line in lines) == 1
    assert describe_price(Price("sync", 2**20)) == "1.0 MiB"


def test_totals_weight_answers_by_length():
    short = Stats(generated_tokens=10, decode_tokens_per_s=100.0, read_share=1.0, recall_hit_rate=1.0)
    long = Stats(generated_tokens=990, decode_tokens_per_s=10.0, read_share=0.1)
    rows = {line[:14].strip(): line[14:].strip() for line in summarize([short, long]).split("\n")}
    assert rows["speed"] == "10.1 tok/s"
    assert rows["read"] == "11 %"
    assert rows["hit rate"] == "100 %"
    assert "corrected" not in rows
    corrected = [Stats(generated_tokens=10, corrected_share=1.0), Stats(generated_tokens=30, corrected_share=0.2)]
    assert summarize(corrected).split("\n")[-1].split() == ["corrected", "40", "%"]


def test_receipts_show_the_share_of_corrected_heads():
    stats = Stats(corrected_share=0.97, mean_cosine=0.586)
    assert state().receipt(Finished("eos", "text", stats)).endswith("· corrected 97 %, mean C 0.59")


def test_receipts_show_the_lowest_attention_coverage():
    stats = Stats(coverage=0.966, lowest_coverage=0.934)
    assert state().receipt(Finished("eos", "text", stats)).endswith("· covered 93 %")
    answers = [replace(stats, generated_tokens=30), Stats(generated_tokens=10, coverage=0.866, lowest_coverage=0.8)]
    rows = {line[:14].strip(): line[14:].strip() for line in summarize([*answers, Stats()]).split("\n")}
    assert rows["covered"] == "94 %"


def test_receipts_show_fetch_and_wait_times():
    stats = Stats(recall_ms_p50=1.24, recall_ms_p95=3.0, exposed_ms_p50=1.24, exposed_ms_p95=3.0)
    assert state().receipt(Finished("eos", "text", stats)).endswith("fetched in 1.2 / 3.0 ms")
    hidden = replace(stats, exposed_ms_p50=0.0, exposed_ms_p95=0.4, recall_bytes_per_s=12.3e9)
    line = state().receipt(Finished("eos", "text", hidden))
    assert line.endswith("fetched in 1.2 / 3.0 ms at 12.3 GB/s · waited 0.0 / 0.4 ms")
    assert "fetched" not in state().receipt(Finished("eos", "text", Stats()))


def test_every_receipt_term_is_explained():
    stats = Stats(
        generated_tokens=3, decode_tokens_per_s=5.0, ttft_s=0.2, read_share=0.5, total_tokens=9, corrected_share=0.1,
        lowest_coverage=0.93,
        mean_cosine=0.5, recall_ms_p50=1.0, recall_ms_p95=2.0, exposed_ms_p50=0.0, exposed_ms_p95=1.0, recoveries=7,
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


def test_every_row_of_the_totals_is_explained():
    known = Stats(decode_tokens_per_s=1, ttft_s=1, read_share=1, coverage=1, recall_hit_rate=1, corrected_share=1)
    summary = summarize([replace(known, generated_tokens=1)])
    assert [line[:14].strip() for line in summary.split("\n")] == list(SUMS)


def test_totals_add_up_all_answers():
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
def test_sampling_values_are_parsed(key, text, value):
    assert getattr(change(Sampling(seed=1), key, text), key) == value


@pytest.mark.parametrize(
    ("key", "text"), [("temperature", "-1"), ("temperature", "nan"), ("top_p", "2"), ("top_k", "1.5"), ("seed", "x")]
)
def test_invalid_values_are_rejected(key, text):
    with pytest.raises(UsageError, match=rf"{key}.*'{text}'.*number"):
        change(Sampling(), key, text)


def test_only_changed_sampling_values_are_described():
    assert describe_sampling(Sampling()) == "defaults"
    assert describe_sampling(Sampling(top_k=40, seed=3)) == "top_k 40 · seed 3"


# ---- The line that a mode switch writes


def note(speed: float | None = 41.0, **changes: object) -> SwitchNote:
    return SwitchNote(Switched("full", "speculative", {}, 14203, 0, 0.0, **changes), speed)


def test_the_new_speed_appears_after_64_tokens():
    line = note()
    assert str(line.content) == "full → speculative · at 14,203 tok · 41 tok/s"
    line.count(1, now=10.0)
    line.count(SETTLED_TOKENS - 1, now=11.0)
    assert not line.settled
    line.count(1, now=12.0)
    assert str(line.content) == "full → speculative · at 14,203 tok · 41 → 32 tok/s"


def test_an_ending_answer_fills_in_the_new_speed():
    line = note()
    line.close(now=5.0)
    assert not line.settled
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert "41 → 58 tok/s" in str(line.content)


def test_a_speed_known_only_afterwards_is_marked():
    line = note(None)
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert str(line.content).endswith(" · then 58 tok/s")


@pytest.mark.parametrize("tokens", [0, SETTLED_TOKENS])
def test_too_few_tokens_or_too_little_time_show_no_speed(tokens):
    line = note()
    line.count(1, now=10.0)
    line.count(tokens, now=10.00001)
    line.close(now=10.00002)
    line.count(SETTLED_TOKENS, now=20.0)
    assert str(line.content) == str(note().content)


def test_a_switch_line_shows_only_known_figures():
    assert str(note(None).content) == "full → speculative · at 14,203 tok"
    assert "120 tok with reduced context" in str(note(reduced_tokens=120).content)


def test_a_switch_line_shows_only_user_set_parameters():
    params = {"recovery": False, "budget": None, "draft": "lookup", "cpu": 0.5}
    given = {"full": {"draft": "lookup", "recovery": False}, "sync": {"cpu": 0}}
    line = describe_switch(Switched("full", "full", params, 13, 0, 0.0, given=given), None, None)
    assert line == "full · recovery false · draft lookup · at 13 tok"


# ---- What the engine reports, without a screen


async def test_loading_shows_stages_then_notes(chat):
    await chat.controller.handle(Loading("reading the weights"))
    assert chat.controller.state.stage == "reading the weights"
    await chat.load(mode="streaming", params={"budget": 512}, notes=("no GPU",))
    state = chat.controller.state
    assert (state.mode, state.params, state.phase, state.stage) == ("streaming", {"budget": 512}, Phase.READY, "")
    assert chat.view.notes == ["no GPU"]


async def test_a_snapshot_updates_the_effective_parameters(chat):
    await chat.load(mode="streaming", params={"budget": None})
    old = Snapshot("full", {}, 0, 0, 0, 0, 0)
    new = Snapshot("streaming", {"budget": 512}, 0, 0, 0, 0, 0)
    for snapshot in (old, new):
        await chat.controller.handle(snapshot)
    assert chat.view.snapshots == [old, new]
    assert chat.controller.state.params == {"budget": 512}


async def test_a_switch_confirms_the_requested_parameters(chat):
    await chat.load()
    chat.controller.state.is_stored = True
    await chat.controller.handle(Snapshot("full", {}, 0, 0, 0, 0, 0, tokens_per_s=41.0))
    chat.controller.switch("streaming", {"budget": 128, "sigma": 8})
    assert chat.controller.state.pending == {"streaming": {"budget": 128, "sigma": 8}}
    given = {"streaming": {"budget": 128, "sigma": 8}}
    await chat.controller.handle(Switched("full", "streaming", {"budget": 128, "sigma": 8}, 10, 0, 0.0, given=given))
    state = chat.controller.state
    assert (state.mode, state.wanted, state.given, state.pending) == ("streaming", "streaming", given, {})
    assert chat.view.switches[0].speed == 41.0


async def test_auto_choices_are_shown_and_noted_once(chat):
    await chat.load(auto="auto: full, 12 ms a token")
    state, slow = chat.controller.state, "auto: speculative 512, because full would take 200 ms a token"
    assert (state.mode, state.asked) == ("full", "auto")
    await chat.controller.handle(Switched("full", "speculative", {"budget": 512}, 10, 0, 0.0, auto=slow))
    assert (state.mode, state.asked, state.conversation.mode) == ("speculative", "auto", "auto")
    await chat.controller.handle(Switched("speculative", "speculative", {"budget": 512}, 10, 0, 0.0, auto=slow))
    assert chat.view.notes.count(slow) == 1
    later = Snapshot("speculative", {"budget": 512}, 0, 0, 0, 0, 0, auto="auto: speculative 512, 90 ms a token")
    await chat.controller.handle(later)
    assert state.auto == later.auto


async def test_f6_leaves_auto_from_its_current_mode(chat):
    await chat.load(mode="speculative", params={}, auto="auto: speculative 512, 90 ms a token")
    chat.controller.switch_by(1)
    assert chat.client.sent[-1].mode == next_mode("speculative")
    await chat.controller.handle(Switched("speculative", "full", {}, 10, 0, 0.0))
    assert (chat.controller.state.asked, chat.controller.state.conversation.mode) == ("full", "full")
    chat.controller.switch("auto", {"tokens_per_s": 20})
    assert chat.client.sent[-1] == Switch("auto", {"tokens_per_s": 20})


async def test_the_target_speed_is_sent_only_in_auto(chat):
    await chat.load()
    chat.controller.set_for_mode("auto", "tokens_per_s", 5)
    assert not chat.client.sent
    chat.controller.switch("auto")
    assert chat.client.sent == [Switch("auto", {"tokens_per_s": 5})]
    await chat.controller.handle(Switched("full", "full", {}, 10, 0, 0.0, auto="auto: full, 12 ms a token"))
    chat.controller.set_for_mode("auto", "tokens_per_s", 7)
    assert chat.client.sent[-1] == Switch("auto", {"tokens_per_s": 7})


async def test_the_bar_names_the_mode_that_is_being_entered(chat):
    await chat.load()
    chat.controller.switch("sync")
    assert chat.controller.state.coming_mode == "sync"
    await chat.controller.handle(Switched("full", "sync", {}, 10, 0, 0.0))
    chat.controller.switch("", {"budget": 640})
    assert chat.controller.state.coming_mode == ""
    chat.controller.switch("freeze")
    await chat.controller.handle(SwitchRefused("sync", "too small"))
    assert chat.controller.state.coming_mode == ""


async def test_a_refused_switch_keeps_the_mode_and_is_skipped(chat):
    await chat.load()
    chat.controller.switch_by(1)
    await chat.controller.handle(SwitchRefused("full", "too small"))
    assert chat.controller.state.mode == "full"
    assert chat.controller.state.pending == {}
    assert chat.view.errors[0].detail == "too small"
    chat.controller.switch_by(1)
    first, second = chat.client.sent
    assert first.mode != second.mode


async def test_engine_reports_become_notes_and_events(chat):
    await chat.load()
    await chat.controller.handle(Recovered("RR", "entropy", 3.42, 1200))
    await chat.controller.handle(Rebuilt(1200, 0.25, 34))
    assert not lacks(chat.view.events[-1], "RR", "1,200 tok", "entropy 3.4")
    (rebuilt,) = chat.view.notes
    assert not lacks(rebuilt, "1,200 tokens", "250 ms", "34")
    await chat.controller.handle(Rebuilt(0, 0.01, 0))
    assert "0 tokens" not in chat.view.notes[-1]
    await chat.controller.handle(Preparing("sync"))
    assert "sync mode" in chat.view.events[-1]
    await chat.controller.handle(Peeked(32, 64, "text"))
    assert chat.view.page_texts == [(32, "text")]


async def test_a_refused_question_returns_to_the_prompt(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Failed("The prompt is too long.", "9 tokens", "Shorten it."))
    assert chat.view.errors[0].hint == "Shorten it."
    assert (chat.view.prompt, chat.turns, chat.phase) == ("one", [], Phase.READY)


async def test_an_unrelated_failure_does_not_end_the_answer(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Failed("The disk is full.", aside=True))
    await chat.controller.handle(messages.Finished("eos", "hi", Stats()))
    assert ([error.title for error in chat.view.errors], chat.turns) == (["The disk is full."], ["one", "hi"])


@pytest.mark.parametrize("fatal", [True, False])
async def test_without_a_model_the_engine_is_down(chat, fatal):
    if fatal:
        await chat.load()
    await chat.controller.handle(Failed("The model cannot be read.", fatal=fatal))
    assert chat.phase is Phase.DOWN


@pytest.mark.parametrize(("reason", "logged"), [("eos", "answered: 63 tok"), ("stopped", "answered: 63 tok, stopped")])
async def test_the_event_log_shows_an_answers_length_and_ending(chat, reason, logged):
    await chat.load()
    await chat.ask("hello")
    stats = Stats(generated_tokens=63, decode_tokens_per_s=58.2, ttft_s=0.2, read_share=0.5, total_tokens=90)
    await chat.controller.handle(messages.Finished(reason, "hi", stats))
    assert chat.view.events[-1] == logged


async def test_the_engine_restarts_once_until_an_answer_finishes(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Text("half", 1))
    await chat.controller.handle(Crashed(3, ("last words",)))
    error = chat.view.errors[0]
    assert "exit code 3" in error.title
    assert error.detail == "last words"
    await chat.engine_ended()
    assert (chat.client.starts, chat.phase, chat.turns) == (1, Phase.LOADING, ["one", "half"])
    await chat.controller.handle(Crashed(3, ()))
    assert (chat.client.starts, chat.phase) == (1, Phase.DOWN)
    await chat.ask("two")
    await chat.load()
    await chat.controller.handle(messages.Finished("eos", "ok", Stats()))
    await chat.controller.handle(Crashed(-9, ()))
    await chat.engine_ended()
    assert chat.client.starts == 3
    assert "SIGKILL" in chat.view.errors[-1].title


@pytest.mark.parametrize(("code", "words"), [(3, "exit code 3"), (-9, "killed by SIGKILL")])
def test_exit_codes_are_described(code, words):
    assert Crashed(code, ()).how == words


async def test_prefill_shows_its_speed_and_remaining_time(chat, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(events, "monotonic", lambda: now[0])
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Started(4096, 96))
    now[0] += 2.0
    await chat.controller.handle(Prefilled(1000, 4000))
    assert "1,000 of 4,000" in chat.view.answers[0].waiting
    assert "500 tok/s" in chat.view.answers[0].waiting
    assert "6.0 s" in chat.view.answers[0].waiting


async def test_a_filling_context_warns_once_per_level(chat):
    await chat.load(context=1000)
    await chat.ask("one")
    seen = []
    for total in (500, 799, 800, 850, 949, 950, 999, 300, 800):
        await chat.controller.handle(Text("a", 1))
        before = len(chat.view.toasts)
        await chat.controller.handle(Snapshot("full", {}, 1.0, total, 1000, 0, 0))
        seen += [total] * (len(chat.view.toasts) - before)
    assert seen == [800, 950, 800]
    assert "800 of 1,000 tokens" in chat.view.toasts[-1]


@pytest.mark.parametrize(("refusal", "command"), [("", "/mode streaming"), ("no", "/new")])
async def test_the_context_warning_suggests_a_working_command(chat, refusal, command):
    await chat.load(context=1000)
    await chat.ask("one")
    await chat.controller.handle(Text("a", 1))
    await chat.controller.handle(
        Snapshot("full", {}, 1.0, 900, 1000, 0, 0, prices=(Price("streaming", refusal=refusal),))
    )
    assert [one for one in ("/mode streaming", "/new") if one in chat.view.toasts[-1]] == [command]


async def test_only_modes_with_a_context_limit_warn(chat):
    await chat.load(context=1000, mode="streaming")
    await chat.ask("one")
    await chat.controller.handle(Text("a", 1))
    await chat.controller.handle(Snapshot("streaming", {}, 1.0, 900, 1000, 0, 0))
    assert not chat.view.toasts
    await chat.controller.handle(Switched("streaming", "full", {}, 900, 0, 0.0))
    await chat.controller.handle(Snapshot("full", {}, 1.0, 900, 1000, 0, 0))
    assert "900 of 1,000 tokens" in chat.view.toasts[-1]


async def test_delayed_server_counts_warn_of_the_context_once(chat):
    await chat.load(context=100, server="Ollama", mode="server")
    for tokens in (90, 93):
        await chat.ask("hello")
        for event in (Started(0, 0), Text("Hi", 1), server_snapshot(0), server_snapshot(tokens)):
            await chat.controller.handle(event)
        await chat.controller.handle(Finished("eos", "Hi", Stats(prompt_tokens=tokens)))
    assert len([toast for toast in chat.view.toasts if "context" in toast]) == 1


def server_snapshot(tokens: int) -> Snapshot:
    return Snapshot("server", {}, tokens, tokens, 100, 0, 0)
