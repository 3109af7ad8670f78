"""The table of a plan: what a model takes by quantization and mode, what was measured beside it, and what fits."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from kvchat.protocol.figures import MemoryPlan, Proposal, StoredNeed
from kvchat.protocol.messages import Quantize
from kvchat.units import count, figure, size

# Values of --quantize that are worth naming; other names are those of checkpoints quantized already.
CHOICES = {*get_args(Quantize)} - {"auto", "none"}
FLOOR = (
    "floor: reading the weights once, at the rate that kvchat bench decode --save-profile measured; no token is faster"
)


PLANNED = {
    "weights": "the model's weights, by how they are quantized",
    "K/V read": "what each mode holds beside the weights to read K/V, once the conversation is as long as planned",
    "unpacked": "the weights, all of them in host memory while they are loaded, before they are packed again",
    "over the link": "what full mode with resident reads from the host for every token, beside the weights named",
    "recurrent state": "layers that keep a state of fixed size in place of K/V",
    "workspace": "what computing takes for a moment: an estimate",
    "K/V stored": "the K/V of all tokens in host memory, in every mode; on a CPU full mode reads it there",
    "snapshots": "copies of the recurrent state to go back to, at most",
    "free": "memory that nothing uses now",
    "measured": "what the loaded model takes at this moment, beside what was planned; memory once taken for a longer "
    "conversation is kept as room",
}
"""What the rows of ``/plan`` mean, by how their names begin."""


class Row(NamedTuple):
    """One line of the table; ``key`` names what can be measured."""

    key: str
    name: str
    place: str
    amount: str


def plan_lines(made: MemoryPlan, measured: Mapping[str, int] | None = None) -> Iterator[str]:
    """The table as lines; ``measured`` holds bytes by the key of a row, where the model is loaded."""
    yield f"{made.model} ({made.architecture}) in {made.dtype} on {made.device}, {count(made.context)} tokens"
    yield ""
    yield from _table("", list(_rows(made)), measured)
    if made.floor_ms:
        yield FLOOR
    yield ""
    if measured and (stored := made.stored) and stored.tokens:
        yield from _table(f"{count(stored.tokens)} tokens now", list(_stored_rows(made, stored)), measured)
        yield ""
    yield from _proposed(made)


def command_line(made: MemoryPlan, proposal: Proposal) -> str:
    """The command that starts kvchat as planned and proposed."""
    is_named = proposal.quantize in CHOICES or "quantize" in made.given  # "none" overrules the settings'
    quantize = f" --quantize {proposal.quantize}" if is_named else ""
    budget = "" if proposal.budget is None else f" --budget {proposal.budget}"
    return f"{_started(made)} --mode {proposal.mode}{budget}{quantize}"


def _started(made: MemoryPlan) -> str:
    given = {name: value for name, value in made.given.items() if name != "quantize"}
    options = (word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value))
    return shlex.join(["kvchat", "-m", made.model, *options])


def _table(title: str, rows: list[Row], measured: Mapping[str, int] | None) -> Iterator[str]:
    name, place = max(len(title), *(len(row.name) for row in rows)), max(len(row.place) for row in rows)
    if measured:
        yield f"{title:<{name}}  {'':<{place}}  {'planned':<10}  measured"
    for row in rows:
        found = size(measured[row.key], 2) if measured and row.key in measured else ""
        yield f"{row.name:<{name}}  {row.place:<{place}}  {row.amount:<10}  {found}".rstrip()


def _stored_rows(made: MemoryPlan, stored: StoredNeed) -> Iterator[Row]:
    """The K/V of the tokens stored now, beside what they were measured to take."""
    where = "host" if made.device == "cpu" else made.device
    read = f"K/V read, {stored.mode}, up to {count(stored.device_room)}"
    yield Row("read now", read, where, size(stored.device_bytes, 2))
    yield Row("stored now", f"K/V stored, up to {count(stored.host_room)}", "host", size(stored.host_pool, 2))


def _rows(made: MemoryPlan) -> Iterator[Row]:
    where = "host" if made.device == "cpu" else made.device
    for name, needed in made.weights.items():
        chosen = ", by default" if name == made.by_default != "none" else ""
        unpacked = f", unpacked from {size(made.packed, 2)}" if made.packed and name == "none" else ""
        yield Row(f"weights {name}", f"weights, {name}{chosen}{unpacked}", where, size(needed, 2))
        if name in made.floor_ms:
            yield Row(f"floor {name}", "  floor, a token", where, figure(made.floor_ms[name], "ms", 1))
    for name, need in made.modes.items():
        given = [f", {key} {need.params[key]}" for key in ("budget", "resident") if need.params.get(key)]
        yield Row(
            f"read {name}", f"K/V read, {name}{''.join(given)}", where, need.refusal or size(need.device_bytes, 2)
        )
        if need.link_bytes:
            yield Row(
                f"link {name}",
                f"  over the link, a token, beside weights, {made.beside}",
                "host",
                size(need.link_bytes, 2),
            )
    if made.unpacked:
        yield Row("unpacked", "unpacked while it is loaded", "host", size(made.unpacked, 2))
    if made.state:
        yield Row("state", "recurrent state", where, size(made.state, 2))
    yield Row("workspace", "workspace, estimated", where, size(made.workspace, 2))
    yield Row("stored", "K/V stored", "host", size(made.host_pool, 2))
    if made.snapshots:
        yield Row("snapshots", "snapshots of the state", "host", size(made.snapshots, 2))
    free = "free without the model in use" if made.stored else "free"
    if made.device != "cpu":
        yield Row("device free", free, made.device, size(made.device_free, 2))
    yield Row("host free", free, "host", size(made.host_free, 2))


def _proposed(made: MemoryPlan) -> Iterator[str]:
    if made.proposal is None:
        yield "Nothing fits: take a smaller model or a shorter context."
        yield f"{_started(made)} --force loads it anyway."
        return
    if made.proposal.install:
        yield made.proposal.install
    yield command_line(made, made.proposal)
    yield from (f"  gives up {each}" for each in made.proposal.gave_up or ("nothing",))
