"""The combination of weights and mode that is proposed for the memory that is free."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.message import lacks
from support.progress import silent
from support.weights import save_headers
from transformers import LlamaConfig

import kvchat
from kvchat import libraries
from kvchat.engine import plan
from kvchat.engine.plan import memory_plan, propose
from kvchat.kv.memory import available
from kvchat.models.description import describe
from kvchat.models.quantize import quantization
from kvchat.protocol.figures import ModeNeed
from kvchat.protocol.messages import Load
from kvchat.tui.models import plan_lines

GIB = 2**30
TOKENS = 300
BILLIONS = {  # shapes of Llama models of so many parameters
    1: {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    8: {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
EIGHT_BITS, FOUR_BITS = (f"precision of the weights: {bits} bits instead of float32" for bits in (8, 4))
READS = "reading more than {} tokens per head and token"
CHOOSES = "reading everything for every token: speculative chooses what to read"


def planned(model):
    return memory_plan(Load(str(model), "cpu", "float32"), TOKENS, silent)


def proposed(made, free):
    chosen = propose(replace(made, host_free=free, device_free=free))
    return chosen and (chosen.quantize, chosen.mode)


@pytest.fixture
def small():
    """A plan whose parts on the device are known to the byte."""
    return replace(
        planned("bundled"),
        weights={"none": 1600, "int8": 800, "nf4": 500},
        modes={
            "full": ModeNeed(1000, {}),
            "speculative": ModeNeed(300, {"budget": 1024}),
            "streaming": ModeNeed(100, {}),
        },
        workspace=50,
        host_pool=1000,
        host_free=9999,
        device="cuda:0",
    )


HALF = ModeNeed(200, {"budget": 512})


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (9999, ("none", "full", None)),
        (2200, ("int8", "full", None, EIGHT_BITS)),
        (1700, ("nf4", "full", None, FOUR_BITS)),
        (1300, ("int8", "speculative", 1024, EIGHT_BITS, CHOOSES, READS.format("1,024"))),
        (1150, ("nf4", "speculative", 1024, FOUR_BITS, CHOOSES, READS.format("1,024"))),
        (880, ("nf4", "speculative", 512, FOUR_BITS, CHOOSES, f"{READS.format(512)}; the budget now is 1,024")),
        (720, ("nf4", "streaming", None, FOUR_BITS, "everything between the first tokens and the window")),
    ],
)
def test_less_memory_gives_up_more(small, free, expected):
    chosen = propose(replace(small, device_free=free), [HALF])
    assert (chosen.quantize, chosen.mode, chosen.budget, *chosen.gave_up) == expected
    assert propose(replace(small, device_free=free, host_free=900), [HALF]) is None


def test_everything_over_the_link_comes_before_a_window_that_forgets(small):
    chosen = propose(replace(small, device_free=740, token_bytes=1, context=1000), [HALF])
    assert (chosen.quantize, chosen.mode) == ("nf4", "full")
    assert chosen.gave_up[1].startswith("speed: ")


def test_what_does_not_fit_is_read_over_the_link_where_no_other_mode_can_be_entered(small):
    refused = {name: ModeNeed(0, {}, "no") for name in ("speculative", "streaming")}
    small = replace(small, modes=small.modes | refused, context=400, token_bytes=3, device_free=2060)
    assert propose(small).gave_up == (EIGHT_BITS,), "all of it fits beside fewer bits"
    small = replace(small, device_free=1200)
    left = 400 * 3 - (available.usable(1200) - 850)
    for share, read in ((1.0, left), (0.5, left // 2)):
        chosen = propose(replace(small, host_share=share))
        *others, lost = chosen.gave_up
        assert (chosen.quantize, chosen.mode, *others) == ("int8", "full", EIGHT_BITS)
        assert not lacks(lost, "speed", f"{read} B")


def test_who_chose_to_read_over_the_link_is_told_of_it(small):
    asked = ModeNeed(100, {"resident": 512}, link_bytes=7)
    chosen = propose(replace(small, modes=small.modes | {"full": asked}, device_free=9999))
    (lost,) = chosen.gave_up
    assert chosen.mode == "full"
    assert not lacks(lost, "speed", "7 B")


def test_a_proposal_that_needs_a_package_says_how_to_install_it(monkeypatch):
    made = replace(planned("bundled"), weights={"none": 1600, "nf4": 500}, host_pool=100, workspace=0, device="cuda:0")
    made = replace(made, modes={**made.modes, "full": ModeNeed(1000, {})}, device_free=1700, host_free=9999)
    assert propose(made).mode == "full"
    for found, wanted in ((None, libraries.extra("bnb")), (object(), "")):
        monkeypatch.setattr(quantization, "find_spec", lambda name, found=found: found)
        assert propose(made).install == wanted
        lines = list(plan_lines(replace(made, proposal=propose(made))))
        assert [line for line in lines if "pip install" in line] == ([wanted] if wanted else [])


def test_on_a_cpu_everything_shares_the_memory():
    made = planned("bundled")
    needed = made.weights["none"] + made.modes["full"].device_bytes + made.workspace + made.host_pool
    assert proposed(made, int(needed / 0.93)) == ("none", "full")
    assert proposed(made, needed) != ("none", "full")


@pytest.fixture
def on_a_card(monkeypatch, tmp_path):
    """Plans a Llama model for a card of ``gib`` GiB, of which 0.4 are taken."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(kvchat.__file__).parent / "models/bundled" / file, tmp_path)

    def card(name, device, dtype, progress, gpus=1):
        return replace(describe(name, "cpu", dtype, progress), device=torch.device("cuda"))

    monkeypatch.setattr(plan, "describe", card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # which has no int4
    monkeypatch.setattr(available, "host_free", lambda: 28 * GIB)

    def made(billions, gib, context, **asked):
        shape = {**heads, **BILLIONS[billions], "max_position_embeddings": 131072}
        save_headers(LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **shape), tmp_path)
        monkeypatch.setattr(available, "free_bytes", lambda device: int((gib - 0.4) * GIB))
        return memory_plan(Load(str(tmp_path), "cuda", "bfloat16", **asked), context, silent)

    return made


@pytest.mark.parametrize(
    ("billions", "gib", "context", "quantize", "mode", "chosen"),
    [
        (8, 24, 32768, "none", "full", None),
        (8, 16, 32768, "int8", "full", None),
        (8, 12, 131072, "nf4", "speculative", 2048),
        (8, 8, 49152, "nf4", "speculative", 512),
        (1, 4, 131072, "int8", "speculative", 2048),
    ],
)
def test_what_reads_nothing_over_the_link_is_proposed_first(on_a_card, billions, gib, context, quantize, mode, chosen):
    proposal = on_a_card(billions, gib, context).proposal
    assert (proposal.quantize, proposal.mode, proposal.budget) == (quantize, mode, chosen)
    assert not any("streamed from RAM" in lost for lost in proposal.gave_up)
    reduced = f"{READS.format('512')}; the budget now is 2,048"
    assert (reduced in proposal.gave_up) == (chosen == 512)


def test_the_table_says_beside_which_weights_full_reads_over_the_link(on_a_card):
    def rows(made):
        return [line for line in plan_lines(made) if "K/V read, full" in line or "streamed from RAM" in line]

    for asked, beside in (("auto", "int8"), ("none", "none")):
        made = on_a_card(1, 4, 131072, quantize=asked)
        taken = made.weights[beside] + made.workspace + made.modes["full"].device_bytes
        assert 0.95 * available.usable(made.device_free) < taken <= available.usable(made.device_free)
        assert f"streamed from RAM per token, with weights, {beside}" in rows(made)[1]
    for asked in ("auto", "none"):  # has room, and not even without K/V
        (full,) = rows(on_a_card(8, 12, 32768, quantize=asked))
        assert full.endswith("4.25 GiB")
