"""Commands and events between the application and the engine: plain frozen data. ``protocol.wire`` sends them.

Commands go to the engine's stdin, events come from its stdout. The engine keeps no conversation: each ``Chat`` has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from kvchat.errors import UsageError
from kvchat.paths import BUNDLED
from kvchat.protocol.figures import Count, Params, Planned, Run, Snapshot, Stats

Quantize = Literal["auto", "none", "int8", "int4", "nf4"]  # what weights are kept in; auto: small files stay small
Split = Literal["layers", "heads"]  # what several GPUs have each: some layers, or some heads of every layer
HostDtype = Literal["model", "int8"]  # what full pages of the host pool are kept in: the model's own, or 8 bits
TEMPERATURE = 0.7  # of a model that names none
MAX_VARIANTS = 8
MAX_LOGPROBS = 20
MAX_NEEDLE_TOKENS = 10_000_000
# Milliseconds that separate the bins of the recall histogram; the first bin is below the first of them.
RECALL_EDGES_MS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
Heads = tuple[tuple[Count, ...], ...]  # a number for each KV head of each layer
Milliseconds = Annotated[float, Field(ge=0)]
MAX_PACE = 64.0
GIVEN = frozenset({"messages", "documents", "add_generation_prompt"})  # to every template


@dataclass(frozen=True)
class Turn:
    """One message; ``role`` is system, user, assistant or tool. Every mode attends to a ``pinned`` one.

    One of the role tool has what a tool gave. ``more`` is a JSON object, empty for none, of what a chat template is
    given of the message beside its role and content: the calls of tools, and which of them is answered.
    One alone of the role text is a prompt as it is, without the chat template: control tokens in it are such.
    ``at`` is when it was written, in seconds since the epoch, 0 where nobody knows: a chat template is told the time at
    which its conversation began. ``thought`` is the tag that ends the thought before an answer, empty without one.
    """

    role: str
    content: str
    pinned: bool = False
    at: float = field(default=0.0, compare=False)
    thought: str = field(default="", compare=False)
    more: str = ""


@dataclass(frozen=True)
class Sampling:
    """The way the next token is drawn; temperature 0 is greedy, None the model's own."""

    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 512


@dataclass(frozen=True)
class Keeping:
    """Rooms for K/V of conversations: ``parked_bytes`` in host memory, ``saved_bytes`` in ``folder``; 0 for none."""

    parked_bytes: Count = 0
    saved_bytes: Count = 0
    folder: str = ""


@dataclass(frozen=True)
class Load:
    """Load a model in place of the one in use; answered by ``Loading``* and ``Loaded``, or ``Failed``.

    ``Stop`` gives it up. The model in use stays until the other is ready, or is loaded again after a failure; after one
    that is not fatal its ``Loaded`` comes. ``force`` loads also what does not fit. ``mode_params`` are the settings of
    each mode and of auto, ``given`` values given at run time by the mode: the budget overrides that of every mode,
    others that of one. ``link_bytes_per_s`` and ``read_bytes_per_s`` are the measured rates of recall and of the
    device's memory. With several ``gpus`` layers lie on those beside the device too; where heads are
    ``split`` each has a part of every layer. ``chat_template`` is a file in place of the model's own, ``template_args``
    are its variables as ``KEY=VALUE``.
    """

    model: str = BUNDLED
    device: str = "auto"
    dtype: str = "auto"
    mode: str = "full"
    given: dict[str, Params] = field(default_factory=dict)
    mode_params: dict[str, Params] = field(default_factory=dict)
    quantize: str = "auto"
    fast: bool = True
    force: bool = False
    link_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    read_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    keeping: Keeping = Keeping()
    host_dtype: HostDtype = "model"
    chat_template: str = ""
    template_args: tuple[str, ...] = ()
    gpus: Annotated[int, Field(ge=1)] = 1
    split: Split = "layers"


@dataclass(frozen=True)
class Plan:
    """Ask what ``load`` would take for ``context`` tokens (None: all the model reads); answered by ``Planned``."""

    load: Load
    context: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class Variant:
    """A mode with parameters that count before those of the settings."""

    mode: str
    params: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """Answer the last turn; answered by ``Started``, ``Text``* and ``Finished``, or ``Failed``.

    ``turns`` ends with a user turn, or with an assistant turn that is to be continued. ``conversation`` is its id,
    empty for one whose K/V are not kept, None for the stored one that the turns go on with or else a new one. It is
    answered in ``variant`` and with ``template_args``, as ``SetTemplateArgs`` has them; None leaves what is in force.
    ``is_final``: text comes when recovery can no longer take it back. What is said is held to ``json_schema``, a text.
    With ``top_logprobs`` each ``Text`` has scores, of so many of the likeliest tokens beside that which was drawn.
    """

    turns: tuple[Turn, ...]
    sampling: Sampling = Sampling()
    conversation: str | None = ""
    variant: Variant | None = None
    template_args: tuple[str, ...] | None = None
    is_final: bool = False
    json_schema: str = ""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


@dataclass(frozen=True)
class Tokenize:
    """Ask for the ids of a prompt with these turns, as ``Chat`` reads it; answered by ``Tokenized``, or ``Failed``."""

    turns: tuple[Turn, ...]
    template_args: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Resume:
    """Go over to another conversation; answered by ``Noted``* and ``Resumed``, or by nothing where none is kept.

    What of it is stored and pinned is attended from then on, also in the current conversation. Without turns it is new.
    """

    conversation: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Forget:
    """A conversation was deleted: keep nothing of it; answered by nothing."""

    conversation: str


@dataclass(frozen=True)
class Stop:
    """Stop generating after the current token; ``Finished`` follows with reason ``stopped``."""


@dataclass(frozen=True)
class Switch:
    """Change the KV mode or its parameters between two tokens; answered by ``Switched`` or ``SwitchRefused``.

    An empty ``mode`` keeps the mode and changes only ``params``; parameters not named keep their value.
    """

    mode: str = ""
    params: Params = field(default_factory=dict)


@dataclass(frozen=True)
class KeepPages:
    """Keep pages of K/V that get full from now on in ``host_dtype``, also during an answer; answered by ``Noted``."""

    host_dtype: HostDtype


@dataclass(frozen=True)
class SetTemplateArgs:
    """Render conversations with these variables of the chat template, ``KEY=VALUE``; answered by ``Noted``."""

    args: tuple[str, ...]


@dataclass(frozen=True)
class Rebuild:
    """Recompute exactly what was computed with less context; answered by ``Prefilled``* and ``Rebuilt``."""


@dataclass(frozen=True)
class Compare:
    """Answer the last turn once in each of ``variants``, from the same K/V and with the same random numbers.

    Answered by ``Started``, ``Prefilled``*, ``Comparing``* and ``Compared``, or ``Failed``; afterwards what is stored,
    the mode and its parameters are as before. The turns need not be those that are stored.
    """

    turns: tuple[Turn, ...]
    variants: Annotated[tuple[Variant, ...], Field(min_length=1, max_length=MAX_VARIANTS)]
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class Peek:
    """Ask for the text of the stored tokens ``start`` to ``end``; answered by ``Peeked``."""

    start: Count
    end: Count


@dataclass(frozen=True)
class Loading:
    """Progress of a load; ``stage`` names the current work."""

    stage: str


@dataclass(frozen=True)
class Loaded:
    """The model is ready. ``context`` is in tokens, ``kv_bytes_per_token`` counts all layers.

    ``weights`` names how they are quantized and ``fast`` the kinds of modules that are fused, empty for none.
    ``temperature`` is the model's own. ``template_variables`` are names that its chat template looks at. ``server`` is
    the program that has the model where that is another one: it decides what is read, and ``offers`` says how.
    ``takes_variables``: those of a chat template can be set. ``calls`` says how the model calls tools: transformers'
    response template as JSON, empty where its chat template knows none or that is not known.
    ``auto`` is that of ``Switched``.
    """

    model: str
    architecture: str
    parameters: Count
    device: str
    dtype: str
    context: Count
    layers: Count
    kv_heads: Count
    page: Count
    kv_bytes_per_token: Count
    mode: str
    params: Params
    notes: tuple[str, ...] = ()
    weights: str = ""
    fast: str = ""
    temperature: float = TEMPERATURE
    template_variables: tuple[str, ...] = ()
    server: str = ""
    offers: str = ""
    auto: str = ""
    takes_variables: bool = True
    calls: str = ""


@dataclass(frozen=True)
class Resumed:
    """``tokens`` of a conversation came back from ``where`` (memory or disk) in ``seconds``, not to be read again."""

    conversation: str
    tokens: Count
    seconds: float
    where: str


@dataclass(frozen=True)
class Noted:
    """Something that a person should know and that stops nothing, in a line."""

    text: str


@dataclass(frozen=True)
class Started:
    """Prefill begins: ``prompt_tokens`` in all, of which ``reused_tokens`` were stored already.

    Both are 0 where a server has not counted yet.
    ``thought`` is the tag that ends the thought that the end of the prompt begins, empty where it begins none, and
    ``tags`` are those that the model's template knows for the beginning of one.
    """

    prompt_tokens: Count
    reused_tokens: Count
    thought: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prefilled:
    """Progress of the prefill in tokens."""

    done: Count
    total: Count


@dataclass(frozen=True)
class Preparing:
    """The first steps in ``mode`` on a GPU take long: its kernels are compiled, its graph is captured."""

    mode: str


@dataclass(frozen=True)
class Score:
    """A token of an answer, and the logarithms of its probability and of those of the likeliest tokens there.

    They are the model's own: what temperature, penalties and the like change of them does not count.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Text:
    """Text decoded since the last such event (at most 30 a second), from ``tokens`` tokens; ``scores`` if asked for."""

    text: str
    tokens: Count
    scores: tuple[Score, ...] = ()

    def __add__(self, other: Text) -> Text:
        return Text(self.text + other.text, self.tokens + other.tokens, self.scores + other.scores)


@dataclass(frozen=True)
class Recovered:
    """Recovery acted at ``at`` stored tokens; ``level`` is SR, WR, FR or RR; ``Withdrawn`` follows RR.

    ``signal`` is entropy or log-prob (``value`` in standard deviations) or repetition (``value`` times).
    """

    level: str
    signal: str
    value: float
    at: Count


@dataclass(frozen=True)
class Withdrawn:
    """The last ``chars`` characters of the answer's text, from ``tokens`` tokens, are taken back."""

    chars: Count
    tokens: Count


@dataclass(frozen=True)
class Finished:
    """The answer is over; ``reason`` is eos, stop, length, context, or stopped. ``text`` is all that stays of it."""

    reason: str
    text: str
    stats: Stats


@dataclass(frozen=True)
class Switched:
    """The mode changed between two tokens; no stored byte changed. ``moved_bytes`` went to the device in ``seconds``.

    ``reduced_tokens`` counts the stored tokens whose K/V were computed while a mode attended to less than everything.
    ``params`` are in force, with what kvchat chose; ``given`` is what was given at run time so far, as in ``Load``.
    Where kvchat chooses the mode, ``auto`` says in a line what and why.
    """

    before: str
    mode: str
    params: Params
    total: Count
    moved_bytes: Count
    seconds: float
    reduced_tokens: Count = 0
    given: dict[str, Params] = field(default_factory=dict)
    auto: str = ""


@dataclass(frozen=True)
class SwitchRefused:
    """The mode cannot be entered; the session goes on in ``mode``. ``message`` carries the numbers."""

    mode: str
    message: str


@dataclass(frozen=True)
class Rebuilt:
    """``tokens`` stored tokens were recomputed in ``seconds``; ``reduced_tokens`` are left if it was stopped."""

    tokens: Count
    seconds: float
    reduced_tokens: Count = 0


@dataclass(frozen=True)
class NeedleHidden:
    """``turns`` end with the question; a right answer has ``fact`` in it and takes at most ``tokens`` tokens."""

    turns: tuple[Turn, ...]
    fact: str
    tokens: Count


@dataclass(frozen=True)
class Tokenized:
    """The ids of a prompt."""

    ids: tuple[Count, ...]


@dataclass(frozen=True)
class Peeked:
    """The text of stored tokens ``start`` to ``end``."""

    start: Count
    end: Count
    text: str


@dataclass(frozen=True)
class Failed:
    """A command failed; what is stored is kept. ``kind`` is the error's class, ``fatal``: no model is loaded now.

    A prompt that does not fit has so many ``tokens``.
    """

    title: str
    detail: str = ""
    hint: str = ""
    kind: str = "EngineError"
    fatal: bool = False
    tokens: Count = 0


@dataclass(frozen=True)
class Watch:
    """Send ``Details`` at once and beside the snapshots from now on, or no more."""

    details: bool


InAnswer = Stop | Switch | KeepPages | Peek | Watch  # done between two tokens


@dataclass(frozen=True)
class HideNeedle:
    """Make a conversation of about ``tokens`` tokens that asks for a fact told early; ``NeedleHidden`` brings it."""

    tokens: Annotated[int, Field(ge=1, le=MAX_NEEDLE_TOKENS)]
    seed: Count


@dataclass(frozen=True)
class Pace:
    """Play a recording so many times as fast as it was recorded; 0 pauses. Other engines do nothing."""

    speed: Annotated[float, Field(ge=0, le=MAX_PACE)]


Command = (
    Load | Plan | Chat | Tokenize | Resume | Forget | SetTemplateArgs | Rebuild | Compare | HideNeedle | Pace | InAnswer
)
AnswerEvent = Started | Prefilled | Preparing | Text | Recovered | Withdrawn | Finished


@dataclass(frozen=True)
class RecallBin:
    """``steps`` took this long to recall: milliseconds, all together, that work hid and that the model waited."""

    steps: Count = 0
    hidden_ms: Milliseconds = 0.0
    exposed_ms: Milliseconds = 0.0


@dataclass(frozen=True)
class Details:
    """Tokens by layer and KV head, of ``total`` that are stored, and the recall of the last 256 steps by its time.

    ``read`` are those that the last token's attention read, ``held`` those in slots. ``recall`` has a bin more than
    ``RECALL_EDGES_MS``, or none where nothing was recalled. ``pcie_*`` are bytes per second by NVML, None without it.
    """

    total: Count
    read: Heads = ()
    held: Heads = ()
    recall: tuple[RecallBin, ...] = ()
    pcie_to_device: Count | None = None
    pcie_to_host: Count | None = None


Report = Switched | SwitchRefused | Rebuilt | Peeked | Planned | Snapshot | Details | Resumed | Noted | Failed


@dataclass(frozen=True)
class Comparing:
    """``text`` of ``tokens`` tokens is what the variant ``index`` has answered so far.

    ``checked`` counts the first answer's tokens that it has been given since, to compare what it makes of each.
    """

    index: Count
    text: str
    tokens: Count
    checked: Count = 0


@dataclass(frozen=True)
class Compared:
    """The comparison is over: a run for each variant, in order; fewer where it was stopped."""

    runs: tuple[Run, ...]
    prompt_tokens: Count = 0


@dataclass(frozen=True)
class Asked:
    """Of a recording: this was asked, and what follows is the answer. The application sends it as its own question."""

    text: str


@dataclass(frozen=True)
class Replayed:
    """The recording, ``seconds`` long, is over."""

    seconds: float


Event = Loading | Loaded | AnswerEvent | Comparing | Compared | NeedleHidden | Tokenized | Asked | Replayed | Report


def parse_args(args: Iterable[str]) -> dict[str, Any]:
    """The variables of ``KEY=VALUE``: a value is JSON (``true``, ``3``, ``["a"]``), True or False, else text.

    Raises:
        UsageError: one is not written so, or is given to every template by kvchat.
    """
    variables = {}
    for text in args:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f'"{text[:100]}" is not a template variable.', hint="Write it as enable_thinking=false.")
        if name in GIVEN:
            raise UsageError(f"{name} is set by kvchat.", hint="Choose another name.")
        variables[name] = _value(value)
    return variables


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
