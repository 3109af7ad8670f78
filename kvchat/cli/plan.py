"""``kvchat plan``: what a model will take on this machine before it is loaded, and what fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvchat.cli.output import echo, progress
from kvchat.protocol.figures import Params
from kvchat.units import count, size

if TYPE_CHECKING:
    from kvchat.engine.plan import MemoryPlan


def plan(
    model: str, device: str, dtype: str, context: int | None, mode_params: Mapping[str, Params], as_json: bool
) -> int:
    """Print the plan; return 0, or 3 where nothing fits.

    Raises:
        KvchatError: the model or an option is refused.
    """
    from kvchat.engine.plan import memory_plan  # torch: seconds

    made = memory_plan(model, device, dtype, context, mode_params, progress)
    progress("")
    proposal = made.proposal
    if as_json:
        fields = asdict(made) | {"modes": {name: need._asdict() for name, need in made.modes.items()}}
        echo(json.dumps(fields | {"proposal": proposal._asdict() if proposal else None}, indent=2))
    else:
        echo("\n".join(_lines(made)))
    return 0 if proposal else 3


def _lines(made: MemoryPlan) -> Iterator[str]:
    where = "this machine's memory" if made.device == "cpu" else made.device
    yield f"{made.model} ({made.architecture}) in {made.dtype} on {made.device}, {count(made.context)} tokens"
    yield ""
    rows = [(f"weights, {name}", where, size(needed, 2)) for name, needed in made.weights.items()]
    for name, need in made.modes.items():
        budget = f", budget {need.params['budget']}" if need.params.get("budget") else ""
        rows.append((f"K/V read, {name}{budget}", where, need.refusal or size(need.device_bytes, 2)))
    rows += [("recurrent state", where, size(made.state, 2))] if made.state else []
    rows.append(("workspace, estimated", where, size(made.workspace, 2)))
    rows.append(("K/V stored", "host", size(made.host_pool, 2)))
    rows += [("snapshots of the state", "host", size(made.snapshots, 2))] if made.snapshots else []
    if made.device != "cpu":
        rows.append(("free", made.device, size(made.device_free, 2)))
    rows.append(("free", "host", size(made.host_free, 2)))
    yield from (f"{name:<34} {place:<22} {amount}" for name, place, amount in rows)
    yield ""
    yield from _proposed(made)


def _proposed(made: MemoryPlan) -> Iterator[str]:
    proposal = made.proposal
    if proposal is None:
        yield "Nothing fits: take a smaller model or a shorter context."
        return
    quantize = f" --quantize {proposal.quantize}" if proposal.quantize in ("int8", "int4", "nf4") else ""
    yield f"kvchat -m {made.model} --mode {proposal.mode}{quantize}"
    yield from (f"  gives up {each}" for each in proposal.gave_up or ("nothing",))
