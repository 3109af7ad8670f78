"""The figures that the application shows: the receipt of an answer, the plan of a model, the panels' snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

Params = dict[str, Any]
Count = Annotated[int, Field(ge=0, lt=2**63)]  # the range is checked where a message arrives


@dataclass(frozen=True)
class Stats:
    """The cost of one answer, None where nothing was measured.

    ``read_share`` is the mean over its steps of the share of the stored tokens that was read, ``corrected_share`` that
    of the head-steps in which a head was corrected, ``mean_cosine`` the mean cosine of a head's query to its last one.
    ``coverage`` is the share of the attention to everything stored that fell on what was read, the mean over all heads,
    ``lowest_coverage`` the least that it was; both in the last mode, None where everything was read.
    What recall took, and what of it was waited for, is of its last steps in the last mode. ``extras`` are the mode's
    figures since it was entered.
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
    """Agreement of a comparison's run with the first one; None where nothing was measured.

    ``first_difference`` counts the tokens drawn alike before the first other one, None where all are alike. The other
    figures are of ``tokens`` next tokens, each given the first run's text before it: ``same_choice`` is the share of
    them for which both find the same token likeliest, ``kl_*`` the Kullback-Leibler divergence of the run's
    distribution from the first run's, in nats.
    """

    first_difference: Count | None = None
    tokens: Count = 0
    same_choice: float | None = None
    kl_mean: float | None = None
    kl_max: float | None = None


@dataclass(frozen=True)
class Run:
    """One answer of a comparison: in ``mode`` with all its ``params``, with the text of each token.

    ``reason`` is why it ended, as in ``Finished``. ``refusal`` says why the mode cannot be entered; then there is no
    answer. ``agreement`` is None for the run that the others are compared with.
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
    """The cost of entering ``mode`` now: ``moved_bytes`` from host to device, its ``device_bytes`` afterwards.

    ``seconds`` is an estimate from earlier fills or the link's rate; ``refusal`` says why it cannot be entered.
    """

    mode: str
    moved_bytes: Count = 0
    device_bytes: Count = 0
    seconds: float | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Gpu:
    """One NVML reading in bytes, percent, degrees and watts; a missing reading is None and drawn ``n/a``."""

    name: str
    used: Count | None = None
    total: Count | None = None
    process: Count | None = None
    utilization: Count | None = None
    temperature: Count | None = None
    power: float | None = None


@dataclass(frozen=True)
class ModeNeed:
    """A mode's K/V on the device, with the parameters in force; ``refusal`` says why it cannot be entered.

    In freeze it is the most: what freezes turns out later. In sync it is with the heads measured, as the first long
    prompt leaves them; while that is read, all is held. Full mode with ``resident`` reads ``link_bytes`` over the link
    for every token once the conversation is as long as planned; where nobody chose it, it is what the device leaves
    beside the weights that the plan names.
    """

    device_bytes: Count
    params: Params
    refusal: str = ""
    link_bytes: Count = 0


@dataclass(frozen=True)
class Proposal:
    """A choice that fits with the least given up, which ``gave_up`` says. ``budget`` is None in a mode without one.

    ``install`` is the command that installs what the quantization needs, empty where it is there.
    """

    quantize: str
    mode: str
    budget: Count | None
    gave_up: tuple[str, ...]
    install: str = ""


@dataclass(frozen=True)
class StoredNeed:
    """The bytes of K/V while ``tokens`` are stored in the current ``mode``: on the device and in the host pool.

    Both have room for more, ``device_room`` and ``host_room`` tokens: what once was taken is kept for what comes next.
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

    ``weights`` by quantization and ``modes`` lie on the device, with ``state`` and ``workspace`` (the last is an
    estimate); ``host_pool`` and ``snapshots`` in host memory. On a CPU both are the same memory. K/V of a token take
    ``token_bytes``, in the host pool ``host_share`` of that. ``by_default`` names the quantization of weights that
    loading unpacks and none is asked for, else it is none; ``file_bits`` is what such a weight takes in the files, else
    0. Full mode takes what the weights ``beside`` it leave: those asked for, else proposed. ``proposal`` is None where
    nothing fits. ``floor_ms`` has the time to read the weights of one token by quantization, where the rate was
    measured: no token takes less. Of a GGUF file, and of others on a GPU, such weights lie ``unpacked`` in host memory,
    all of them, before they are packed again; ``packed`` is the size on disk of a checkpoint, no GGUF file, that has
    them, else 0. Where a model is in use, ``stored`` is set, and what that holds counts as free. ``given`` are the
    options, by name, that were not left to kvchat and that the plan depends on. Of a model over several GPUs
    ``elsewhere`` has, by quantization, the bytes of weights on each beside the device, and ``others_free`` what is free
    on them.
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
        """Bytes of the weights that lie on the device."""
        return self.weights[quantize] - sum(self.elsewhere.get(quantize, {}).values())


@dataclass(frozen=True)
class Planned:
    """The memory that loading ``model`` would take; None with the reason in ``refusal``."""

    model: str
    plan: MemoryPlan | None
    refusal: str = ""


@dataclass(frozen=True)
class ServerFigures:
    """A server's own figures, of all its users since it was started; None where it does not tell.

    ``kind`` is its program, ``place`` its host and port. Of the last answer here it read ``prompt_tokens``, of which
    ``reused_tokens`` were stored already. It has room for ``capacity`` tokens of K/V, of which ``used_share`` is taken.
    ``prefix_share`` of the tokens that were looked for among those stored were found, ``prefix_tokens`` of them.
    ``host_*`` is the same of K/V in host memory. ``drafts_share`` is the part of the drafted tokens that was accepted.
    ``missing`` says why there are no more figures.
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


# One letter a ribbon cell: the state of most of its tokens; recalled wins over all others.
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
    """The KV manager's figures and what it did, read at most 10 times a second.

    ``active`` is the mean number of tokens the last step attended to over layers and KV heads; ``is_prompt`` where that
    was a prompt's, which attends to everything in every mode. ``ribbon`` is one letter
    of ``RIBBON`` per cell of ``cell_tokens`` stored tokens, ``attended`` one digit 0-9 per cell: the share of its
    (layer, head, token) triples that the last step read. ``coverage`` is that of the current answer, as in ``Stats``.
    ``recall_ms_*`` are percentiles of the copies of an answer's last 256 steps, ``exposed_ms_*`` of the time waited for
    them, ``recall_bytes_per_s`` is the rate since the last snapshot. ``extras`` are figures of the current mode only,
    in display order. ``kv_parked_bytes`` are those of other conversations in host memory. ``state_bytes`` and
    ``snapshot_bytes`` are those of the recurrent state and its snapshots, which the K/V's bytes hold too. ``preamble``
    are the tokens of the system prompt, ``pins`` those of pinned messages that are read beyond the budget. There is
    room for ``device_room`` tokens on the device, in the host pool for ``exact_room`` in exact and ``rounded_room`` in
    8-bit pages. ``process_bytes`` is the engine's memory on the host. ``prices`` are the other modes'. ``badges`` warn
    of how the engine runs: a few words, a colon, the reason. ``server`` is set where a server has the model, and what
    is read and held is not known. Where kvchat chooses the mode,
    ``auto`` says why this one. ``elsewhere`` are the weights' bytes on GPUs beside the one with the K/V, ``other_gpus``
    the readings of those.
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
