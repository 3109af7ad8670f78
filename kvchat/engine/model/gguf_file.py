"""The header of a GGUF file, read once for its configuration, for the plan and for loading."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from kvchat import gguf_tables
from kvchat.engine.model import gguf_rope
from kvchat.engine.model.supported import unreadable
from kvchat.errors import ModelError


class GgufTensor(NamedTuple):
    """A tensor as a file holds it."""

    name: str
    nbytes: int


class GgufHeader(NamedTuple):
    """llama.cpp's name of the architecture, the number of layers, the tensors and their ``layer_bits``, the scaling."""

    architecture: str
    layers: int
    tensors: tuple[GgufTensor, ...]
    layer_bits: float
    scaling: gguf_rope.Scaling


def header(file: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        ModelError: the file is damaged, or names more layers than it has tensors; transformers would list them all.
    """
    try:
        found = _header(file, file.stat().st_mtime_ns)
    except ModelError:
        raise
    except Exception as error:  # the package raises anything for a damaged file
        raise unreadable(str(file), "the GGUF file", error) from error
    if found.layers > len(found.tensors):
        raise ModelError(
            f"{file} is damaged.",
            f"It names {found.layers:,} layers, and there are {len(found.tensors):,} tensors.",
            "Download the model again.",
        )
    return found


@lru_cache(maxsize=1)
def _header(file: Path, written: int) -> GgufHeader:
    """The package also reads the vocabulary, in Python, for seconds, and believes every length it finds."""
    tables = _tables(file)
    from gguf import GGUFReader

    reader = GGUFReader(file)
    layers = (field for name, field in reader.fields.items() if name.endswith(".block_count"))
    return GgufHeader(
        str(reader.fields["general.architecture"].contents()),
        max((int(field.parts[field.data[0]][0]) for field in layers), default=0),
        tuple(GgufTensor(each.name, int(each.n_bytes)) for each in reader.tensors),
        gguf_tables.layer_bits(tables),
        gguf_rope.read(reader),
    )


def _tables(file: Path) -> list[gguf_tables.TensorEntry]:
    try:
        found = gguf_tables.tensors(file)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file} is damaged.", f"The GGUF file's header cannot be read: {error}.", "Download the model again."
        ) from error
    absent = max((one.end for one in found), default=0) - file.stat().st_size
    if absent > 0:
        raise ModelError(
            f"{file} is damaged or incomplete.",
            f"By its header its tensors end {absent:,} bytes behind its end.",
            "Download the model again.",
        )
    return found
