"""Figures that the application shows: the receipt of an answer, the plan of a model, the panel's snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

Params = dict[str, Any]
LOW_COVERAGE = "low coverage"  # the only badge about a conversation; others are about the machine or the model
Count = Annotated[int, Field(ge=0, lt=2**63)]  # the range is checked when a message arrives


@dataclass(frozen=True)
class Stats:
    """The cost of one answer; None is a figure that was not measured.

    ``read_share`` is the share of the stored tokens that a step read, on average; ``corrected_share`` the share of
    (step, head) pairs in which a head was corrected; ``mean_cosine`` the mean cosine between a head's successive
    queries. ``coverage`` is the share of full attention that fell on the tokens read, averaged over heads, and
    ``lowest_coverage`` its minimum; both cover the last mode and are None if it read everything. ``recall_ms_*`` and
    ``exposed_ms_*`` cover the last steps in the last mode. ``extras`` are the mode's own figures since it was entered.
    """

    prompt_tokens: Count = 0
    reused_tokens: Count = 0
    generated_tokens: Count = 0
    total_tokens: Count = 0
    active_tokens: float | None = None
    read_share: float | None = None
    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    kv_device_bytes: Count = 0
    kv_host_bytes: Count = 0
    recalled_bytes: Count = 0
    recall_hit_rate: float | None = None
    corrections: Count = 0
    corrected_share: float | None = None
    recall_ms_p50: float | None = None
    recall_ms_p95: float | None = None
    exposed_ms_p50: float | None = None
    exposed_ms_p95: float | None = None
    recall_bytes_per_s: float | None = None
    recoveries: Count = 0
    withdrawn_tokens: Count = 0
    switches: tuple[Params, ...] = ()
    extras: Params = field(default_factory=dict)
    mean_cosine: float | None = None
    coverage: float | None = None
    lowest_coverage: float | None = None


@dataclass(frozen=True)
class Agreement:
    """Agreement of a comparison's run with the first run; None is a figure that was not measured.

    ``first_difference`` counts the equal tokens before the first difference, None without one. The other figures
    compare ``tokens`` predictions of the next token after the first run's text: ``same_choice`` is the share for which
    both runs have the same likeliest token, ``kl_*`` the Kullback-Leibler divergence of the run's distribution from the
    first run's, in nats.
    """

    first_difference: Count | None = None
    tokens: Count = 0
    same_choice: float | None = None
    kl_mean: float | None = None
    kl_max: float | None = None


@dataclass(frozen=True)
class Run:
    """One answer of a comparison, in ``mode`` with all its ``params``; ``pieces`` has the text of each token.

    ``reason`` is as in ``Finished``. ``refusal`` says why the mode cannot be entered; then there is no answer.
    ``agreement`` is None for the first run, with which the others are compared.
    """

    mode: str
    params: Params
    pieces: tuple[str, ...] = ()
    reason: str = ""
    stats: Stats = Stats()
    agreement: Agreement | None = None
    refusal: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Price:
    """The cost of entering ``mode`` now: it copies ``moved_bytes`` to the device and then takes ``device_bytes`` there.

    ``seconds`` is an estimate from earlier fills or the PCIe bandwidth; ``refusal`` says why it cannot be entered.
    """

    mode: str
    moved_bytes: Count = 0
    device_bytes: Count = 0
    seconds: float | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Gpu:
    """NVML's readings of a GPU in bytes, percent, degrees and watts; a missing one is None and shown as ``n/a``."""

    name: str
    used: Count | None = None
    total: Count | None = None
    process: Count | None = None
    utilization: Count | None = None
    temperature: Count | None = None
    power: float | None = None


@dataclass(frozen=True)
class ModeNeed:
    """A mode's K/V on the device, with its effective parameters; ``refusal`` says why it cannot be entered.

    For freeze it is a maximum, because what freezes is only known later. For sync it assumes that the heads are
    measured, as after the first long prompt; until then everything is held. Full mode with ``resident`` streams
    ``link_bytes`` for every token once the conversation is as long as planned; unless the user sets ``resident``, it
    fills the device memory left by the weights named in the plan's ``beside``.
    """

    device_bytes: Count
    params: Params
    refusal: str = ""
    link_bytes: Count = 0


@dataclass(frozen=True)
class Proposal:
    """The choice that fits and gives up least, as listed in ``gave_up``. ``budget`` is None in a mode without one.

    ``install`` is the command that installs packages for the quantization, "" if none is missing.
    """

    quantize: str
    mode: str
    budget: Count | None
    gave_up: tuple[str, ...]
    install: str = ""


@dataclass(frozen=True)
class StoredNeed:
    """The bytes of K/V while ``tokens`` are stored in the current ``mode``: on the device and in the host pool.

    The memory has room for ``device_room`` and ``host_room`` tokens, and stays allocated for later ones.
    """

    mode: str
    tokens: Count
    device_bytes: Count
    host_pool: Count
    device_room: Count = 0
    host_room: Count = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, for a conversation of ``context`` tokens.

    ``weights``, ``modes``, ``state`` and ``workspace`` (an estimate) are on the device, ``host_pool`` and ``snapshots``
    in RAM; on a CPU both are the same memory.

    Attributes:
        weights: by quantization.
        token_bytes: K/V of one token; the host pool takes ``host_share`` of it.
        unpacked: RAM for all weights that loading unpacks before it quantizes them again, else 0.
        packed: the size on disk of a checkpoint (not GGUF) with such weights, else 0.
        by_default: the quantization of such weights if none was requested, else none.
        file_bits: bits per such weight in the files, else 0.
        beside: the quantization that full mode's share of the device assumes: the requested one, else the proposed one.
        proposal: None if nothing fits.
        floor_ms: by quantization, the time to read the weights for one token, a lower bound for a token's time; empty
            without a measured rate.
        stored: set while a model is loaded; the model's memory counts as free.
        given: the options set by the user that the plan depends on, by name.
        elsewhere: bytes of weights on GPUs other than the device, by quantization and GPU; ``others_free`` is the free
            memory there.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    context: Count
    weights: dict[str, Count]
    modes: dict[str, ModeNeed]
    state: Count
    workspace: Count
    host_pool: Count
    snapshots: Count
    device_free: Count
    host_free: Count
    token_bytes: Count = 0
    host_share: float = 1.0
    unpacked: Count = 0
    packed: Count = 0
    by_default: str = "none"
    file_bits: float = 0.0
    beside: str = "none"
    proposal: Proposal | None = None
    floor_ms: dict[str, float] = field(default_factory=dict)
    stored: StoredNeed | None = None
    given: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, dict[str, Count]] = field(default_factory=dict)
    others_free: dict[str, Count] = field(default_factory=dict)

    def on_device(self, quantize: str) -> int:
        """Return the bytes of the weights on the device."""
        return self.weights[quantize] - sum(self.elsewhere.get(quantize, {}).values())


@dataclass(frozen=True)
class Planned:
    """The memory ``plan`` for loading ``model``, or None with the reason in ``refusal``."""

    model: str
    plan: MemoryPlan | None
    refusal: str = ""


@dataclass(frozen=True)
class ServerFigures:
    """A server's own figures, over all its users since it was started; None if it does not report one.

    ``kind`` is the program, ``place`` its host and port. ``prompt_tokens`` and ``reused_tokens`` are those of the last
    answer here. ``capacity`` is its room for K/V in tokens, ``used_share`` the share in use. ``prefix_share`` is the
    hit rate of its prefix cache, ``prefix_tokens`` the hits in tokens. ``host_*`` are the same for K/V in RAM.
    ``drafts_share`` is the share of drafted tokens that were accepted. ``missing`` says why other figures are missing.
    """

    kind: str
    place: str
    prompt_tokens: Count | None = None
    reused_tokens: Count | None = None
    prompt_tokens_per_s: float | None = None
    capacity: Count | None = None
    used_share: float | None = None
    prefix_share: float | None = None
    prefix_tokens: Count | None = None
    host_capacity: Count | None = None
    host_share: float | None = None
    host_tokens: Count | None = None
    host_loaded_bytes: Count | None = None
    host_stored_bytes: Count | None = None
    tokens_per_s: float | None = None
    running: Count | None = None
    waiting: Count | None = None
    drafts_share: float | None = None
    missing: str = ""


# Letters of the ribbon's cells. A cell shows the state of most of its tokens; recalled overrides all others but pinned.
RIBBON = {
    "S": "sink",
    "W": "window",
    "D": "on the device",
    "R": "recalled just now",
    "H": "in RAM",
    "F": "frozen",
    "X": "out of reach",
    "P": "pinned",
}
MAX_RIBBON_CELLS = 1024


@dataclass(frozen=True)
class Snapshot:
    """The KV manager's figures and activity, read at most 10 times a second.

    Attributes:
        active: tokens that the last step read, averaged over layers and KV heads.
        is_prompt: True if that step prefilled, which reads everything in every mode.
        ribbon: a letter of ``RIBBON`` for each cell of ``cell_tokens`` stored tokens.
        attended: a digit 0-9 for each cell: the share of its (layer, head, token) triples that the last step read.
        coverage: the current answer's, as in ``Stats``.
        recall_ms_p50: percentiles of the copy time in an answer's last 256 steps; ``exposed_ms_*``: of the wait.
        recall_bytes_per_s: the rate since the last snapshot.
        extras: figures of the current mode only, in display order.
        prices: of the other modes.
        badges: warnings about how the engine runs: a few words, a colon, the reason.
        process_bytes: the engine's RAM; ``kv_parked_bytes``: other conversations' K/V in RAM.
        state_bytes: of the recurrent state; ``snapshot_bytes``: of its snapshots; the K/V bytes include both.
        preamble: tokens of the system prompt; ``pins``: of pinned messages that are read beyond the budget.
        device_room: tokens that fit in the device's slots; ``exact_room`` and ``rounded_room``: in the host pool's
            exact and 8-bit pages.
        server: set if a server runs the model, which hides what is read and held.
        auto: why kvchat chose this mode, if it did.
        elsewhere: bytes of weights on GPUs without K/V; ``other_gpus``: the readings of these GPUs.
    """

    mode: str
    params: Params
    active: float
    total: Count
    context: Count
    kv_device_bytes: Count
    kv_host_bytes: Count
    weight_bytes: Count = 0
    process_bytes: Count | None = None
    torch_allocated: Count | None = None
    torch_reserved: Count | None = None
    gpu: Gpu | None = None
    tokens_per_s: float | None = None
    ttft_s: float | None = None
    step_bytes: float = 0.0
    recalled_bytes: Count = 0
    recall_hit_rate: float | None = None
    corrections: Count = 0
    recall_ms_p50: float | None = None
    recall_ms_p95: float | None = None
    exposed_ms_p50: float | None = None
    exposed_ms_p95: float | None = None
    recall_bytes_per_s: float | None = None
    coverage: float | None = None
    reduced_tokens: Count = 0
    cell_tokens: Annotated[Count, Field(ge=1)] = 32
    ribbon: Annotated[str, Field(max_length=MAX_RIBBON_CELLS)] = ""
    attended: Annotated[str, Field(max_length=MAX_RIBBON_CELLS)] = ""
    extras: Params = field(default_factory=dict)
    prices: tuple[Price, ...] = ()
    badges: tuple[str, ...] = ()
    kv_parked_bytes: Count = 0
    state_bytes: Count = 0
    snapshot_bytes: Count = 0
    preamble: Count = 0
    pins: Count = 0
    device_room: Count = 0
    exact_room: Count = 0
    rounded_room: Count = 0
    server: ServerFigures | None = None
    auto: str = ""
    elsewhere: dict[str, Count] = field(default_factory=dict)
    other_gpus: dict[str, Gpu] = field(default_factory=dict)
    is_prompt: bool = False
