"""Changes to a model's folder, and the memory that the plan and the list give for a quantized one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.progress import silent

from kvchat.engine.plan import memory_plan
from kvchat.models import catalog
from kvchat.models.catalog import Room, fit
from kvchat.protocol.messages import Load


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def planned_bytes(folder, dtype="auto"):
    """The planned bytes for the weights of an already quantized checkpoint."""
    (nbytes,) = memory_plan(Load(str(folder), "cpu", dtype), 64, silent).weights.values()
    return nbytes


def listed_bytes(folder, dtype="auto"):
    """The bytes that it needs on a CPU, by the list of models."""
    found = catalog.at(folder)
    return fit(found, dtype, Room("cpu", 2**40)).needed


def set_quantization(folder, quantization_config):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config}))
