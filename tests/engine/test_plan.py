"""Plans against what is measured after loading, and what they propose."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import tiny_models, tiny_multimodal
from support.loads import load_in
from support.message import lacks
from support.model_folders import edit_json, set_quantization
from support.progress import silent
from support.weights import save_headers
from transformers import LlamaConfig

import kvchat
from kvchat import libraries
from kvchat.bench.decode import floor_ms
from kvchat.config.profiles import Measured
from kvchat.engine import plan
from kvchat.engine.plan import fits_beside, memory_plan, mode_need, propose
from kvchat.engine.session import Session
from kvchat.errors import ModelError, UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.full import STAGED_SHARE
from kvchat.models.description import describe
from kvchat.models.load import load_model
from kvchat.models.recurrent import SNAPSHOTS
from kvchat.protocol.figures import ModeNeed, Snapshot
from kvchat.protocol.messages import Load, Sampling, Turn
from kvchat.tui.models import plan_lines

TOKENS = 300
WITHIN = 0.02
TEXT_MODELS = ("llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2", "dbrx", "jetmoe")
HYBRID = tiny_models.HYBRID[::3]  # each with a state of another size: tests/models loads all
SYNC = ({"mem": 0.3}, {"clusters": 2}, {"budget": 400}, {"offload": False})


@pytest.fixture(scope="module")
def model(bundled):
    return bundled


def planned(model, context=TOKENS, **params):
    return memory_plan(Load(str(model), "cpu", "float32", mode_params=params), context, silent)


def plan_on_gpu(monkeypatch, capability):
    """Plan for a GPU with the CPU's description."""

    def described(name, device, dtype, progress, gpus=1):
        return replace(describe(name, "cpu", dtype, progress), device=torch.device("cuda"))

    monkeypatch.setattr(plan, "describe", described)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.fixture
def folder(tmp_path, request):
    name = request.param
    whole = tiny_models.fresh(name) if name in TEXT_MODELS + tiny_models.HYBRID else tiny_multimodal.fresh(name)
    tiny_multimodal.save(whole, tmp_path)
    return tmp_path


@pytest.mark.parametrize("folder", [*TEXT_MODELS, *HYBRID, "gemma3", "gemma4", "ernie4_5_vl_moe"], indirect=True)
def test_plans_match_measured_memory(folder):
    made, session = planned(folder), Session(load_model(Load(str(folder), "cpu", "float32"), silent))
    runner = session._runner
    session.prefill([5 + i % 90 for i in range(TOKENS)])
    assert made.weights["none"] == pytest.approx(session.model.weight_bytes, rel=WITHIN)
    assert made.modes["full"].device_bytes == pytest.approx(runner.kv.device_bytes, rel=WITHIN)
    assert runner.kv.state.host.nbytes == pytest.approx(made.host_pool, rel=WITHIN)
    assert made.state == runner.recurrent.nbytes
    assert made.snapshots == SNAPSHOTS * made.state


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("recurrent_gemma", "It keeps recurrent state in its layers"),
        ("minimax", "MiniMax uses cache of its own"),
        ("zamba", "ZambaAttention does not say which layer it belongs to"),
    ],
)
def test_planning_refuses_what_loading_refuses(tmp_path, name, reason):
    tiny_multimodal.save(tiny_models.fresh(name), tmp_path)
    with pytest.raises(ModelError, match=reason) as loading:
        load_model(Load(str(tmp_path), "cpu", "float32"), silent)
    with pytest.raises(ModelError, match=reason) as planning:
        planned(tmp_path)
    assert str(planning.value) == str(loading.value)


@pytest.mark.parametrize(
    ("mode", "params", "tokens", "prompt"),
    [
        ("full", {}, 1091, 0.3),
        ("streaming", {"budget": 128}, 1091, 0.3),
        *(("freeze", {}, *lengths) for lengths in ((TOKENS, 1), (1091, 0.3))),
        *(("speculative", {"budget": 128}, *lengths) for lengths in ((TOKENS, 1), (1091, 0.3))),
        *(("sync", {}, *lengths) for lengths in ((TOKENS, 1), (TOKENS, 0.95), (1091, 0.3))),
        *(("sync", params, TOKENS, 0.95) for params in SYNC),
    ],
)
def test_device_bytes_of_every_mode_match_the_plan(model, mode, params, tokens, prompt):
    """Whether the conversation came at once or in parts."""
    made, session = planned("bundled", tokens, **{mode: params}), Session(model, load_in(mode, params))
    ids = [5 + i % 90 for i in range(tokens)]
    for part in filter(None, (ids[: int(prompt * tokens)], ids[int(prompt * tokens) :])):
        session.prefill(part)
    assert made.modes[mode].device_bytes == pytest.approx(session._kv.device_bytes, rel=1e-4)


@pytest.mark.parametrize("folder", ["llama", "qwen3_moe"], indirect=True)
def test_sync_is_planned_as_after_its_first_long_prompt(folder):
    load = Load(str(folder), "cpu", "float32", mode="sync")
    session = Session(load_model(load, silent), load)
    session.prefill([5 + i % 90 for i in range(TOKENS)])
    assert session._switcher.calibration, "it had none before"
    assert planned(folder).modes["sync"].device_bytes == pytest.approx(session._kv.device_bytes, rel=WITHIN)


@pytest.mark.parametrize(
    ("host_dtype", "tokens"), [("model", 454), ("int8", 1111), ("int8", 3033), ("model", 4096), ("int8", 4096)]
)
def test_host_pool_matches_the_plan_at_every_length(tmp_path, host_dtype, tokens):
    context = 4096  # a full one has no headroom
    tiny_multimodal.save(tiny_models.fresh("llama", max_position_embeddings=context), tmp_path)
    load = Load(str(tmp_path), "cpu", "float32", host_dtype=host_dtype)
    session = Session(load_model(load, silent), load)
    session.prefill([5 + i % 90 for i in range(tokens)])
    assert memory_plan(load, tokens, silent).host_pool == pytest.approx(session._kv.state.host.nbytes, rel=WITHIN)


def test_nf4_weights_match_the_plan():
    if absent := libraries.lacking("nf4", "cpu"):
        pytest.skip(f"{' and '.join(absent)} not installed")
    measured = load_model(Load("bundled", "cpu", "float32", quantize="nf4"), silent).weight_bytes
    assert planned("bundled").weights["nf4"] == pytest.approx(measured, rel=WITHIN)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_quantization_refused_by_loading_has_no_plan(folder):
    set_quantization(folder, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False})
    with pytest.raises(ModelError, match="gptq"):
        memory_plan(Load(str(folder), "cpu", "float32", quantize="int8"), TOKENS, silent)
    assert list(planned(folder).weights) == ["gptq"]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_untied_output_head_is_quantized_too(folder, quantize):
    model = load_model(Load(str(folder), "cpu", "float32", quantize=quantize), silent)
    assert model.model.get_output_embeddings().weight.dtype == torch.int8
    assert planned(folder).weights[quantize] == pytest.approx(model.weight_bytes, rel=WITHIN)


@pytest.mark.parametrize("folder", ["qwen3_next"], indirect=True)
def test_only_the_headers_of_weight_files_are_read(folder):
    before = planned(folder)
    for file in folder.glob("*.safetensors"):
        size, content = file.stat().st_size, file.read_bytes()
        file.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
        os.truncate(file, size)
    assert replace(planned(folder), host_free=0, device_free=0) == replace(before, host_free=0, device_free=0)


def test_plan_counts_what_full_reads_over_the_link():
    geometry = Geometry(2, 4, 2, 16, 16, torch.float32, headroom=128)
    seen = SimpleNamespace(geometry=geometry, traits=ModelTraits(4096, (None,) * 2), system_tokens=0, pins=0)
    need = mode_need("full", load_in("full", {"resident": 512}), seen, 4000)
    assert need.link_bytes == (4000 - 512) * geometry.token_bytes
    halved = mode_need("full", load_in("full", {"resident": 512}), seen, 4000, host_share=0.5)
    assert (halved.link_bytes, halved.device_bytes) == (need.link_bytes // 2, need.device_bytes)
    assert need.device_bytes == pytest.approx(512 * geometry.token_bytes * (1 + STAGED_SHARE), rel=WITHIN)
    made = replace(planned("bundled"), modes={"full": need})
    assert any("full, resident 512" in line for line in plan_lines(made))
    assert any("streamed from RAM per token" in line for line in plan_lines(made))


def test_full_on_a_small_card_reads_the_rest_over_the_link(monkeypatch):
    plan_on_gpu(monkeypatch, (8, 6))
    free = 10 * 2**30

    def made(**options):
        monkeypatch.setattr(available, "free_bytes", lambda device: free)
        return memory_plan(Load("bundled", "cuda", "bfloat16", **{"quantize": "none", **options}), None, silent)

    large = made()
    assert large.modes["full"].link_bytes == 0
    free = large.weights["none"] + large.workspace + large.modes["full"].device_bytes // 2
    small = made()
    need, token_bytes = small.modes["full"], small.token_bytes
    resident = need.params["resident"]
    left = available.usable(free) - small.weights["none"] - small.workspace
    assert 0.85 * left < need.device_bytes <= left  # prefill takes a little more with more tokens
    assert need.device_bytes == pytest.approx(resident * token_bytes * (1 + STAGED_SHARE), rel=WITHIN)
    assert need.link_bytes == (small.context - resident) * token_bytes
    assert small.proposal.mode != "full" or small.proposal.gave_up
    assert made(quantize="int8").modes["full"].params["resident"] > resident
    assert made(mode_params={"full": {"resident": 512}}).modes["full"].params["resident"] == 512


def test_floor_matches_the_loaded_model():
    load = Load("bundled", "cpu", "float32", read_bytes_per_s=2e9)
    made = memory_plan(load, TOKENS, silent)
    for quantize in ("none", "int8"):
        loaded = load_model(replace(load, quantize=quantize), silent)
        assert made.floor_ms[quantize] == pytest.approx(floor_ms(loaded, Measured(read=2.0)), rel=WITHIN)
    (row,) = [line for line in plan_lines(replace(made, weights={"none": made.weights["none"]})) if "a token" in line]
    assert row.split() == ["floor,", "a", "token", "RAM", f"{made.floor_ms['none']:.1f}", "ms"]
    assert planned("bundled").floor_ms == {}
    assert not any("floor" in line for line in plan_lines(planned("bundled")))


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_expert_models_have_no_floor(folder):
    assert memory_plan(Load(str(folder), "cpu", "float32", read_bytes_per_s=2e9), TOKENS, silent).floor_ms == {}


@pytest.mark.parametrize(("folder", "mode"), [("llama", "streaming"), ("qwen3_next", "full")], indirect=["folder"])
def test_plan_includes_the_current_conversation(folder, mode, monkeypatch):
    load = Load(str(folder), "cpu", "float32", mode=mode, mode_params={"streaming": {"budget": 128}})
    session = Session(load_model(load, silent), load)
    session.prefill([5 + i % 90 for i in range(TOKENS)])
    seen = session.snapshot()
    monkeypatch.setattr(available, "host_free", lambda: 2**30)
    made = memory_plan(load, None, silent, seen)
    assert (made.stored.mode, made.stored.tokens) == (mode, TOKENS)
    assert made.stored.device_bytes == pytest.approx(seen.kv_device_bytes - seen.state_bytes, rel=WITHIN)
    assert made.stored.host_pool == pytest.approx(seen.kv_host_bytes - seen.snapshot_bytes, rel=WITHIN)
    assert made.state == seen.state_bytes
    held = seen.weight_bytes + seen.kv_device_bytes + seen.kv_host_bytes
    assert (made.host_free, made.device_free) == (2**30 + held, 2**30 + held)


@pytest.mark.parametrize("mode", ["freeze", "streaming", "sync", "speculative"])
def test_plan_counts_capacity_kept_after_truncation(model, mode):
    load = load_in(mode, {"streaming": {"budget": 64}, "speculative": {"budget": 64}}.get(mode, {}))
    session = Session(model, load)
    for host_dtype, tokens in (("model", 400), ("int8", 350), ("model", 300)):
        session.keep_pages(host_dtype)
        session.prefill([5 + i % 90 for i in range(tokens)])
        session.step(5)
    session.truncate(500)
    session.step(5)
    seen = session.snapshot()
    made = memory_plan(load, None, silent, seen).stored
    assert made.host_pool == pytest.approx(seen.kv_host_bytes, rel=WITHIN)
    assert made.device_bytes == pytest.approx(seen.kv_device_bytes, rel=WITHIN)
    assert made.tokens == 501 < made.device_room
    assert made.host_room > 1000


@pytest.mark.parametrize(
    ("mode", "pin_system"),
    [("freeze", False), ("streaming", True), ("streaming", False), ("sync", True), ("speculative", False)],
)
def test_plan_counts_pinned_tokens(model, mode, pin_system):
    budget = {"budget": 300} if mode == "freeze" else {"budget": 64} if mode != "sync" else {}
    load = load_in(mode, {"pin_system": pin_system, **budget})
    session = Session(model, load)
    turns = [Turn("system", "You know it all. " * 20), Turn("user", "It is so, and " * 100, pinned=True)]
    for _ in session.answer(turns, Sampling(max_new_tokens=2)):
        pass
    seen = session.snapshot()
    assert seen.pins > 200
    made = memory_plan(load, None, silent, seen)
    assert made.stored.device_bytes == pytest.approx(seen.kv_device_bytes, rel=WITHIN)
    assert made.modes[mode].params.get("budget") == budget.get("budget"), "pinned tokens are on top of it"


def test_current_model_frees_gpu_and_host_memory_separately():
    in_use = Snapshot("full", {}, 7, 7, 4096, kv_device_bytes=1, kv_host_bytes=20, weight_bytes=300, torch_allocated=0)
    assert plan._given_back(in_use, torch.device("cuda")) == (301, 20)
    assert plan._given_back(in_use, torch.device("cpu")) == (20, 20)
    assert plan._given_back(replace(in_use, torch_allocated=None), torch.device("cuda")) == (0, 321)
    assert plan._given_back(None, torch.device("cpu")) == (0, 0)


def test_the_models_context_is_the_default_and_the_limit():
    assert planned("bundled", None).context == 16384
    for refused in (0, 16385):
        with pytest.raises(UsageError, match=r"1 to 16,384"):
            planned("bundled", refused)


def test_mode_that_cannot_be_entered_says_why():
    need = planned("bundled", speculative={"budget": 64, "sink": 64, "window": 64}).modes["speculative"]
    assert not lacks(need.refusal, "64", "sink + window")


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError):
        planned(tmp_path)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("change", [{"hidden_act": "no such"}, {"num_key_value_heads": 3}], ids=str)
def test_invalid_configuration_is_refused(folder, change):
    edit_json(folder / "config.json", **change)
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        memory_plan(Load(str(folder), "cpu"), 64, silent)


def test_fits_beside_checks_free_memory(monkeypatch):
    load = Load("bundled", dtype="float32")
    needed = planned("bundled", 1).weights["none"] + planned("bundled", 1).workspace
    for free, fits in ((int(needed / 0.93), True), (needed, False)):
        monkeypatch.setattr(available, "host_free", lambda free=free: free)
        assert fits_beside(load, silent) is fits


def test_plan_uses_parameters_given_at_run_time():
    load = Load("bundled", mode_params={"speculative": {"budget": 1024}}, given={"speculative": {"budget": 256}})
    made = memory_plan(load, TOKENS, silent)
    assert (made.context, made.modes["speculative"].params["budget"]) == (TOKENS, 256)
    same = memory_plan(replace(load, given={"streaming": {"budget": 256}}), TOKENS, silent)
    assert made.modes["streaming"] == same.modes["streaming"], "a budget once given holds in every mode that has one"
    assert made.proposal.budget is None
    assert propose(replace(made, modes={**made.modes, "full": ModeNeed(0, {}, "no")})).budget == 256


# ---- The proposed combination of weights and mode for the free memory


GIB = 2**30
BILLIONS = {  # shapes of Llama models by billions of parameters
    1: {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    8: {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
EIGHT_BITS, FOUR_BITS = (f"precision of the weights: {bits} bits instead of float32" for bits in (8, 4))
READS = "reading more than {} tokens per head and token"
CHOOSES = "reading everything for every token: speculative chooses what to read"


@pytest.fixture
def small():
    """A plan whose parts on the device are known to the byte."""
    weights = {"none": 1600, "int8": 800, "nf4": 500}
    modes = {"speculative": ModeNeed(300, {"budget": 1024}), "streaming": ModeNeed(100, {})}
    sizes = {"workspace": 50, "host_pool": 1000, "host_free": 9999}
    full = ModeNeed(1000, {})
    return replace(planned("bundled"), weights=weights, modes={"full": full, **modes}, device="cuda:0", **sizes)


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


def test_full_over_the_link_is_proposed_before_streaming(small):
    chosen = propose(replace(small, device_free=740, token_bytes=1, context=1000), [HALF])
    assert (chosen.quantize, chosen.mode) == ("nf4", "full")
    assert chosen.gave_up[1].startswith("speed: ")


def test_full_over_the_link_is_proposed_if_no_other_mode_works(small):
    refused = {name: ModeNeed(0, {}, "no") for name in ("speculative", "streaming")}
    small = replace(small, modes=small.modes | refused, context=400, token_bytes=3, device_free=2060)
    assert propose(small).gave_up == (EIGHT_BITS,), "all of it fits with fewer bits"
    small = replace(small, device_free=1200)
    left = 400 * 3 - (available.usable(1200) - 850)
    for share, read in ((1.0, left), (0.5, left // 2)):
        chosen = propose(replace(small, host_share=share))
        *others, lost = chosen.gave_up
        assert (chosen.quantize, chosen.mode, *others) == ("int8", "full", EIGHT_BITS)
        assert not lacks(lost, "speed", f"{read} B")


def test_requested_reads_over_the_link_are_reported(small):
    requested = ModeNeed(100, {"resident": 512}, link_bytes=7)
    chosen = propose(replace(small, modes=small.modes | {"full": requested}, device_free=9999))
    (lost,) = chosen.gave_up
    assert chosen.mode == "full"
    assert not lacks(lost, "speed", "7 B")


def test_proposal_says_how_to_install_a_missing_package(monkeypatch):
    made = replace(planned("bundled"), weights={"none": 1600, "nf4": 500}, host_pool=100, workspace=0, device="cuda:0")
    made = replace(made, modes={**made.modes, "full": ModeNeed(1000, {})}, device_free=1700, host_free=9999)
    assert propose(made).mode == "full"
    for absent, wanted in ((["bitsandbytes"], libraries.extra("bnb")), ([], "")):
        monkeypatch.setattr(libraries, "absent", lambda name, absent=absent: absent)
        assert propose(made).install == wanted
        lines = list(plan_lines(replace(made, proposal=propose(made))))
        assert [line for line in lines if "pip install" in line] == ([wanted] if wanted else [])


def test_weights_and_kv_share_memory_on_a_cpu():
    made = planned("bundled")
    needed = made.weights["none"] + made.modes["full"].device_bytes + made.workspace + made.host_pool
    for free, fits in ((int(needed / 0.93), True), (needed, False)):
        chosen = propose(replace(made, host_free=free, device_free=free))
        assert ((chosen.quantize, chosen.mode) == ("none", "full")) is fits


@pytest.fixture
def on_a_card(monkeypatch, tmp_path):
    """Plan a Llama model for a card of ``gib`` GiB, 0.4 of them in use."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(kvchat.__file__).parent / "models/bundled" / file, tmp_path)
    plan_on_gpu(monkeypatch, (7, 5))  # which has no int4
    monkeypatch.setattr(available, "host_free", lambda: 28 * GIB)

    def made(billions, gib, context, **options):
        shape = {**heads, **BILLIONS[billions], "max_position_embeddings": 131072}
        save_headers(LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **shape), tmp_path)
        monkeypatch.setattr(available, "free_bytes", lambda device: int((gib - 0.4) * GIB))
        return memory_plan(Load(str(tmp_path), "cuda", "bfloat16", **options), context, silent)

    return made


@pytest.mark.parametrize(
    ("billions", "gib", "context", "quantize", "mode", "chosen"),
    [
        (8, 24, 32768, "none", "full", None),
        (8, 16, 32768, "int8", "full", None),
        (8, 12, 131072, "nf4", "speculative", 2048),
        (8, 8, 45056, "nf4", "speculative", 512),
        (1, 4, 131072, "int8", "speculative", 2048),
    ],
)
def test_setups_without_link_reads_are_proposed_first(on_a_card, billions, gib, context, quantize, mode, chosen):
    proposal = on_a_card(billions, gib, context).proposal
    assert (proposal.quantize, proposal.mode, proposal.budget) == (quantize, mode, chosen)
    assert not any("streamed from RAM" in lost for lost in proposal.gave_up)
    reduced = f"{READS.format('512')}; the budget now is 2,048"
    assert (reduced in proposal.gave_up) == (chosen == 512)


def test_table_says_with_which_weights_full_reads_over_the_link(on_a_card):
    def rows(made):
        return [line for line in plan_lines(made) if "K/V read, full" in line or "streamed from RAM" in line]

    for requested, weights in (("auto", "int8"), ("none", "none")):
        made = on_a_card(1, 4, 131072, quantize=requested)
        taken = made.weights[weights] + made.workspace + made.modes["full"].device_bytes
        assert 0.95 * available.usable(made.device_free) < taken <= available.usable(made.device_free)
        assert f"streamed from RAM per token, with weights, {weights}" in rows(made)[1]
    for requested in ("auto", "none"):  # the first fits, the second does not even without K/V
        (full,) = rows(on_a_card(8, 12, 32768, quantize=requested))
        assert full.endswith("4.25 GiB")
