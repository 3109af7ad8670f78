"""Any geometry, parameters and order of turns, steps, switches and truncations: outputs match the reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense_attention import assert_near
from support.integrity import check_integrity
from support.kv_run import Run
from support.kv_steps import use_gpu_path
from support.toy_model import KINDS, toy

from kvchat.config.modes import mode_names
from kvchat.kv.inspect import attended

DEEP = settings(max_examples=12)


@st.composite
def toys(draw):
    sizes = st.sampled_from([8, 12, 16])
    return toy(
        tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=3))),
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        group=draw(st.integers(1, 3)),
        d_k=draw(sizes),
        d_v=draw(sizes),
        page=draw(st.integers(1, 24)),
        interleaved=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
    )


@st.composite
def modes(draw, page: int):
    """A mode and parameters that it can be entered with."""
    name = draw(st.sampled_from(mode_names()))
    if name == "full":
        return name, draw(st.sampled_from([{}, {"resident": 64}, {"resident": 70}, {"resident": 10_000}]))
    if name == "freeze":
        return name, draw(freezing())
    budget = draw(st.integers(64, 110))
    if name == "sync":
        numbers = {
            "m": st.integers(1, 6),
            "rho": st.floats(0, 1),
            "clusters": st.sampled_from([1, 2, 4]),  # not 3: of four heads either neighbor could form the pair
        }
        numbers["offload"] = st.booleans()
        return name, {"budget": budget, **{key: draw(values) for key, values in numbers.items()}}
    sink = draw(st.integers(0, 20))
    if name == "streaming":
        lazy = {key: draw(st.integers(0, 12)) for key in ("R", "sigma", "delta")}
        return name, {"budget": budget, "sink": sink, **lazy}
    window = draw(st.integers(page, budget - sink))
    tau = draw(st.sampled_from([-2.0, 0.6, 0.8, 2.0]))
    return name, {"budget": budget, "sink": sink, "window": window, "tau": tau, "first_full": draw(st.booleans())}


@st.composite
def freezing(draw):
    """Parameters of a freeze mode that freezes soon."""
    numbers = {
        "profile": st.sampled_from(["default", "paper"]),
        "tau": st.floats(0.3, 2),
        "k": st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        "K": st.integers(1, 40),
        "budget": st.one_of(st.none(), st.integers(64, 110)),
        "score": st.sampled_from(["prob_rel", "raw", "always"]),
    }
    return {key: draw(values) for key, values in numbers.items()}


def actions(page: int):
    return st.one_of(
        st.tuples(st.just("prefill"), st.integers(1, 70)),
        st.tuples(st.just("step"), st.integers(1, 25)),
        st.tuples(st.just("step"), st.integers(1, 25)),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.just("switch"), modes(page)),
    )


@DEEP
@given(st.data())
def test_any_conversation_matches_the_reference(data):
    model = data.draw(toys())
    page = model.geometry.page
    mode, params = data.draw(modes(page))
    run = Run(model, mode, **params)
    for what, how in data.draw(st.lists(actions(page), min_size=4, max_size=12)):
        act(run, what, how)
        run.check()
    run.step(3)
    run.check()


def act(run: Run, what: str, how) -> None:
    if what == "prefill":
        run.prefill(how, chunk=1 + how // 2)
    elif what == "step":
        for _ in range(how):
            run.step()
            check_integrity(run.kv.state)
    elif what == "truncate":
        run.truncate(int(how * run.kv.total))
    else:
        run.switch(how[0], **how[1])


@DEEP
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans())
def test_full_mode_does_not_depend_on_resident_tokens(data, dtype, fixed_shapes):
    page, group = data.draw(st.integers(2, 24)), data.draw(st.sampled_from([1, 4, 7, 8]))
    model = toy(tuple(sorted(KINDS)), group=group, page=page, dtype=dtype)
    resident = data.draw(st.one_of(st.integers(64, 100), st.just(10_000)))
    runs = [Run(model, "full"), Run(model, "full", resident=resident)]
    if fixed_shapes:
        use_gpu_path(runs[1].kv)
    around = [1, page - 1, page, page + 1, 4 * page, min(resident, 100) - 1, min(resident, 100), 101]
    for length in data.draw(st.lists(st.sampled_from(around), min_size=1, max_size=3)):
        for run in runs:
            run.prefill(length, chunk=60)
        for _ in range(3):
            for one, other in zip(*(run.step() for run in runs), strict=True):
                assert_near(other, one.double(), dtype, f"{length} tokens, {resident} resident")
    assert runs[1].kv.device_bytes <= runs[0].kv.device_bytes or runs[1].kv.total < resident


@DEEP
@given(st.data(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_reads_sinks_and_window_within_the_budget(data, dtype):
    page = data.draw(st.integers(1, 24))
    mode, params = data.draw(modes(page))
    run = Run(toy(("plain", "plain"), page=page, dtype=dtype), mode, **params)
    run.prefill(data.draw(st.integers(1, 150)))
    for _ in range(25):
        run.step()
        seen = attended(run.kv.state, 1)
        if mode == "speculative":
            assert int(seen.sum(1).max()) <= params["budget"]
            assert bool(seen[:, : params["sink"]].all())
            assert bool(seen[:, -params["window"] :].all())
    run.check()
