"""Commands and events between the application and the engine: plain frozen data, sent by ``protocol.wire``.

Commands go to the engine's stdin, events come from its stdout. Each ``Chat`` sends its whole conversation.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from kvchat.errors import UsageError
from kvchat.paths import BUNDLED
from kvchat.protocol.figures import Count, Params, Planned, Run, Snapshot, Stats

Quantize = Literal["auto", "none", "int8", "int4", "nf4"]  # of weights; auto keeps those of packed files about as small
Split = Literal["layers", "heads"]  # what each of several GPUs gets: some layers, or some heads of every layer
HostDtype = Literal["model", "int8"]  # of full pages in the host pool: the model's number format, or 8 bits
TEMPERATURE = 0.7  # for models that recommend none
MAX_VARIANTS = 8
MAX_LOGPROBS = 20
MAX_NEEDLE_TOKENS = 10_000_000
SEEDS = 2**31
# Edges between the bins of the recall histogram; the first bin is below the first edge.
RECALL_EDGES_MS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
Heads = tuple[tuple[Count, ...], ...]  # a number for each KV head of each layer
Milliseconds = Annotated[float, Field(ge=0)]
MAX_PACE = 64.0
RESERVED = frozenset({"messages", "documents", "add_generation_prompt"})  # variables that every template gets


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        role: system, user, assistant, or tool for a tool's result. A single turn with the role text is a prompt without
            the chat template, in which control tokens are recognized.
        pinned: True if every mode reads it.
        at: when it was written, in seconds since the epoch, 0 if unknown; chat templates get the first turn's time.
        thought: the tag that ends the thought before an answer, "" without one.
        more: further fields for the chat template as a JSON object, "" for none: a thought beside the text, tool
            calls, or the id of the call that is answered.
    """

    role: str
    content: str
    pinned: bool = False
    at: float = field(default=0.0, compare=False)
    thought: str = field(default="", compare=False)
    more: str = ""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; temperature 0 is greedy, None the model's own."""

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

    def seeded(self) -> Sampling:
        """Return this sampling with a seed, random if it has none, so that all variants use the same random numbers."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(SEEDS))


@dataclass(frozen=True)
class Keeping:
    """Limits for other conversations' K/V: ``parked_bytes`` in RAM, ``saved_bytes`` in ``folder``; 0 stores none."""

    parked_bytes: Count = 0
    saved_bytes: Count = 0
    folder: str = ""


@dataclass(frozen=True)
class Load:
    """Load a model in place of the current one; answered by ``Loading``* and ``Loaded``, or ``Failed``.

    ``Stop`` cancels it. The current model stays until the new one is ready, or is loaded again after a failure; its
    ``Loaded`` then follows, unless the failure is fatal.

    Attributes:
        given: values set at run time, by mode; a budget overrides every mode's, other values only that mode's.
        mode_params: the settings of each mode and of auto.
        force: load a model even if it does not fit.
        link_bytes_per_s: the measured rate of recall; ``read_bytes_per_s``: of reading the device's memory.
        chat_template: a file that replaces the model's own; ``template_args`` are its variables as ``KEY=VALUE``.
        gpus: how many GPUs share the weights, by ``split``.
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
    """Plan the memory of ``load`` for ``context`` tokens (None: the model's context); answered by ``Planned``."""

    load: Load
    context: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class Variant:
    """A mode with parameters that override the settings."""

    mode: str
    params: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """Answer the last turn; answered by ``Started``, ``Text``* and ``Finished``, or ``Failed``.

    Attributes:
        turns: end with a user turn, or with an assistant turn to continue.
        conversation: its id; "" if its K/V are neither parked nor saved, None for the stored conversation that the
            turns continue, or a new one.
        variant: the mode to answer in; None keeps the current one.
        template_args: as in ``SetTemplateArgs``; None keeps the current ones.
        is_final: send text only when recovery can no longer withdraw it.
        json_schema: a JSON schema that the answer must match, "" for none.
        must_call: names of tools in ``template_args``; the answer must be one call of one of them.
        top_logprobs: send each token's score and those of this many likeliest tokens; None for no scores.
    """

    turns: tuple[Turn, ...]
    sampling: Sampling = Sampling()
    conversation: str | None = ""
    variant: Variant | None = None
    template_args: tuple[str, ...] | None = None
    is_final: bool = False
    json_schema: str = ""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    must_call: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tokenize:
    """Tokenize the prompt that ``Chat`` would prefill for these turns; answered by ``Tokenized``, or ``Failed``."""

    turns: tuple[Turn, ...]
    template_args: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Resume:
    """Make ``conversation`` the current one; answered by ``Noted``*, and ``Resumed`` if some of its K/V are restored.

    Its pinned turns that are stored are read from then on, even if it already is the current one. Without turns it is
    new.
    """

    conversation: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Forget:
    """Drop the K/V of a conversation that was deleted; not answered."""

    conversation: str


@dataclass(frozen=True)
class Stop:
    """Stop generating after the current token; ``Finished`` follows with reason ``stopped``."""


@dataclass(frozen=True)
class Switch:
    """Change the KV mode or its parameters between two tokens; answered by ``Switched`` or ``SwitchRefused``.

    An empty ``mode`` keeps the mode and changes only ``params``; other parameters keep their values.
    """

    mode: str = ""
    params: Params = field(default_factory=dict)


@dataclass(frozen=True)
class KeepPages:
    """Store pages of K/V that fill up from now on in ``host_dtype``, also during an answer; answered by ``Noted``."""

    host_dtype: HostDtype


@dataclass(frozen=True)
class SetTemplateArgs:
    """Render conversations with these variables of the chat template, ``KEY=VALUE``; answered by ``Noted``."""

    args: tuple[str, ...]


@dataclass(frozen=True)
class Rebuild:
    """Recompute exactly the K/V computed with reduced context; answered by ``Prefilled``* and ``Rebuilt``."""


@dataclass(frozen=True)
class Compare:
    """Answer the last turn once in each of ``variants``, from the same K/V and with the same random numbers.

    Answered by ``Started``, ``Prefilled``*, ``Comparing``* and ``Compared``, or ``Failed``; afterwards the stored
    tokens, the mode and its parameters are as before. The turns may differ from the stored ones.
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
    """The model is ready.

    Attributes:
        weights: their quantization, "" without one.
        fast: the kinds of fused modules, "" for none.
        template_variables: names that its chat template uses.
        server: the program that runs the model if it is not kvchat; it then decides which K/V are read.
        offers: what that program can do with K/V, in sentences.
        auto: as in ``Switched``.
        takes_variables: True if variables of the chat template can be set.
        calls: transformers' response template as JSON, which says how the model calls tools; "" if its chat template
            has none or it is unknown.
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
    """K/V of ``tokens`` tokens of a conversation were restored from ``where`` (memory or disk) in ``seconds``.

    ``where`` is empty if the conversation already was the current one.
    """

    conversation: str
    tokens: Count
    seconds: float
    where: str


@dataclass(frozen=True)
class Noted:
    """A line for the user to read; work continues."""

    text: str


@dataclass(frozen=True)
class Started:
    """Prefill begins; ``reused_tokens`` of ``prompt_tokens`` were stored. Both are 0 until a server counts them.

    If the prompt ends inside a thought, ``thought`` is the tag that ends it, else "". ``tags`` are the model's own tags
    that begin a thought.
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
    """``mode`` is prepared, which takes long: the model is measured for it, or, on a GPU, its graph is captured."""

    mode: str


@dataclass(frozen=True)
class Score:
    """A token of an answer with its log-probability, and the likeliest tokens in its place with theirs.

    The probabilities are the model's own, before temperature and penalties.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Text:
    """Text decoded since the last ``Text`` (at most 30 per second), from ``tokens`` tokens; ``scores`` if requested."""

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
    """Recovery withdrew the last ``chars`` characters of the answer's text, from ``tokens`` tokens."""

    chars: Count
    tokens: Count


@dataclass(frozen=True)
class Finished:
    """The answer ended; ``reason`` is eos, stop, length, context, or stopped. ``text`` is all of it."""

    reason: str
    text: str
    stats: Stats


@dataclass(frozen=True)
class Switched:
    """The mode changed between two tokens; no stored byte changed. ``moved_bytes`` went to the device in ``seconds``.

    ``reduced_tokens`` counts the stored tokens whose K/V were computed with reduced context. ``params`` are the
    effective parameters; ``given`` are those set at run time so far, as in ``Load``. If kvchat chooses the mode,
    ``auto`` says in one line which mode and why.
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
    """The mode cannot be entered; the session stays in ``mode``. ``message`` has the numbers."""

    mode: str
    message: str


@dataclass(frozen=True)
class Rebuilt:
    """``tokens`` stored tokens were recomputed in ``seconds``; ``reduced_tokens`` remain if it was stopped."""

    tokens: Count
    seconds: float
    reduced_tokens: Count = 0


@dataclass(frozen=True)
class NeedleHidden:
    """A needle test: ``turns`` end with the question; a right answer contains ``fact`` within ``tokens`` tokens."""

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
    """A command failed; stored tokens stay. ``kind`` is the error's class; ``fatal`` means that no model is loaded.

    ``tokens`` is the length of a prompt that does not fit, else 0. ``aside`` means that the answer, comparison, rebuild
    or load that is in progress continues.
    """

    title: str
    detail: str = ""
    hint: str = ""
    kind: str = "EngineError"
    fatal: bool = False
    tokens: Count = 0
    aside: bool = False


@dataclass(frozen=True)
class Watch:
    """Send ``Details`` now and with every snapshot, or stop sending them."""

    details: bool


InAnswer = Stop | Switch | KeepPages | Peek | Watch  # executed between two tokens


@dataclass(frozen=True)
class HideNeedle:
    """Make a conversation of about ``tokens`` tokens that asks for an early fact; answered by ``NeedleHidden``."""

    tokens: Annotated[int, Field(ge=1, le=MAX_NEEDLE_TOKENS)]
    seed: Count


@dataclass(frozen=True)
class Pace:
    """Play a recording at ``speed`` times its own speed; 0 pauses. Other engines ignore it."""

    speed: Annotated[float, Field(ge=0, le=MAX_PACE)]


Command = (
    Load | Plan | Chat | Tokenize | Resume | Forget | SetTemplateArgs | Rebuild | Compare | HideNeedle | Pace | InAnswer
)
AnswerEvent = Started | Prefilled | Preparing | Text | Recovered | Withdrawn | Finished


@dataclass(frozen=True)
class RecallBin:
    """``steps`` whose recall took this long, and their total milliseconds hidden and exposed."""

    steps: Count = 0
    hidden_ms: Milliseconds = 0.0
    exposed_ms: Milliseconds = 0.0


@dataclass(frozen=True)
class Details:
    """Token counts by layer and KV head, of ``total`` stored tokens, and a histogram of recall in the last 256 steps.

    ``read`` counts the tokens that the last step read, ``held`` those in slots. ``recall`` has one more bin than
    ``RECALL_EDGES_MS``, or none if nothing was recalled. ``pcie_*`` are bytes per second from NVML, None without it.
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
    """The variant ``index`` has generated ``text``, of ``tokens`` tokens, so far.

    ``checked`` counts the tokens of the first answer that were since fed to it, to compare their predictions.
    """

    index: Count
    text: str
    tokens: Count
    checked: Count = 0


@dataclass(frozen=True)
class Compared:
    """The comparison ended: one run for each variant, in order; fewer if it was stopped."""

    runs: tuple[Run, ...]
    prompt_tokens: Count = 0


@dataclass(frozen=True)
class Asked:
    """The next question of a recording; its answer follows. The application shows it as if the user had asked it."""

    text: str


@dataclass(frozen=True)
class Replayed:
    """The recording, ``seconds`` long, ended."""

    seconds: float


Event = Loading | Loaded | AnswerEvent | Comparing | Compared | NeedleHidden | Tokenized | Asked | Replayed | Report


def parse_args(args: Iterable[str]) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` arguments: a value is JSON (``true``, ``3``, ``["a"]``), True or False, else text.

    Raises:
        UsageError: an argument has another form, or names a variable of ``RESERVED``.
    """
    variables = {}
    for text in args:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f'"{text[:100]}" is not a template variable.', hint="Write it as enable_thinking=false.")
        if name in RESERVED:
            raise UsageError(f"{name} is set by kvchat.", hint="Choose another name.")
        variables[name] = _value(value)
    return variables


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
