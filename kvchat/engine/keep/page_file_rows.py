"""Converts the stored ids and text to rows of a page file and back; identifies the model that K/V were computed by."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers

from kvchat.engine.generate.stored import Stored
from kvchat.kv.memory.page_file import TOKEN, Rows
from kvchat.models import load
from kvchat.models.load import LoadedModel
from kvchat.models.recurrent import is_recurrent

REDUCED, CONTROL = 1, 2  # flags


def identity(model: LoadedModel) -> dict[str, Any]:
    """All that K/V depend on; a key completes the sentence "The file is of another ..."."""
    recurrent = is_recurrent(model.model.config)
    return {
        "model": model.name,
        "revision": model.revision,
        "configuration": _digest(model.model.config.to_json_string()),
        "number format": str(model.dtype).removeprefix("torch."),
        "quantization": model.weights,
        "training": model.fingerprint,
        "tokenizer": load.of_tokenizer(model.tokenizer),
        "chat template": _digest(getattr(model.tokenizer, "chat_template", None) or ""),
        **({"version of transformers": transformers.__version__} if recurrent else {}),  # its cache has the state
    }


def rows_of(stored: Stored, control: list[int], start: int) -> Rows:
    """The rows of the ids from ``start`` on; ``control`` are the positions of control tokens."""
    rows = np.zeros(len(stored.ids) - start, TOKEN)
    rows["id"] = stored.ids[start:]
    rows["flags"] = REDUCED * np.array(stored.reduced[start:], np.uint8)
    rows["flags"][[at - start for at in control if at >= start]] |= CONTROL
    rows["chars"] = -1
    for ids, chars in stored.marks:
        if ids > start:
            rows[ids - 1 - start]["chars"] = chars
            rows[ids - 1 - start]["digest"] = np.void(load.of_text(stored.text[:chars]))
    return rows


def stored_of(rows: Rows, text: str) -> Stored:
    """The ids of the rows, with the marks at which ``text`` agrees with the saved one."""
    stored = Stored(rows["id"].tolist(), reduced=((rows["flags"] & REDUCED) > 0).tolist())
    for index in np.flatnonzero(rows["chars"] >= 0).tolist():
        chars = int(rows["chars"][index])
        if chars <= len(text) and rows["digest"][index].tobytes() == load.of_text(text[:chars]):
            stored.marks.append((index + 1, chars))
    stored.text = text[: stored.marks[-1][1]] if stored.marks else ""
    return stored


def control_positions(rows: Rows) -> list[int]:
    """The positions of the chat's control tokens."""
    found: list[int] = np.flatnonzero(rows["flags"] & CONTROL).tolist()
    return found


def _digest(value: str | dict[str, str]) -> str:
    return load.of_text(str(value)).hex()
