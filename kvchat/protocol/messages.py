"""Commands and events between the application and the engine: plain frozen data, a leaf.

On the wire a message is a 4-byte big-endian length and that many bytes of UTF-8 JSON, an object
with the class name under ``"type"`` and the fields beside it. Commands go to the engine's stdin,
events come from its stdout. The engine keeps no conversation: each ``Chat`` carries all of it, and
the engine reuses the longest prefix it has already stored.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import types
import typing
from dataclasses import dataclass, field
from typing import Any, BinaryIO

Params = dict[str, Any]
MAX_MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Turn:
    """One message of the conversation; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 is greedy."""

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 512


# ---- commands: application -> engine ---------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Load a model; answered by ``Loading``* and ``Loaded``, or ``Failed``.

    ``mode_params`` are the settings of each mode. ``given`` are values given at run time, by the mode they were given
    for; they override the settings: budget, sink and window in every mode, the others in that mode only.
    """

    model: str = "bundled"
    device: str = "auto"
    dtype: str = "auto"
    mode: str = "full"
    given: dict[str, Params] = field(default_factory=dict)
    mode_params: dict[str, Params] = field(default_factory=dict)
    quantize: str = "none"
    fast: bool = True


@dataclass(frozen=True)
class Chat:
    """Answer the last turn; answered by ``Started``, ``Text``* and ``Finished``, or ``Failed``.

    ``turns`` ends with a user turn, or with an assistant turn that is to be continued.
    """

    turns: tuple[Turn, ...]
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class Stop:
    """Stop generating after the token in hand; ``Finished`` follows with reason ``stopped``."""


@dataclass(frozen=True)
class Switch:
    """Change the KV mode or its parameters between two tokens; answered by ``Switched`` or ``SwitchRefused``.

    An empty ``mode`` keeps the mode and changes only ``params``; parameters not named keep their value.
    """

    mode: str = ""
    params: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Rebuild:
    """Compute anew, exactly, what was computed with less context; answered by ``Prefilled``* and ``Rebuilt``."""


@dataclass(frozen=True)
class Peek:
    """Ask for the text of the stored tokens ``start`` to ``end``; answered by ``Peeked``."""

    start: int
    end: int


# ---- events: engine -> application -----------------------------------------------------------------


@dataclass(frozen=True)
class Loading:
    """Progress of a load: what is being done now."""

    stage: str


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of a mode as a person sees it; ``default`` None means chosen by kvchat."""

    name: str
    default: int | float | str | bool | None
    doc: str


@dataclass(frozen=True)
class ModeInfo:
    """One KV mode; ``available`` is False for a mode that is not built yet."""

    name: str
    title: str
    available: bool
    params: tuple[ParamInfo, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """The model is ready. ``context`` is in tokens, ``kv_bytes_per_token`` counts all layers.

    ``weights`` names how they are quantized and ``fast`` the kinds of modules that are fused, empty for none.
    """

    model: str
    architecture: str
    parameters: int
    device: str
    dtype: str
    context: int
    layers: int
    kv_heads: int
    page: int
    kv_bytes_per_token: int
    mode: str
    params: Params
    notes: tuple[str, ...] = ()
    weights: str = ""
    fast: str = ""


@dataclass(frozen=True)
class Started:
    """Prefill begins: ``prompt_tokens`` in all, of which ``reused_tokens`` were stored already."""

    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class Prefilled:
    """Progress of the prefill in tokens."""

    done: int
    total: int


@dataclass(frozen=True)
class Preparing:
    """The first steps in ``mode`` on a GPU take long: its kernels are compiled, its graph is captured."""

    mode: str


@dataclass(frozen=True)
class Text:
    """Text decoded since the last such event (at most 30 a second), from ``tokens`` tokens."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Recovered:
    """Recovery acted at ``at`` stored tokens; ``level`` is SR, WR, FR or RR; ``Withdrawn`` follows RR.

    ``signal`` is entropy or log-prob (``value`` in standard deviations) or repetition (``value`` times).
    """

    level: str
    signal: str
    value: float
    at: int


@dataclass(frozen=True)
class Withdrawn:
    """The last ``chars`` characters of the answer's text, from ``tokens`` tokens, are taken back."""

    chars: int
    tokens: int


@dataclass(frozen=True)
class Stats:
    """What one answer cost. Seconds, bytes and counts; None where there was nothing to measure."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    total_tokens: int = 0
    active_tokens: float | None = None
    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    kv_device_bytes: int = 0
    kv_host_bytes: int = 0
    recalled_bytes: int = 0
    recall_hit_rate: float | None = None
    corrections: int = 0
    recoveries: int = 0
    withdrawn_tokens: int = 0
    switches: tuple[Params, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The answer is over; ``reason`` is eos, stop, length, context, or stopped. ``text`` is all that stays of it."""

    reason: str
    text: str
    stats: Stats


@dataclass(frozen=True)
class Switched:
    """The mode changed between two tokens; no stored byte changed.

    ``moved_bytes`` went from host to device in ``seconds``; ``reduced_tokens`` counts the stored tokens whose
    K/V were computed while a mode attended to less than everything.
    """

    before: str
    mode: str
    params: Params
    total: int
    moved_bytes: int
    seconds: float
    reduced_tokens: int = 0


@dataclass(frozen=True)
class SwitchRefused:
    """The mode cannot be entered; the session goes on in ``mode``. ``message`` carries the numbers."""

    mode: str
    message: str


@dataclass(frozen=True)
class Rebuilt:
    """``tokens`` stored tokens were computed anew in ``seconds``; ``reduced_tokens`` are left if it was stopped."""

    tokens: int
    seconds: float
    reduced_tokens: int = 0


@dataclass(frozen=True)
class Price:
    """What entering ``mode`` would cost now: ``moved_bytes`` from host to device, its ``device_bytes`` afterwards.

    ``seconds`` is an estimate from what was moved so far; ``refusal`` says why the mode cannot be entered.
    """

    mode: str
    moved_bytes: int = 0
    device_bytes: int = 0
    seconds: float | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Peeked:
    """The text of stored tokens ``start`` to ``end``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Gpu:
    """One NVML reading in bytes, percent, degrees and watts; a missing reading is None and drawn ``n/a``."""

    name: str
    used: int | None = None
    total: int | None = None
    process: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    power: float | None = None


# One letter a ribbon cell; a cell's letter is the state of most of its tokens, recalled wins over all.
RIBBON = {
    "S": "sink",
    "W": "window",
    "D": "on the device",
    "R": "recalled just now",
    "H": "on the host",
    "F": "frozen",
    "X": "out of reach",
}
MAX_RIBBON_CELLS = 1024


@dataclass(frozen=True)
class Snapshot:
    """What the KV manager holds and did, read at most 10 times a second.

    ``active`` is the mean number of tokens the last step attended to over layers and KV heads, ``total`` the tokens
    stored. ``ribbon`` is one letter of ``RIBBON`` per cell of ``cell_tokens`` stored tokens (at most
    ``MAX_RIBBON_CELLS``), ``attended`` one digit 0-9 per cell: the share of its (layer, head, token) triples that
    the last step read. ``recall_ms_*`` are percentiles over the last 256 steps. ``extras`` are numbers that only the
    mode at hand has, ready to be shown, in order. ``prices`` are those of the other modes. ``badges`` warn of how the
    engine runs: a few words, then a colon and the reason.
    """

    mode: str
    params: Params
    active: float
    total: int
    context: int
    kv_device_bytes: int
    kv_host_bytes: int
    weight_bytes: int = 0
    torch_allocated: int | None = None
    torch_reserved: int | None = None
    gpu: Gpu | None = None
    tokens_per_s: float | None = None
    ttft_s: float | None = None
    step_bytes: float = 0.0
    recalled_bytes: int = 0
    recall_hit_rate: float | None = None
    corrections: int = 0
    recall_ms_p50: float | None = None
    recall_ms_p95: float | None = None
    reduced_tokens: int = 0
    cell_tokens: int = 32
    ribbon: str = ""
    attended: str = ""
    extras: Params = field(default_factory=dict)
    prices: tuple[Price, ...] = ()
    badges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """Something asked for could not be done; the conversation and its stored K/V are kept.

    ``kind`` is the error class's name; ``fatal`` means that no model is loaded afterwards.
    """

    title: str
    detail: str = ""
    hint: str = ""
    kind: str = "EngineError"
    fatal: bool = False


Command = Load | Chat | Stop | Switch | Rebuild | Peek
Event = (
    Loading
    | Loaded
    | Started
    | Prefilled
    | Preparing
    | Text
    | Recovered
    | Withdrawn
    | Finished
    | Switched
    | SwitchRefused
    | Rebuilt
    | Peeked
    | Snapshot
    | Failed
)
Message = Command | Event
TYPES: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(Command) + typing.get_args(Event)}


# ---- the wire --------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """A message with its length prefix."""
    fields = {"type": type(message).__name__, **dataclasses.asdict(message)}
    body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return struct.pack(">I", len(body)) + body


def decode(body: bytes) -> Message:
    """The message in ``body`` (without its length prefix).

    Raises:
        ValueError: the bytes are no JSON object of a known type with known fields.
    """
    fields = json.loads(body)
    if not isinstance(fields, dict) or fields.get("type") not in TYPES:
        raise ValueError(f"no known message: {body[:80]!r}")
    return typing.cast("Message", _build(TYPES[fields.pop("type")], fields))


def read(stream: BinaryIO) -> Message | None:
    """The next message of a blocking stream, None at its end.

    Raises:
        ValueError: the stream does not speak the protocol.
    """
    header = stream.read(4)
    if len(header) < 4:
        return None
    length = parse_length(header)
    body = stream.read(length)
    return decode(body) if len(body) == length else None


def parse_length(header: bytes) -> int:
    """The length in a 4-byte prefix.

    Raises:
        ValueError: longer than ``MAX_MESSAGE_BYTES``, so the stream is something else.
    """
    length: int = struct.unpack(">I", header)[0]
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; the stream does not speak kvchat's protocol")
    return length


def _build(cls: type, fields: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {sorted(unknown)[0]!r}")
    try:
        return cls(**{name: _value(hints[name], value) for name, value in fields.items()})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from None


def _value(hint: Any, value: Any) -> Any:
    """JSON has lists and objects only: make tuples and nested dataclasses of them where the field says so."""
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        return tuple(_value(typing.get_args(hint)[0], item) for item in value)
    if isinstance(value, dict):
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        nested = next((option for option in options if dataclasses.is_dataclass(option)), None)
        return _build(typing.cast("type", nested), value) if nested else value
    return value
