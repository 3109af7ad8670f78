"""What auto chooses for a machine and a conversation, and what it remembers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.message import lacks

from kvchat.config import modes
from kvchat.config.modes import AutoParameters
from kvchat.kv import auto
from kvchat.kv.auto import Auto, Choice, Conversation, Machine, Setup, choose, setups
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import rates
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.sync_heads import Calibration

GIB = 2**30
SHAPES = {  # layers, query heads, KV heads, head size, dtype, context, weight bytes read per token
    "8B": (32, 32, 8, 128, torch.bfloat16, 131_072, 5 * GIB),  # in 4 bits
    "8B16": (32, 32, 8, 128, torch.bfloat16, 131_072, 15 * GIB),
    "32B": (64, 40, 8, 128, torch.bfloat16, 131_072, 18 * GIB),
    "135M": (30, 9, 3, 64, torch.bfloat16, 8192, 270 * 10**6),
    "17M": (6, 6, 2, 64, torch.float32, 4096, 35 * 10**6),
}
# GB/s of the memory and of the link (0: a CPU), GiB free on the device and on the host.
H100, RTX_4090 = (3350, 50, 60, 200), (1000, 25, 17, 64)
RTX_3060, SMALL_3060, TINY_3060 = (360, 12, 6, 64), (360, 12, 3, 64), (360, 12, 1, 64)
SLOW_LINK = (360, 3, 6, 64)
SERVER, DESKTOP, LAPTOP, PI = (300, 0, 0, 256), (80, 0, 0, 64), (40, 0, 0, 16), (4, 0, 0, 4)
MACHINES = [
    # What fits on the device is read there, however fast the link.
    ("8B16", H100, 128_000, 30, {}, "full"),
    ("8B", RTX_4090, 64_000, 10, {}, "full"),
    ("8B", RTX_3060, 16_000, 10, {}, "full"),
    ("8B", SLOW_LINK, 16_000, 10, {}, "full"),
    ("8B", TINY_3060, 2000, 10, {}, "full"),
    # What does not fit is read over the link while that is fast enough, then with half as many bytes.
    ("8B", RTX_4090, 128_000, 10, {}, "full from RAM"),
    ("8B", RTX_3060, 42_000, 10, {}, "full from RAM"),
    ("8B", TINY_3060, 16_000, 10, {}, "full from RAM with 8-bit pages"),
    ("8B", (360, 25, 1, 64), 16_000, 10, {}, "full from RAM"),
    ("8B", (360, 25, 6, 64), 64_000, 10, {}, "full from RAM with 8-bit pages"),
    # Beyond that only part is read, as much as there is time for.
    ("8B", RTX_3060, 64_000, 10, {}, "speculative 32768"),
    ("8B", SMALL_3060, 64_000, 10, {}, "speculative 8192"),
    ("8B", SMALL_3060, 64_000, 30, {}, "speculative 8192 with 8-bit pages"),
    ("8B", SLOW_LINK, 64_000, 10, {}, "speculative 16384 with 8-bit pages"),
    ("8B", SLOW_LINK, 64_000, 40, {}, "speculative 1024 with 8-bit pages"),
    ("32B", (900, 25, 4, 64), 32_000, 10, {}, "speculative 8192"),
    ("8B", RTX_3060, 64_000, 10, {"budget": 1000}, "speculative 1000"),
    # If nothing is fast enough: the most faithful setup that is not much slower than the fastest.
    ("8B", SMALL_3060, 128_000, 10, {}, "full from RAM with 8-bit pages"),
    ("8B", SMALL_3060, 64_000, 60, {}, "speculative 2048 with 8-bit pages"),
    ("8B", LAPTOP, 4000, 10, {}, "full"),
    ("8B", LAPTOP, 64_000, 10, {}, "speculative 4096"),
    # Also where modes that read less are hardly faster.
    ("135M", (2.75, 0, 0, 4), 600, 10, {}, "full"),
    ("32B", LAPTOP, 8000, 10, {}, "full"),
    # On a CPU everything is on the device; time and RAM decide.
    ("17M", PI, 4000, 10, {}, "full"),
    ("135M", DESKTOP, 8000, 10, {}, "full"),
    ("135M", PI, 8000, 10, {}, "speculative 4096"),
    ("135M", PI, 8000, 5, {}, "full"),
    ("8B", SERVER, 100_000, 10, {}, "full"),
    ("8B", DESKTOP, 32_000, 10, {}, "speculative 8192"),
    ("8B", (300, 0, 0, 6), 64_000, 10, {}, "full with 8-bit pages"),
    ("8B", (360, 12, 17, 6), 64_000, 10, {}, "full with 8-bit pages"),
    ("8B", (80, 0, 0, 4), 32_000, 10, {}, "speculative 8192 with 8-bit pages"),
]


def options(shape, machine, tokens, calibration=None, new=auto.NEW, cpu_rate=0.0, given=None, **stored) -> list[Setup]:
    """The setups on a machine; ``given`` are the user's parameters by mode."""
    layers, q_heads, kv_heads, d, dtype, context, weights = SHAPES[shape]
    read, link, device, host = machine
    geometry = Geometry(layers, q_heads, kv_heads, d, d, dtype, headroom=2048 if link else 128, unified=not link)
    measured = Machine(read * 1e9, link * 1e9, weights, device * GIB, host * GIB, new, cpu_rate)
    traits = ModelTraits(context, (None,) * layers, calibration=calibration)
    merged = partial(modes.effective_params, settings={}, given=given or {})
    return setups(
        measured, geometry, traits, Conversation(tokens, **stored), lambda mode, add: merged(mode, changes=add)
    )


@pytest.mark.parametrize(("shape", "machine", "tokens", "speed", "given", "expected"), MACHINES, ids=str)
def test_auto_takes_the_most_faithful_setup_that_is_fast_enough(shape, machine, tokens, speed, given, expected):
    chosen = choose(options(shape, machine, tokens, given={"speculative": given}), 1 / speed)
    assert chosen.setup.label == expected
    assert not chosen.setup.lacks
    assert chosen.line.startswith(f"auto: {expected}, ")


def test_streaming_is_never_chosen():
    names = {setup.parameters.name for row in MACHINES for setup in options(*row[:3])}
    assert names == {"full", "speculative"}


def test_calibrated_sync_is_chosen_if_nothing_else_is_fast_enough():
    heads, layers = range(8), 32
    alike = tuple(tuple(float((a - b) % 2 == 0) for b in heads) for a in heads)
    measured = Calibration("", "", 2, (alike,) * layers, ((0.0,) * 8,) * layers)
    found = options("8B", SMALL_3060, 64_000, calibration=measured)
    assert found[-1].parameters.name == "sync"
    slow = {"speculative": 100.0, "sync": 1.0, "full from RAM": 1.0}
    roomy = [replace(setup, lacks="") if setup.parameters.name == "sync" else setup for setup in found]
    assert choose(roomy, 0.1, slow).setup.parameters.name == "sync"


def test_the_reason_states_the_numbers():
    over_link = choose(options("8B", RTX_3060, 64_000), 0.1).line
    assert not lacks(over_link, "because full would take", "ms a token from RAM")
    short_of_memory = choose(options("8B", RTX_4090, 128_000), 0.1).line
    assert not lacks(short_of_memory, "full takes", "on the device", "17.0 GiB are free")
    short_of_ram = choose(options("8B", (300, 0, 0, 6), 64_000), 0.1).line
    assert not lacks(short_of_ram, "of 6.0 GiB of RAM")
    assert not lacks(choose(options("8B", LAPTOP, 500), 0.1).line, "100 ms")


def test_stored_pages_keep_their_precision():
    """8-bit pages save nothing on stored full-precision pages, and quantized pages stay small."""
    fresh, stored = (options("8B", TINY_3060, 16_000, full_precision=stored) for stored in (0, 15_000))
    quantized = options("8B", TINY_3060, 16_000, quantized=15_000)
    labels = [setup.label for setup in fresh]
    exact, eight = (labels.index(f"full from RAM{pages}") for pages in ("", auto.EIGHT_BIT))
    assert fresh[eight].seconds < 0.7 * fresh[exact].seconds  # not half: full-precision pages are staged
    assert stored[eight].seconds > 0.9 * fresh[exact].seconds
    assert quantized[exact].seconds < 0.7 * fresh[exact].seconds


def test_the_cpu_attends_to_part_of_the_tokens_in_ram():
    def over_link(cpu_rate, cpu=None):
        found = options("8B", (256, 13, 2, 64), 32_000, cpu_rate=cpu_rate, given={"full": {"cpu": cpu}})
        return next(setup for setup in found if setup.label == "full from RAM")

    alone, together = over_link(0), over_link(30e9)
    assert alone.saved_seconds == 0
    assert together.link_seconds == alone.link_seconds
    launching = rates.TURN_S * 32
    expected = alone.link_seconds * 13 / (13 + 30) + launching
    assert together.seconds == pytest.approx(alone.seconds - alone.link_seconds + expected)
    # A share set by the user is used even if it is slower.
    assert over_link(30e9, 0.0).seconds == alone.seconds
    on_host = (alone.link_seconds * 13e9) / 131_072
    whole = over_link(30e9, 1.0)
    assert whole.seconds - (alone.seconds - alone.link_seconds) - launching >= on_host * 131_072 / 30e9
    assert over_link(1e9, 0.9).seconds > alone.seconds
    assert over_link(0, 0.9).seconds == alone.seconds  # without a CPU rate the share is ignored


def test_8_bit_pages_and_rings_set_by_users_are_kept():
    quantizing = options("8B", RTX_3060, 64_000, quantizes=True)
    assert all(setup.quantizes for setup in quantizing)
    assert choose(quantizing, 0.1).setup.label == "speculative 32768 with 8-bit pages"
    found = options("8B", (360, 12, 17, 64), 4000, given={"full": {"resident": 1024}})
    assert [setup.label for setup in found[:2]] == ["full from RAM", "full from RAM with 8-bit pages"]


def test_page_precision_changes_at_the_same_budget():
    """When RAM runs short, and when it is free again."""
    roomy, short = (
        options("8B", (80, 0, 0, host), 32_000, given={"speculative": {"budget": 4096}}) for host in (64, 4)
    )
    chooser = started(choose(roomy, 0.1))
    assert chooser.choice.setup.label == "speculative 4096"
    for changed in (chooser.within(short, 1, 0.1), chooser.between(short, 1)):
        assert changed.setup.label == "speculative 4096 with 8-bit pages"
    chooser.entered(changed, 1)
    assert not chooser.between(roomy, 1 + auto.APART).setup.quantizes


def test_speculative_setups_do_not_depend_on_conversation_length():
    short, long = (options("8B", RTX_3060, tokens) for tokens in (500, 100_000))
    assert [setup.name for setup in short if setup.parameters.name == "speculative"] == [
        setup.name for setup in long if setup.parameters.name == "speculative"
    ]


def test_pinned_tokens_cost_time_and_slots():
    plain, pinned = (options("8B", SMALL_3060, 64_000, pins=pins) for pins in ((), tuple(range(9000, 29_000))))
    at = [setup.label for setup in plain].index("speculative 8192")
    assert pinned[at].seconds > 1.1 * plain[at].seconds
    assert not plain[at].lacks
    assert "on the device" in pinned[at].lacks


# ---- corrections by measured times


def setups_taking(*seconds: float, lacks: str = "") -> list[Setup]:
    """Full, then speculative with smaller and smaller budgets, at these uncorrected times."""
    full, *others = seconds
    parsed = [modes.parse("speculative", {"budget": 4096 >> place}) for place in range(len(others))]
    return [
        Setup(modes.parse("full", {}), False, full, lacks=lacks),
        *(Setup(parameters, False, taken) for parameters, taken in zip(parsed, others, strict=True)),
    ]


def started(first: Choice | None = None, speed: float = 10) -> Auto:
    chooser = Auto()
    chooser.begin(AutoParameters(tokens_per_s=speed))
    if first:
        chooser.entered(first, 0)
    return chooser


def test_setups_are_corrected_by_their_own_or_the_mean_ratio():
    found = setups_taking(0.05, 0.03, 0.02)
    assert choose(found, 0.1, {"full": 3.0}).setup.name == "speculative 4096"
    assert choose(found, 0.08, {"full": 3.0}).setup.name == "speculative 2048"
    assert choose(found, 0.1, {"full": 3.0, "speculative": 1.0}).setup.name == "speculative 4096"
    assert choose(found, 0.1, {"full": 1.5, "speculative": 9.0}).setup.name == "full"


def test_the_measured_share_of_new_tokens_costs_link_time():
    shares = (0.0, 0.25, 0.5)
    setups_by_share = [options("8B", SLOW_LINK, 64_000, new={"speculative": share}) for share in shares]
    none, quarter, half = (
        next(setup for setup in setups if setup.name == "speculative 2048") for setups in setups_by_share
    )
    moved = 0.25 * (2048 - 2048 // 4) * 31 / 32 * 131_072 / 3e9  # without the window and the first layer
    assert quarter.seconds - none.seconds == pytest.approx(moved)
    assert half.seconds - quarter.seconds == pytest.approx(moved)
    assert [choose(setups, 0.1).setup.name for setups in setups_by_share] == [
        "speculative 32768",
        "speculative 16384",
        "speculative 8192",
    ]


def test_measured_ratios_are_smoothed():
    found = setups_taking(0.05)
    chooser = started(choose(found, 0.1))
    chooser.note(found, 0.1)
    assert chooser.ratios == {"full": pytest.approx(2.0)}
    chooser.note(found, 0.2)
    assert chooser.ratios == {"full": pytest.approx(2.6)}


def test_ratios_of_unused_setups_fade():
    """Full was slow while the machine was busy; it is tried again once speculative mode is as fast as predicted."""
    found = setups_taking(0.05, 0.03)
    chooser = started(choose(found, 0.1, {"full": 3.0}))
    chooser.ratios = {"full": 3.0, "speculative": 1.0}
    chooser.between(found, 1000)
    chooser.between(found, 1000)
    assert chooser.ratios == {"full": 3.0, "speculative": 1.0}, "a query alone forgets nothing"
    answers = 0
    while (chosen := chooser.between(found, 1000 * answers)) is None:
        chooser.note(found, 0.03)
        answers += 1
        assert answers < 20
    assert answers > 3
    assert chosen.setup.name == "full"


# ---- when the setup changes


def test_a_more_faithful_setup_returns_only_with_a_margin():
    assert choose(setups_taking(0.09, 0.05), 0.1).setup.name == "full"
    assert choose(setups_taking(0.09, 0.05), 0.1, current=setups_taking(0.09, 0.05)[1]).setup.name == "speculative 4096"
    assert choose(setups_taking(0.07, 0.05), 0.1, current=setups_taking(0.09, 0.05)[1]).setup.name == "full"


def test_setups_do_not_go_back_within_64_tokens():
    slow, quick = setups_taking(0.2, 0.05), setups_taking(0.05, 0.05)
    chooser = started(choose(quick, 0.1))
    chooser.entered(chooser.between(slow, 10), 10)
    assert chooser.between(quick, 10 + 63) is None
    assert chooser.between(quick, 10 + 64).setup.name == "full"


def test_only_very_slow_tokens_change_the_setup_inside_an_answer():
    found = setups_taking(0.05, 0.03)
    chooser = started(choose(found, 0.1))
    chooser.note(found, 0.14)
    assert chooser.within(found, 64, 0.14) is None
    chooser.note(found, 0.3)
    assert chooser.within(found, 64, 0.3).setup.name == "speculative 4096"


def test_changes_inside_an_answer_wait_64_tokens_and_read_less():
    found = setups_taking(0.05, 0.04, 0.01)
    chooser = started(choose(found, 0.1))
    chooser.entered(choose(found[1:], 0.1), 100)
    chooser.ratios = {"full": 0.1, "speculative": 5.0}
    assert chooser.within(found, 100 + 63, 0.2) is None
    assert chooser.within(found, 100 + 64, 0.2).setup.name == "speculative 2048"


def test_setups_that_do_not_help_are_not_entered():
    found = setups_taking(0.05, 0.049)
    chooser = started(choose(found, 0.1))
    chooser.note(found, 0.2)
    assert chooser.within(found, 64, 0.2) is None


def test_tokens_50_percent_over_the_target_are_slow():
    assert [started(speed=10).is_slow(seconds) for seconds in (0.1, 0.149, 0.151)] == [False, False, True]


def test_memory_shortage_changes_the_setup_immediately():
    roomy, short = setups_taking(0.05, 0.04), setups_taking(0.05, 0.04, lacks="full takes 9 GiB, 8 GiB are free")
    chooser = started(choose(roomy, 0.1))
    assert chooser.within(roomy, 1, 0.05) is None
    assert "8 GiB are free" in chooser.within(short, 1, 0.05).line
