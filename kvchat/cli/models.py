"""``kvchat models``: the models on this machine, as the chat's picker lists them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvchat.cli.output import echo, note
from kvchat.config.schema import ModelSettings
from kvchat.models import catalog
from kvchat.models.catalog import FoundModel, Room, fit, room
from kvchat.units import size


@dataclass(frozen=True)
class Row:
    """A model in the list. ``type`` is the weights' quantization or dtype, ``needed_bytes`` what they take once loaded.

    ``quantize`` is the least that makes them fit, None where nothing does or there is a ``problem``.
    """

    name: str
    kind: str
    file_bytes: int | None = None
    type: str = ""
    needed_bytes: int | None = None
    quantize: str | None = None
    problem: str = ""


def list_models(chosen: ModelSettings, as_json: bool) -> None:
    """Print every model that is found in the settings' folders, in the hub's cache and with kvchat."""
    there = room(chosen.device)
    rows = [_row(found, chosen.dtype, there) for found in catalog.find(map(Path, chosen.folders))]
    if as_json:
        echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    echo("\n".join(_lines(rows)))
    where = "of this machine's memory" if there.device == "cpu" else "on the GPU"
    note(f"{size(there.free)} {where} are free. `kvchat plan MODEL` says exactly what one takes.")


def _row(found: FoundModel, dtype: str, there: Room) -> Row:
    weights, fitting = found.weights, fit(found, dtype, there)
    if weights is None or fitting is None:
        return Row(found.name, found.kind, problem=found.problem)
    kind = found.quantization or weights.dtype
    return Row(found.name, found.kind, weights.nbytes, kind, fitting.needed, fitting.quantize)


def _lines(rows: list[Row]) -> Iterator[str]:
    width = max(len(row.name) for row in rows)
    for row in rows:
        yield f"{row.name:<{width}}  {row.kind:<7}  {row.problem or _facts(row)}"


def _facts(row: Row) -> str:
    file, needed = size(row.file_bytes or 0), size(row.needed_bytes or 0)
    fits = {"none": f"fits, takes {needed}", None: f"too large, takes {needed}"}
    return f"{file:>9}  {row.type:<9} {fits.get(row.quantize, f'{row.quantize} fits, takes {needed} without it')}"
