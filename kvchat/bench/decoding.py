"""The parts of a decoding benchmark: modes, the model, and a stored conversation.

Random weights change nearly all of speculative mode's choice at each step, so the share that changes can be fixed.
Tokens or pages are then scored and chosen at the usual cost, but replaced by a window that slides over all candidates
in random order, from a different start for each KV head. The window is computed on the device from the position, so
that a CUDA graph can contain it.

The corpus is Python's language reference, which comes with every Python and needs no download.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvchat.bench import model_shapes
from kvchat.bench.frame import ModelChoice, Report, parsed
from kvchat.bench.settings import Decode
from kvchat.bench.timing import Timing, time_steps, warm_up
from kvchat.config.modes import FullParameters, ModeParameters, SpeculativeParameters
from kvchat.engine import calibration
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.engine.sampler import Sampler, read
from kvchat.errors import DoesNotFitError, KvchatError, UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes import build
from kvchat.kv.modes.base import Mode, ModelTraits
from kvchat.kv.modes.freekv import FreeKV
from kvchat.kv.modes.speculative import Speculative
from kvchat.kv.modes.sync_heads import Calibration
from kvchat.kv.ops.selection import Candidates
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Sampling

if TYPE_CHECKING:
    from kvchat.kv.state import KVState


CALIBRATED = frozenset({"sync", "razor"})  # modes that need a calibration


def open_model(settings: Decode, choice: ModelChoice, progress: Report) -> LoadedModel:
    """Load the model.

    Raises:
        KvchatError: it is refused, or its context is too short for the longest context and the decoded tokens.
    """
    model = model_shapes.choose(settings.shape, choice, progress)
    needed = max(settings.contexts) + settings.steps + warm_up(model.device)
    if needed > model.context:
        raise DoesNotFitError(
            "The contexts do not fit the model.",
            f"{needed:,} tokens are needed; the model reads {model.context:,}.",
            "Use a smaller --context.",
        )
    return model


def smallest(settings: Decode, model: LoadedModel, context: int) -> Mode:
    """Return the mode that needs the fewest bytes on the device; the context is stored in it.

    Raises:
        KvchatError: the model can run in no mode.
    """
    geometry, modes, refused = geometry_of(model), [], None
    for text in settings.modes:
        try:
            modes.append(build(parsed(text, settings.budget), geometry, traits_of(model)))
        except KvchatError as error:
            refused = error
    if refused is not None and not modes:
        raise refused
    return min(modes, key=lambda mode: mode.plan(geometry.grown(context)).device_bytes(geometry))


def store(settings: Decode, runner: ModelRunner, context: int) -> list[int]:
    """Store exactly ``context`` tokens; return their ids."""
    ids = _ids(settings, runner.model, context)
    with torch.inference_mode():
        runner.kv.truncate(0)
        runner.kv.switch(smallest(settings, runner.model, context))
    if settings.shape and not settings.prefill:
        model_shapes.fill(runner.kv, context)
    else:
        for _ in runner.prefill(ids):
            pass
    return ids


def decoded(settings: Decode, model: LoadedModel, context: int) -> list[int]:
    """Return the ids that a round decodes after ``context`` tokens."""
    return _ids(settings, model, context + settings.steps + warm_up(model.device))[context:]


def calibrated(settings: Decode, model: LoadedModel, ids: Sequence[int]) -> Calibration | None:
    """Return the calibration for modes that need one; None if no mode does or the context is too short."""
    if CALIBRATED.isdisjoint(text.partition(":")[0] for text in settings.modes):
        return None
    if settings.shape:
        return model_shapes.calibration(model)
    return calibration.find(model.revision) or calibration.on_prompt(model, list(ids))


def _ids(settings: Decode, model: LoadedModel, tokens: int) -> list[int]:
    """Return the first tokens of the corpus, or random tokens for random weights."""
    if settings.shape:
        draw = random.Random(0)
        return [draw.randrange(model.vocab) for _ in range(tokens)]
    return prose(model.tokenizer, tokens)


def spills(chosen: ModeParameters) -> bool:
    """True if the mode streams tokens from RAM."""
    return isinstance(chosen, FullParameters) and chosen.resident is not None


@dataclass(eq=False)
class ModeRun:
    """A mode of kvchat with the parameters ``chosen``.

    ``change_rate`` None leaves the selection to the mode. ``figures`` are bytes on the device, bytes moved per token,
    the share of selected K/V that was new, and corrections per token.
    """

    runner: ModelRunner
    name: str
    chosen: ModeParameters
    change_rate: float | None
    calibration: Calibration | None
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = self.runner.kv.total
        self._traits = traits_of(self.runner.model, self.calibration)

    def measure(self, tokens: Sequence[int]) -> Timing:
        """Decode ``tokens`` in the mode, as ``Variant.measure`` does; also record bytes on the device and bytes moved.

        Raises:
            KvchatError: the mode cannot be entered.
        """
        kv = self.runner.kv
        with torch.inference_mode():
            kv.truncate(self._context)
            kv.switch(self._mode())
        if kv.mode.needs_calibration:
            raise UsageError(
                "The model's heads are not calibrated.",
                "The context is too short to calibrate them on.",
                "Use a longer context, or run `kvchat calibrate` first.",
            )
        state, geometry = kv.state, kv.state.geometry
        held, predicted = kv.device_bytes, kv.mode.plan(geometry.grown(kv.total + 1)).device_bytes(geometry)
        before = state.transfer.totals
        timing = time_steps(self.runner.step, tokens, state.device)
        moved, wanted, corrected, moved_bytes = (b - a for a, b in zip(before, state.transfer.totals, strict=True))
        self.figures = {
            "kv_device_bytes": held,
            "kv_predicted_bytes": predicted,
            "kv_host_bytes": state.host.nbytes,
            "moved_bytes": moved_bytes / len(tokens),
            "changed": moved / wanted if wanted else None,
            "corrections": corrected / len(tokens),
            "not_captured": self.runner.graphs.refusal,
        }
        again = tokens[warm_up(state.device) :]
        self.runner.truncate(kv.total - len(again))
        model = self.runner.model
        sampler = Sampler(Sampling(seed=0), model.vocab, model.device, model.advised)
        in_a_chat = time_steps(lambda token: read(sampler(self.runner.step(token))), again, state.device, first=0)
        return replace(timing, chat_ms=in_a_chat.ms)

    def close(self) -> None:
        """Do nothing, because all memory belongs to the KV manager."""

    def _mode(self) -> Mode:
        geometry = geometry_of(self.runner.model)
        if isinstance(self.chosen, SpeculativeParameters) and self.change_rate is not None:
            return fixed_change_rate(self.change_rate, self.chosen, geometry, self._traits)
        return build(self.chosen, geometry, self._traits)


def prose(tokenizer: Any, tokens: int) -> list[int]:
    """Return the first ``tokens`` ids of the corpus in the tokenizer's vocabulary."""
    ids: list[int] = []
    for name in sorted(topics.topics):
        ids += tokenizer.encode(topics.topics[name], add_special_tokens=not ids)
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"The corpus has {len(ids):,} tokens; {tokens:,} were requested.")


class Window:
    """At each position, replaces ``round(rate * slots)`` of each KV head's ``slots`` items.

    Raises:
        UsageError: there are too few items from ``first`` to ``end`` for the rate.
    """

    def __init__(self, rate: float, slots: int, first: int, end: int, heads: int, device: torch.device) -> None:
        changed = round(rate * slots)
        if end - first < slots + changed:
            raise UsageError(
                f"A change rate of {rate:g} needs a longer context or a smaller budget.",
                f"{slots} are selected per head, {changed} of them new; {max(0, end - first)} are stored.",
                "Use a longer --context, a smaller budget or a smaller change rate.",
            )
        draw = torch.Generator().manual_seed(0)
        self._order = (torch.randperm(end - first, generator=draw) + first).to(device)
        self._changed = torch.tensor(changed, device=device)
        self._slot = torch.arange(slots, device=device)
        self._begins = (torch.arange(heads, device=device) * (len(self._order) // heads))[:, None]

    def at(self, position: Tensor) -> Tensor:
        """Return the item of each slot at ``position`` (0-d), ``[H, slots]``; an item that stays keeps its slot."""
        begin = position * self._changed
        place = begin + (self._slot - begin) % max(1, len(self._slot))
        return self._order[(self._begins + place) % len(self._order)]

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that a CUDA graph reads."""
        return [self._order, self._changed, self._slot, self._begins]


class FixedTokens(Speculative):
    """At each step, ``round(rate * k)`` of the k tokens of every layer and KV head on a GPU change."""

    def __init__(self, rate: float, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits) -> None:
        super().__init__(parameters, geometry, traits)
        self.rate = rate

    def attach(self, state: KVState) -> None:
        super().attach(state)
        k, page = min(self.k, self.slots.offset), self.geometry.page
        end = min(state.total - self.window, state.total // page * page)
        self._sliding = Window(self.rate, k, self.sink, end, self.geometry.kv_heads, state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), *self._sliding.buffers]

    def fill(self, fresh: bool) -> None:
        self._chosen_now = self._sliding.at(self.state.position)
        super().fill(fresh)

    def forward_begin(self, position: Tensor) -> None:
        self._chosen_now = self._sliding.at(position)
        super().forward_begin(position)

    def choose(self, layer: int, query: Tensor, hidden: Tensor, held: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._chosen_now, super().choose(layer, query, hidden, held)[1]


class FixedPages(FreeKV):
    """At each step, ``round(rate * k)`` of the k pages of every layer and KV head change."""

    def __init__(self, rate: float, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits) -> None:
        super().__init__(parameters.of_pages(), geometry, traits)
        self.rate = rate

    def attach(self, state: KVState) -> None:
        super().attach(state)
        p, pages = self.geometry.page, self.slots.layout.pages
        first, end = -(-self.sink // p), (state.total - self.window) // p
        self._sliding = Window(self.rate, pages, first, end, self.geometry.kv_heads, state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), *self._sliding.buffers]

    def fill(self, fresh: bool) -> None:
        self._chosen_now = self._chosen_next = self._sliding.at(self.state.position)
        super().fill(fresh)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._chosen_now, self._chosen_next = self._sliding.at(position), self._sliding.at(position + 1)

    def choose(self, layer: int, scores: Tensor, candidates: Candidates, flagged: Tensor | None = None) -> Tensor:
        chosen = super().choose(layer, scores, candidates, flagged)
        if flagged is None:  # with tau > 1 nothing is chosen ahead
            return (self._chosen_now if self.tau > 1 else self._chosen_next).to(chosen.dtype)
        return torch.where(flagged[:, None], self._chosen_now, self.slots.pages_of(layer)).to(chosen.dtype)


def fixed_change_rate(
    rate: float, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits
) -> Speculative | FreeKV:
    """Speculative mode with a fixed share of its selection new at each step; on a CPU tokens are read in place."""
    by_tokens = parameters.unit == "token" and not geometry.unified
    return (FixedTokens if by_tokens else FixedPages)(rate, parameters, geometry, traits)
