"""A result's identity: by this two results are one measurement, may stand in one report, or are older than the code.

Nothing here depends on a commit. A mode's ``constants`` and parameters decide which tokens it reads; its ``version`` is
raised when it reads others for any other reason, an experiment's in ``VERSIONS`` when its rows mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvchat.bench.variant import parsed
from kvchat.errors import KvchatError

if TYPE_CHECKING:
    from kvchat.models.load import LoadedModel

SCHEMA = 1
VERSIONS = {
    "agreement": 1,
    "coverage": 1,
    "data": 1,
    "decode": 1,
    "lengths": 1,
    "long-chat": 1,
    "long-run": 1,
    "paper asr-kf-egr": 2,
    "paper freekv": 3,
    "paper lazy-pruning": 2,
    "paper synckv": 3,
    "passkey": 1,
    "perplexity": 1,
    "prefill": 1,
    "recall": 1,
    "resume": 1,
    "switches": 1,
    "turns": 1,
}
# Results may be set side by side when these are alike: each changes times, most change the last digits of logits.
COMPARED = ("processor", "threads", "gpu", "cuda", "torch", "transformers")

Result = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A measurement, as plain data: ``settings`` of the command, ``methods`` by variant, the model.

    ``found`` are facts of the run that belong to no row and are no part of what it is, such as rates of the device.
    """

    name: str
    what: str
    settings: Mapping[str, Any]
    methods: Mapping[str, Any]
    model: Mapping[str, Any]
    environment: Mapping[str, Any]
    found: Mapping[str, Any] = field(default_factory=dict)

    def head(self) -> Result:
        """The result without rows."""
        fields = asdict(self)
        found = fields.pop("found")
        return {"schema": SCHEMA, "experiment": fields.pop("name"), "version": VERSIONS[self.name], **fields, **found}


def methods(variants: Sequence[str], budget: int | None = None) -> dict[str, Any]:
    """Mode, its version, constants and all its parameters for each variant; ``budget`` is the experiment's own.

    Raises:
        UsageError: an unknown mode or parameter, a value out of range, or a mode that cannot be imported.
    """
    from kvchat.kv.modes import implementation  # imports torch, which the command line does without

    found = {variant: parsed(variant, budget) for variant in variants}
    return {
        variant: {
            "mode": chosen.name,
            "version": chosen.version,
            "constants": dict(implementation(chosen).constants),
            "parameters": chosen.model_dump(),
        }
        for variant, chosen in found.items()
    }


def model_identity(model: LoadedModel) -> dict[str, Any]:
    """The weights: name, revision, dtype and quantization, and the kind of device that they are on."""
    return {
        "name": model.name,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.weights,
        "device": model.device.type,
    }


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first thing by which two results are different measurements, as words; "" where they are one."""
    for name in ("schema", "experiment", "version", "settings", "methods", "model", "environment"):
        if found := _difference(name, one.get(name), other.get(name)):
            return found
    return ""


def incompatible(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The reason why two results must not stand side by side, as words; "" where they may."""
    environments = [{key: result["environment"].get(key) for key in COMPARED} for result in (one, other)]
    return _difference("environment", *environments) or _difference("model", one.get("model"), other.get("model"))


def outdated(result: Mapping[str, Any]) -> str:
    """The reason why a result is older than the code that it describes, as words; "" where it is not."""
    if result.get("schema") != SCHEMA:
        return f"its schema is {result.get('schema', 'none')}, today's is {SCHEMA}"
    name = result["experiment"]
    if result["version"] != VERSIONS.get(name):
        return f"{name} has version {VERSIONS.get(name)} today, {result['version']} there"
    try:
        today = methods(list(result["methods"]), result["settings"].get("budget"))
    except KvchatError as error:
        return str(error)
    for variant, method in today.items():
        # A parameter that came later does not make a result older: were it felt, the mode's version would be another.
        known = result["methods"][variant].get("parameters", {})
        method["parameters"] = {name: value for name, value in method["parameters"].items() if name in known}
    return _difference("methods", result["methods"], today)


def _difference(name: str, one: Any, other: Any) -> str:
    """The innermost difference, named by its place; keys that one side lacks count."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            if found := _difference(f"{name}.{key}", one.get(key), other.get(key)):
                return found
        return ""
    return "" if one == other else f"{name} is {one!r} in one and {other!r} in the other"
