"""Code shared by the studies of all papers. A part is one table or figure, with published next to measured figures.

A row of a part has the label ``row``, and figures by name in ``measured`` and ``published``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from torch import Tensor

from kvchat import units
from kvchat.bench.agreement import Forced, summarized
from kvchat.bench.frame import Frame, ModelChoice, Result, Row, experiment, methods, parsed
from kvchat.bench.settings import Agreement
from kvchat.bench.texts import passages
from kvchat.bench.walk import Walk
from kvchat.config.modes import ModeParameters
from kvchat.engine.sampler import Sampler, read
from kvchat.engine.synthetic_text import ANSWER_TOKENS
from kvchat.errors import DoesNotFitError, UsageError, did_you_mean
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Sampling

AGREEMENT = {
    "KL": "kl_mean",
    "same top token": "same_top",
    "mass covered": "covered",
    "tokens read": "read_mean",
}
T = TypeVar("T")
TOKENS = ("context", "forced", "longest", "prompt_tokens", "tokens")  # sizes limited by the model's context


@dataclass(frozen=True)
class Part:
    """One table or figure: its title, how it differs from the paper's, and how to measure it."""

    title: str
    differs: str
    measure: Callable[[Lab], Sequence[Row]]


@dataclass(frozen=True)
class Lab:
    """The tools of a part: ``settings`` of the study, and ``texts``, files to use instead of the bundled books.

    ``report`` shows progress within a part; ``choice`` says which model was loaded, and how.
    """

    walk: Walk
    settings: Any
    texts: tuple[str, ...] = ()
    report: Callable[[str], None] = lambda line: None
    choice: ModelChoice = ModelChoice()

    @property
    def model(self) -> LoadedModel:
        return self.walk.model

    def each(self, labels: Iterable[str], measure: Callable[[str], T]) -> list[T]:
        """Measure each label and report it, because a part may take minutes."""
        found = []
        for label in labels:
            began = time.monotonic()
            found.append(measure(label))
            self.report(f"{label}, {units.seconds(time.monotonic() - began)}")
        return found

    def passage(self, size: int) -> Sequence[int]:
        """Return the first ``size`` ids of the text."""
        return passages(self.texts, size, self.model.tokenizer)[0].ids

    def generate(self, logits: Tensor, tokens: int, sampling: Sampling) -> Iterator[int]:
        """Sample and decode ``tokens`` tokens; the caller can inspect the walk after each."""
        sampler = Sampler(sampling, self.model.vocab, self.model.device)
        for _ in range(tokens):
            token = read(sampler(logits))
            logits = self.walk.step(token)
            yield token

    def answer(self, prompt: Sequence[int], variant: str, given: Sequence[int] = ()) -> str:
        """Return the greedy answer of a mode after ``prompt`` and the decoded tokens ``given``."""
        logits = self.walk.begin(prompt, parsed(variant), len(given) + ANSWER_TOKENS)
        for token in given:
            logits = self.walk.step(token)
        return str(self.model.tokenizer.decode([*self.generate(logits, ANSWER_TOKENS, Sampling(temperature=0))]))


@dataclass(frozen=True)
class Study:
    """A paper: its parts by name, and the variants that they measure."""

    name: str
    title: str
    parts: Mapping[str, Part]
    variants: Callable[[Any], Sequence[str]]

    def run(
        self,
        settings: Any,
        choice: ModelChoice = ModelChoice(),
        frame: Frame | None = None,
        only: Sequence[str] = (),
        texts: Sequence[str] = (),
    ) -> Result:
        """Measure all parts, or those in ``only``; return plain data, ready for JSON, with the rows of each part.

        ``texts`` replace the bundled books; the first one that is long enough is used.

        Raises:
            UsageError: a part is unknown; DoesNotFitError: a size set by the user exceeds the model's context;
            KvchatError: the model cannot be loaded, or no part can be measured.
        """
        for part in only:
            if part not in self.parts:
                raise UsageError(f'{self.name} has no part "{part}".', did_you_mean(part, self.parts))
        frame, found = frame or Frame(), methods(list(dict.fromkeys(self.variants(settings))))
        model = choice.load(frame.progress)
        # A default that exceeds a small model's context fails only the parts that need it.
        for size in fields(settings):
            value = getattr(settings, size.name)
            if size.name in TOKENS and value != size.default and value > model.context:
                raise DoesNotFitError(
                    f"{size.name} = {value:,} does not fit the model.",
                    f"{model.name} reads {model.context:,} tokens.",
                    f"Use --set {size.name}=N with fewer.",
                )
        lab = Lab(Walk(model), settings, tuple(texts), frame.report, choice)
        shown = {name: part for name, part in self.parts.items() if not only or name in only}
        head = experiment(
            f"paper {self.name}",
            self.title,
            asdict(settings) | {"parts": list(shown), "texts": list(texts)},
            found,
            model,
            parts={name: {"title": part.title, "differs": part.differs} for name, part in shown.items()},
        )
        cells = [{"part": name} for name in shown]
        return frame.measure(head, cells, lambda cell: _timed(self.parts[cell["part"]], lab), _line)


def _timed(part: Part, lab: Lab) -> list[Row]:
    """Measure a part; add the seconds of the whole part to each row."""
    began = time.monotonic()
    rows = part.measure(lab)
    seconds = round(time.monotonic() - began, 1)
    return [{**each, "part_seconds": seconds} for each in rows]


def forced(lab: Lab) -> Forced:
    """Return a text of ``context`` tokens, and ``forced`` tokens to decode after them, by the study's settings."""
    settings = Agreement(context=lab.settings.context, tokens=lab.settings.forced)
    size = settings.context + settings.tokens
    return Forced(lab.walk, settings, passages(lab.texts, size, lab.model.tokenizer)[:1])


def agreement(decoded: Forced, parameters: ModeParameters) -> dict[str, Any]:
    """Return a mode's agreement with full on the text of ``decoded``, as figures of a row."""
    found = summarized([{**decoded.row(0, parameters), "variant": ""}], "")
    return {name: found[of] for name, of in AGREEMENT.items()}


def row(label: str, measured: Mapping[str, Any], published: Mapping[str, Any] | None = None, **figure: Any) -> Row:
    return {"row": label, "measured": dict(measured), "published": dict(published or {}), **figure}


def _line(made: Row) -> str:
    figures = (f"{name} {value:.4g}" for name, value in made["measured"].items() if isinstance(value, int | float))
    return f"{made['part']:<14} {made['row']:<36} {', '.join(figures)}"
