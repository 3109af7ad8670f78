"""Calibration for sync: measures which KV heads attend alike and which retrieve, and saves the result.

Each text is read once with attention that records its weights (SyncKV, section 4.1 and appendix B.1). The weights of a
KV head are the maxima over its query heads; S is the mean overlap coefficient of the heads' k most attended tokens. The
paper samples 50 articles. The samples here also hide a run of tokens in each text and repeat it at the end, so that a
head's retrieval score needs no labels: it is the attention mass on the run while the run is repeated.

Decision: S excludes steps with fewer than 2k tokens before them, because there any two heads overlap.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvchat import files, paths
from kvchat.config.modes import SpeculativeParameters, parse
from kvchat.engine.synthetic_text import sentences
from kvchat.errors import UsageError
from kvchat.files import read_text
from kvchat.kv.attention import AttentionSpec
from kvchat.kv.modes.base import Mode
from kvchat.kv.modes.sync_heads import Calibration, TokenChoice, default_clusters, roles
from kvchat.models import attention_hook
from kvchat.models.load import LoadedModel
from kvchat.units import count

TOP = 64
TEXT_TOKENS = 512
TEXTS = 24
RUN_TOKENS = 24
MIN_TOKENS = 4 * TOP
PROMPT_PARTS = 4

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sample:
    """Token ids with a run at ``source`` (start, end) that is repeated at the end."""

    ids: list[int]
    source: tuple[int, int]

    @property
    def run(self) -> int:
        return self.source[1] - self.source[0]


def calibrate(
    model: LoadedModel,
    samples: Sequence[Sample],
    measured_on: str,
    clusters: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Calibration:
    """Measure the KV heads on ``samples``; call ``progress`` with the samples read and their total number.

    Raises:
        UsageError: there are no samples, or ``clusters`` is below 1 or above the number of KV heads.
    """
    if not samples:
        raise UsageError(
            "The text is too short to calibrate on.",
            f"At least {MIN_TOKENS} tokens are needed.",
            "Use a longer text.",
        )
    if clusters is not None and not 1 <= clusters <= model.kv_heads:
        raise UsageError(
            f"{clusters} clusters are not possible.",
            f"The model has {model.kv_heads} KV heads per layer.",
            "Use at most that many clusters.",
        )
    recorder = Recorder(model)
    for done, sample in enumerate(samples, 1):
        recorder.read(sample)
        progress(done, len(samples))
    similarity, retrieval = recorder.means()
    return Calibration(
        model.revision,
        measured_on,
        clusters or default_clusters(model.kv_heads, model.model.config.model_type),
        tuple(tuple(tuple(round(x, 4) for x in row) for row in layer) for layer in similarity.tolist()),
        tuple(tuple(round(x, 4) for x in layer) for layer in retrieval.tolist()),
    )


class Recorder:
    """An ``AttentionBackend`` that sums, for each layer, overlaps ``[H, H]`` and attention mass on the run ``[H]``."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        shape = (model.layers, model.kv_heads, model.kv_heads)
        self._overlap = torch.zeros(shape, dtype=torch.float64, device=model.device)
        self._mass = torch.zeros(shape[:2], dtype=torch.float64, device=model.device)
        self._read = 0

    def read(self, sample: Sample) -> None:
        """Run one forward pass over ``sample`` and add its measurements."""
        self._sample = sample
        ids = torch.tensor(sample.ids, device=self._model.device)
        positions = torch.arange(len(ids), device=ids.device)
        attention_hook.forward(self._model.model, ids, positions, self, logits=False)
        self._read += 1

    def means(self) -> tuple[Tensor, Tensor]:
        """Return similarity ``[layers, H, H]`` and retrieval ``[layers, H]``, averaged over the samples, on the CPU."""
        return self._overlap.cpu() / self._read, self._mass.cpu() / self._read

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Dense causal attention ``[H_q, n, d_v]``, one KV head at a time to limit the memory of the weights."""
        parts, pooled = [], []
        group = len(query) // len(key)
        for head in range(len(key)):
            one, rows = slice(head, head + 1), slice(head * group, (head + 1) * group)
            of_head = spec if spec.sinks is None else replace(spec, sinks=spec.sinks[rows])
            part, weights = attention_hook.attend(query[rows], key[one], value[one], of_head)
            parts.append(part)
            pooled.append(weights.amax(0))
        self._record(layer, pooled)
        return torch.cat(parts)

    def _record(self, layer: int, pooled: list[Tensor]) -> None:
        """Add one layer's weights, given for each KV head as ``[n, n]``."""
        first, last = self._sample.source
        # The token before a repeated one predicts it.
        repeating = slice(-self._sample.run - 1, -1)
        self._mass[layer] += torch.stack([w[repeating, first:last].sum(1).mean() for w in pooled])
        sets = torch.stack([_top_sets(w[2 * TOP :]) for w in pooled]).flatten(1)
        self._overlap[layer] += sets @ sets.T / (TOP * (len(pooled[0]) - 2 * TOP))


def _top_sets(weights: Tensor) -> Tensor:
    """Return the ``TOP`` most attended tokens of each step as 0 and 1, ``[steps, n]``."""
    return torch.zeros_like(weights).scatter_(1, weights.topk(TOP, 1).indices, 1.0)


# ---- samples ---------------------------------------------------------------------------------------


def default_samples(model: LoadedModel) -> list[Sample]:
    """Return seeded synthetic texts that hide a fact and a run of random tokens in turn."""
    samples = []
    for seed in range(TEXTS):
        ids = _filler_ids(model, seed)
        random_ = random.Random(seed)
        run = _fact(model, random_) if seed % 2 else random_.choices(ids, k=RUN_TOKENS)
        samples.append(_hidden(ids, run, random_))
    return samples


def samples_of(ids: Sequence[int], limit: int = TEXTS) -> list[Sample]:
    """Split a text's own tokens into samples; each hides a run drawn at random from its tokens."""
    parts = [list(ids[i : i + TEXT_TOKENS]) for i in range(0, len(ids), TEXT_TOKENS)][:limit]
    random_ = random.Random(0)
    return [_hidden(part, random_.choices(part, k=RUN_TOKENS), random_) for part in parts if len(part) >= MIN_TOKENS]


def on_prompt(model: LoadedModel, ids: Sequence[int]) -> Calibration | None:
    """Calibrate on a prompt's own tokens, for a model without a calibration; None if the prompt is too short."""
    samples = samples_of(ids, PROMPT_PARTS)
    return calibrate(model, samples, f"this prompt, in {count(len(samples), 'part')}") if samples else None


def file_samples(model: LoadedModel, files: Iterable[Path]) -> list[Sample]:
    """Return samples from UTF-8 text files.

    Raises:
        UsageError: a file cannot be read.
    """
    samples = []
    for file in files:
        samples += samples_of(model.tokenizer.encode(read_text(file), add_special_tokens=False))
    return samples


def _filler_ids(model: LoadedModel, seed: int) -> list[int]:
    ids: list[int] = []
    for sentence in sentences(seed):
        ids += model.tokenizer.encode(f" {sentence}", add_special_tokens=False)
        if len(ids) >= TEXT_TOKENS:
            break
    return ids[:TEXT_TOKENS]


def _fact(model: LoadedModel, random_: random.Random) -> list[int]:
    number = random_.randrange(10**6, 10**7)
    ids: list[int] = model.tokenizer.encode(f" The secret number is {number}.", add_special_tokens=False)
    return ids


def _hidden(ids: list[int], run: list[int], random_: random.Random) -> Sample:
    """Insert ``run`` into ``ids``, and append it at the end."""
    at = random_.randrange(len(ids) // 8, len(ids) // 2)
    return Sample([*ids[:at], *run, *ids[at:], *run], (at, at + len(run)))


def representatives(calibration: Calibration, rule: str) -> list[tuple[int, ...]]:
    """Return each layer's representatives by "retrieval" or "centroid"."""
    return [layer.representatives for layer in roles(calibration, calibration.clusters, rule)]


# ---- files ------------------------------------------------------------------------------------------


def find(revision: str, problem: Callable[[UsageError], object] = lambda error: None) -> Calibration | None:
    """Return the calibration of a model's revision: the user's own, else the bundled one, else None.

    A damaged or unreadable file is skipped; ``problem`` is called with the error.
    """
    for folder in (paths.calibration_dir(), paths.bundled_calibration_dir()):
        file = folder / f"{revision}.json"
        try:
            file.stat()
            return load(file)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except UsageError as error:
            problem(error)
        except OSError as error:
            problem(UsageError(f"{file} cannot be read.", f"{error.strerror}.", "Check its permissions."))
    return None


def notes(model: LoadedModel, mode: Mode) -> tuple[str, ...]:
    """Return a note to the user if the mode in use must measure an uncalibrated model itself."""
    if not mode.needs_calibration:
        return ()
    better = f"For a more exact result: kvchat calibrate {model.name}"
    return (f"The first long prompt measures the model for {mode.name} mode. {better}",)


def save(calibration: Calibration, file: Path | None = None) -> Path:
    """Write ``calibration`` to the folder that ``find`` searches, or to ``file``; return the file.

    Raises:
        UsageError: the file cannot be written.
    """
    file = file or paths.calibration_dir() / f"{calibration.revision}.json"
    try:
        files.write(file, (json.dumps(asdict(calibration), indent=1) + "\n").encode())
    except OSError as error:
        raise files.unwritable(file, error, "Check the folder's permissions.") from None
    return file


def load(file: Path) -> Calibration:
    """Read a saved calibration.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        fields: dict[str, Any] = json.loads(files.read(file))
        similarity = tuple(tuple(tuple(map(float, row)) for row in layer) for layer in fields.pop("similarity"))
        retrieval = tuple(tuple(map(float, layer)) for layer in fields.pop("retrieval"))
        choice = TokenChoice(**fields.pop("choice")) if fields.get("choice") else fields.pop("choice", None)
        if choice:
            parse(SpeculativeParameters.name, choice.params)
        return Calibration(**fields, similarity=similarity, retrieval=retrieval, choice=choice)
    except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
        raise UsageError(
            f"{file} is not a calibration.", str(error), "Delete it, or run kvchat calibrate again."
        ) from error
