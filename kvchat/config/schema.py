"""The settings: their sections and ranges. The ranges of sampling are defined only here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    field_validator,
)

from kvchat.config.modes import Params, choosable, mode_names
from kvchat.config.validation_errors import validated
from kvchat.errors import UsageError, check_known
from kvchat.files import unmarked
from kvchat.paths import of_hub
from kvchat.protocol.messages import HostDtype, Load, Quantize, Sampling, Split, parse_args

DEFAULTS = Sampling()
DEVICES = r"^(auto|cpu|cuda(:\d+)?)$"


class Section(BaseModel):
    """Base of all sections: frozen, and refuses unknown keys; the string below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)]


class ModelSettings(Section):
    """Fields of ``Load`` under the same name or their alias, except ``OF_APPLICATION``."""

    OF_APPLICATION: ClassVar = frozenset({"folders", "servers", "system"})

    name: Annotated[str, AfterValidator(of_hub)] = Field(Load.model, min_length=1, serialization_alias="model")
    """a name in `kvchat models`, a file or folder, a Hugging Face id or address, or a server's address"""
    device: str = Field(Load.device, pattern=DEVICES)
    """auto, cpu, cuda or cuda:N"""
    gpus: int = Field(Load.gpus, ge=1)
    """GPUs that a model too large for one is split over; the first is the device"""
    split: Split = Load.split
    """with several GPUs: layers (the first GPU has all K/V), or heads: each has a part of every layer and its K/V"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """number format of weights and K/V (auto: a GPU uses the model's own, a CPU the faster of that and float32)"""
    quantize: Quantize = "auto"
    """int8, int4 (on a GPU with torchao) or nf4 (bitsandbytes): weights in 8 or 4 bits; auto: about the files' size"""
    fast: bool = Load.fast
    """replace small parts of the model with faster ones, checked when it is loaded"""
    force: bool = Load.force
    """load a model even if its weights do not fit in free memory"""
    chat_template: str = ""
    """a chat template file to use instead of the model's own (Jinja, like chat_template.jinja)"""
    template_args: Texts = ()
    """variables of the chat template as KEY=VALUE, such as enable_thinking=false or reasoning_effort=low"""
    folders: Texts = ()
    """more model folders, besides the hub's cache, ~/models and those of Ollama, LM Studio and llama.cpp"""
    servers: Texts = ()
    """servers whose models are listed with the local ones, such as http://127.0.0.1:8000"""
    system: Annotated[str, AfterValidator(unmarked)] = ""
    """system prompt before every conversation; empty for none"""

    @field_validator("template_args")
    @classmethod
    def _as_variables(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        try:
            parse_args(args)
        except UsageError as error:
            raise ValueError(error.title.rstrip(".")) from None
        return args

    def of_load(self, only_set: bool = False) -> dict[str, Any]:
        """Return the fields of a ``Load``: all of them, or only those that were set."""
        return self.model_dump(by_alias=True, exclude=set(self.OF_APPLICATION), exclude_unset=only_set)


class KvSettings(Section):
    """``_kv_section`` adds the choices of ``mode`` and a section for each mode, from the registry."""

    mode: str = Load.mode
    host_dtype: HostDtype = Load.host_dtype
    """format of full K/V pages in RAM: model (exact), or int8 (half of bfloat16, a quarter of float32; nearly exact)"""
    parked_gib: float = Field(2.0, ge=0, le=2**20)
    """GiB of RAM for the K/V of other open conversations (instant switching); 0 for none"""
    saved_gib: float = Field(4.0, ge=0, le=2**20)
    """GiB of disk for saved K/V, so that reopened conversations need no prefill; 0 for none"""

    def params(self, mode: str) -> Params:
        """Return the parameters set for ``mode`` by any source; kvchat chooses the rest."""
        section = getattr(self, mode, None)
        return section.model_dump(exclude_unset=True) if section else {}


def _kv_section() -> type[KvSettings]:
    known: Any = Literal[tuple(choosable())]
    about = f"the KV mode to start in: {', '.join(mode_names())}, or auto, which chooses; `kvchat modes` lists more"
    mode = (known, Field(Load.mode, description=about))
    sections: dict[str, Any] = {
        name: (cls, Field(cls(), description=f"parameters of the {name} mode")) for name, cls in choosable().items()
    }
    return create_model("KvSettings", __base__=KvSettings, mode=mode, **sections)


if TYPE_CHECKING:
    KvSection: TypeAlias = KvSettings
else:
    KvSection = _kv_section()


class SamplingSettings(Section):
    temperature: float | None = Field(DEFAULTS.temperature, ge=0, le=100)
    """0 always takes the likeliest token; unset: the model's own, from generation_config.json, or else 0.7"""
    top_k: int = Field(DEFAULTS.top_k, ge=0)
    """draw among the k likeliest tokens; 0 for all"""
    top_p: float = Field(DEFAULTS.top_p, ge=0, le=1)
    """draw among the likeliest tokens that together have this probability, at least one"""
    min_p: float = Field(DEFAULTS.min_p, ge=0, lt=1)
    """draw among tokens at least this fraction as likely as the likeliest"""
    repetition_penalty: float = Field(DEFAULTS.repetition_penalty, ge=0.01, le=100)
    """over 1 makes tokens that already occurred less likely"""
    presence_penalty: float = Field(DEFAULTS.presence_penalty, ge=-2, le=2)
    """subtracted from the logit of each token that already occurs in the answer"""
    frequency_penalty: float = Field(DEFAULTS.frequency_penalty, ge=-2, le=2)
    """subtracted from the logit of a token once for each time it occurs in the answer"""
    seed: int | None = Field(DEFAULTS.seed, ge=0, le=2**63 - 1)
    """the same seed gives the same text; unset draws a new seed for each answer"""
    stop: Texts = DEFAULTS.stop
    """strings that end the answer"""
    max_new_tokens: int = Field(DEFAULTS.max_new_tokens, ge=1)
    """maximum length of an answer in tokens"""

    def sampling(self) -> Sampling:
        return Sampling(**self.model_dump())


def checked_sampling(sampling: Sampling, **changes: Any) -> Sampling:
    """Return ``sampling`` with ``changes``; numbers may be given as text.

    Raises:
        UsageError: a value is out of range; the message has its name and range.
    """
    return validated(SamplingSettings, {**vars(sampling), **changes}, "sampling").sampling()


def checked_model(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``Load`` for the model ``name`` and its settings ``options``, which may be text.

    Raises:
        UsageError: there is no such option, or a value is not valid.
    """
    known = [key for key in ModelSettings.model_fields if key not in ("name", *ModelSettings.OF_APPLICATION)]
    for option in options:
        check_known(option, known, "option of a model")
    return validated(ModelSettings, {"name": name, **options}, "model").of_load(only_set=True)


class UiSettings(Section):
    theme: str = "kvchat-dark"
    """name of a bundled theme, or of your own"""
    history: bool = True
    """save the prompt history between runs"""
    conversations: bool = True
    """save conversations to disk (piped questions only with --keep)"""


class KeySettings(Section):
    """Keys by the id of their action; the actions belong to the application, which checks ids and keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[str, Field(min_length=1)]]

    def given(self) -> dict[str, str]:
        return dict(self.__pydantic_extra__)


class Settings(Section):
    model: ModelSettings = ModelSettings()
    """the model and where it runs"""
    kv: KvSection = KvSection()
    """how K/V are kept"""
    sampling: SamplingSettings = SamplingSettings()
    """how the next token is drawn"""
    ui: UiSettings = UiSettings()
    """the application"""
    keys: KeySettings = KeySettings()
    """keys of the application, separated by commas, by the id of their action: `kvchat keys` lists them"""
