"""ModeSwitcher: the current mode's parameters, switches and their cost, auto, and reading more for a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import get_args

import torch

from kvchat.config import modes
from kvchat.config.modes import ModeParameters, refuse_too_much
from kvchat.engine import calibration
from kvchat.engine.prompt import Stored
from kvchat.engine.runner import geometry_of, traits_of
from kvchat.errors import ContextFullError, DoesNotFitError, KvchatError, UsageError, did_you_mean
from kvchat.kv import auto, inspect
from kvchat.kv.auto import Auto, Choice, Conversation, Machine, Setup
from kvchat.kv.manager import KVManager, explained
from kvchat.kv.memory import available, rates
from kvchat.kv.modes import build
from kvchat.kv.modes.base import RECENT, WIDER, Level, Mode
from kvchat.kv.modes.sync_heads import TokenChoice
from kvchat.kv.ops import host_attention
from kvchat.models.load import LoadedModel
from kvchat.models.quantize.rows import is_tied
from kvchat.protocol.figures import Params, Price
from kvchat.protocol.messages import HostDtype, Load

PRICES_S = 1.0  # least interval between computing the costs of switches
READ_BYTES = {"cuda": 2**28, "cpu": 2**26}  # read to measure memory bandwidth, unless a profile has it
LINK_BYTES = 2**26
AHEAD = 512  # answer tokens that auto expects at most


class ModeSwitcher:
    """Builds modes from parameters and lets the KV manager enter them.

    It starts in the mode that ``asked`` names, with auto in full mode until auto chooses. Values set at run time
    (``given``, also by ``switch``) override each mode's settings. ``modes.SHARED`` parameters apply to all modes,
    others to the mode that they were set for. A mode that must first measure the model uses the ``stored`` tokens.
    ``system_tokens`` is the length of the conversation's system prompt in tokens.
    """

    def __init__(self, model: LoadedModel, asked: Load, stored: Stored) -> None:
        self._model = model
        self._asked = asked
        self.given = {mode: dict(params) for mode, params in asked.given.items()}
        self._stored = stored
        self.system_tokens = 0
        self._prices: tuple[Price, ...] = ()
        self._priced_at = float("-inf")
        self._widened: tuple[Mode, ModeParameters] | None = None
        self.narrow_at = sys.maxsize  # number of stored tokens at which ``narrow`` is due
        self.calibration_problems: list[UsageError] = []
        self.calibration = calibration.find(model.revision, self.calibration_problems.append)
        self.choice: TokenChoice | None = None
        self._measure_from = inspect.LONG
        self.parameters = self.merged(modes.REFERENCE if asked.mode == modes.AUTO else asked.mode, {})
        self.auto = Auto(is_quantized(asked.host_dtype))
        self._machine: tuple[float, float] | None = None
        self._new = dict(auto.NEW)
        self._fetched: tuple[Mode, int, int] | None = None

    def attach(self, kv: KVManager) -> None:
        """Set the KV manager to switch, which is in the mode of ``parameters``."""
        self._kv = kv

    def merged(self, mode: str, changes: Params) -> ModeParameters:
        """Return the parameters of ``mode``: its settings, values set so far, and ``changes``.

        Raises:
            UsageError: the mode or a parameter is unknown, or a value is out of range.
        """
        return modes.effective_params(mode, self._asked.mode_params, self.given, changes)

    def build(self, chosen: ModeParameters) -> Mode:
        """Build a mode without entering it.

        Raises:
            UsageError: parameters contradict each other; DoesNotFitError: the model cannot run in this mode.
        """
        traits = traits_of(self._model, self.calibration, self.choice)
        mode = build(chosen, geometry_of(self._model), traits, self.system_tokens)
        if self._model.ranks > 1 and not mode.chooses_by_head:
            raise UsageError(
                f"The {mode.name} mode does not work with split heads.",
                f"It chooses for all KV heads together, and each of {self._model.ranks} processes has "
                f"{self._model.kv_heads} of them.",
                "Use full, streaming or speculative (with unit=token), or --split layers.",
            )
        return mode

    def switch(self, mode: str, changes: Params) -> int:
        """Enter ``mode`` and remember ``changes`` for later modes; return the bytes moved to the device.

        With ``auto`` kvchat chooses modes from now on; any other mode turns that off. Without a ``mode``, the changes
        apply to the current one, or to auto if it is on and has these parameters; auto, if on, then chooses again.
        Changes for auto may contain those of other modes under the mode's name.

        Raises:
            UsageError, DoesNotFitError: it cannot be entered; the old mode stays.
        """
        goes_on = not mode and self.auto.is_on
        is_of_auto = goes_on and changes.keys() <= modes.AutoParameters.model_fields.keys()
        name = mode or (modes.AUTO if is_of_auto else self._kv.mode.name)
        chosen = [self.merged(one, params) for one, params in modes.by_mode(name, changes).items()]
        if name != modes.AUTO and not goes_on:
            moved = self.enter(chosen[0])
            modes.remember(self.given, name, changes)
            self.auto.is_on = False
            return moved + self._raise_budget()
        for one in chosen:
            if one.name != modes.AUTO:
                self.build(one)
            self.check_pinned(one, self.system_tokens, self._kv.state.pins)
        for other, params in modes.by_mode(name, changes).items():
            modes.remember(self.given, other, params)
        parameters, tokens = self.merged(modes.AUTO, {}), self._kv.total + AHEAD
        assert isinstance(parameters, modes.AutoParameters)
        self.auto.begin(parameters)
        return self.follow(self.decide(tokens), tokens)

    def enter(self, chosen: ModeParameters) -> int:
        """Enter the mode of these parameters; return the bytes moved to the device."""
        with explained(self._kv, f"entering the {chosen.name} mode"):
            mode = self.build(chosen)
            if mode.context_policy.is_final:
                self.check_context(self._kv.total)
            self.check_pinned(chosen, self.system_tokens, self._kv.state.pins)
            with torch.inference_mode():
                moved = self._kv.switch(mode)
        self._fetched = mode, self._kv.state.steps, self._kv.state.transfer.totals.moved
        self.parameters = chosen
        return moved + self._calibrate_heads()

    def calibrate(self) -> int:
        """Measure the model on the stored tokens, if the mode waits for that and there are enough of them.

        Raise a budget that the user did not set if the conversation has outgrown it. If memory runs out, this is
        repeated after the next prompt. Returns the bytes moved to the device.
        """
        return self._calibrate_heads() + self._raise_budget()

    def _calibrate_heads(self) -> int:
        if self._kv.mode.needs_calibration:
            with suppress(DoesNotFitError), explained(self._kv, "measuring the model's heads"):
                self.calibration = calibration.on_prompt(self._model, self._stored.ids)
                return self.enter(self.parameters) if self.calibration else 0
        return 0

    def _raise_budget(self) -> int:
        mode, state, before = self._kv.mode, self._kv.state, self.choice
        if not mode.wants_choice or state.total < self._measure_from or not state.query.any():
            return 0
        with suppress(DoesNotFitError), explained(self._kv, "measuring the model's attention"):
            budget, known = mode.report().params["budget"], mode.choice
            found = inspect.choose(state, budget)
            self._measure_from = 2 * state.total
            if found.budget == budget:
                self.choice = mode.choice = known or found
                return 0
            params = known.params if known else {}
            self.choice = replace(found, **{name: params[name] for name in params.keys() - {"budget"}})
            try:
                return self.enter(self.parameters)
            except KvchatError:
                self.choice = before
                raise
        return 0

    def note_system_tokens(self, tokens: int) -> None:
        """Set the length of the system prompt; re-enter the mode if it changed, because modes may keep it as sinks."""
        self.system_tokens = tokens
        if self._kv.mode.system_tokens != tokens:
            self.enter(self.parameters)

    def prices(self) -> tuple[Price, ...]:
        """Return the cost of entering each of the other modes now."""
        return tuple(self._price(mode) for mode in modes.mode_names() if mode != self._kv.mode.name)

    def recent_prices(self) -> tuple[Price, ...]:
        """Return ``prices``, at most ``PRICES_S`` old."""
        if time.monotonic() - self._priced_at >= PRICES_S:
            self._prices, self._priced_at = self.prices(), time.monotonic()
        return self._prices

    def check_context(self, tokens: int) -> None:
        """Refuse a conversation longer than the model's context."""
        if tokens > self._model.context:
            raise ContextFullError(
                "The conversation does not fit the model's context.",
                f"It has {tokens:,} tokens; {self._model.name} was made for {self._model.context:,}.",
                "/mode streaming (or --mode streaming) continues beyond it. Or shorten the question, or start another "
                "conversation with /new. Nothing stored is lost.",
                tokens,
            )

    def check_prompt(self, tokens: int) -> None:
        """Refuse a conversation of ``tokens`` tokens if it exceeds the context and the mode cannot continue there."""
        if self._kv.mode.context_policy.is_final:
            self.check_context(tokens)

    def check_pinned(self, chosen: ModeParameters, system_tokens: int, messages: Sequence[int]) -> None:
        """Check that the tokens pinned at ``messages``, and ``system_tokens`` if they are pinned, leave enough room.

        Raises:
            TooMuchPinnedError: they leave too little of the model's context.
        """
        system = system_tokens if chosen.pin_system else 0
        pinned = sum(position >= system for position in messages)
        refuse_too_much(self._model.name, self._model.context, pinned, system)

    # ---- auto

    def decide(self, tokens: int, measured: float | None = None) -> Choice | None:
        """Return auto's choice for an answer that ends at ``tokens``; None to keep the current setup.

        During an answer, ``measured`` is the time per token in seconds.
        """
        if not self.auto.is_on:
            return None
        possible = [setup for setup in self._setups(tokens) if setup not in self.auto.refused]
        if measured is None:
            if self.has_spilled:
                self.auto.choice = None
            return self.auto.between(possible, self._kv.state.steps) if possible else None
        return self.auto.within(possible, self._kv.state.steps, measured)

    def follow(self, choice: Choice | None, tokens: int, measured: float | None = None) -> int:
        """Enter auto's choice, or the next one if that is refused; return the bytes moved."""
        moved, state = 0, self._kv.state
        quantized = state.quantizes
        while choice:
            try:
                self._kv.quantize_pages(choice.setup.quantizes)
                is_lacking = self._spills_needlessly(choice.setup) or self._kv.mode.drafts_failed
                is_in_force = choice.setup.parameters == self.parameters and not is_lacking
                moved = 0 if is_in_force else self.enter(choice.setup.parameters)
                self.auto.entered(choice, state.steps)
                break
            except KvchatError:
                self._kv.quantize_pages(quantized)
                self.auto.refused.append(choice.setup)
                choice = self.decide(tokens, measured)
        self.auto.refused.clear()
        return moved

    @property
    def has_spilled(self) -> bool:
        """True if full mode reads K/V from RAM although auto found room for all: it must be entered again."""
        return self.auto.is_on and self.auto.choice is not None and self._spills_needlessly(self.auto.choice.setup)

    def _spills_needlessly(self, setup: Setup) -> bool:
        """True if full mode reads K/V from RAM although all fit: growing slots had no room for the old and new copy."""
        return bool(getattr(self._kv.mode, "spills", False)) and not setup.over_link

    def note_speed(self, measured: float | None) -> None:
        """Tell auto that a token of the current answer took ``measured`` seconds, unless that is unknown."""
        if self.auto.is_on and measured is not None and not self.has_spilled:
            self._note_fetched()
            self.auto.note(self._setups(self._kv.total), measured)

    def _note_fetched(self) -> None:
        """Record what share of its budget the current mode has fetched per step since the last call."""
        mode, state, before = self._kv.mode, self._kv.state, self._fetched
        self._fetched = mode, state.steps, state.transfer.totals.moved
        budget = getattr(self.parameters, "budget", None)
        if budget and mode.name in self._new and before and before[0] is mode and state.steps > before[1]:
            pairs = (self._fetched[2] - before[2]) / (state.steps - before[1])
            self._new[mode.name] = pairs / (budget * state.geometry.layers * state.geometry.kv_heads)

    def _setups(self, tokens: int) -> list[Setup]:
        state, kv, model = self._kv.state, self._kv, self._model
        # A token reads only one row of an untied embedding table.
        table = 0 if is_tied(model.model) else model.model.get_input_embeddings().weight.nbytes
        on_host = available.host_free()
        on_device = on_host if state.geometry.unified else available.free_bytes(state.device)
        free = on_device + kv.device_bytes, on_host + state.host.nbytes
        device, host = map(available.usable, free)
        # Measured only if it may be needed, because a prompt takes part of the free memory.
        may_spill = state.ops.reads_staged and tokens * state.geometry.token_bytes > device // 2
        cpu = known.cpu if may_spill and (known := host_attention.measured(state.host)) else 0.0
        machine = Machine(*self._rates(), model.weight_bytes - table, device, host, self._new, cpu)
        page = state.geometry.page
        quantized = page * sum(state.host.quantized[: state.total // page])
        in_pages = state.total - quantized, quantized, self.auto.quantizes
        conversation = Conversation(tokens, *in_pages, self.system_tokens, tuple(state.pins))

        def merged(mode: str, changes: Params) -> ModeParameters:
            """Merge auto's own parameters into each mode that has them."""
            known = modes.registered()[mode].model_fields
            asked = self.auto.parameters.model_dump(include=set(known), exclude_unset=True)
            return self.merged(mode, asked | changes)

        return auto.setups(machine, state.geometry, traits_of(model, self.calibration), conversation, merged)

    def _rates(self) -> tuple[float, float]:
        """Return the bandwidths of device memory and PCIe (0 without a GPU), from the profile or measured once."""
        if self._machine is None:
            asked, device = self._asked, self._model.device
            read = asked.read_bytes_per_s or rates.read(device, self._model.dtype, READ_BYTES[device.type])
            has_link = device.type == "cuda"
            link = (asked.link_bytes_per_s or rates.link(device, True, LINK_BYTES)) if has_link else 0.0
            self._machine = read, link
        return self._machine

    # ---- recovery

    def recover(self, level: Level) -> None:
        """Let the mode read more for a while."""
        self.narrow()
        mode = self._kv.mode
        if not mode.widens:
            with torch.inference_mode(), explained(self._kv, "restoring tokens"):
                self._kv.recover(level)
        elif level in WIDER:
            narrow = self.parameters
            budget = mode.report().params["budget"] * WIDER[level]
            with suppress(DoesNotFitError):
                self.enter(narrow.model_copy(update=(mode.choice.params if mode.choice else {}) | {"budget": budget}))
                self._widened, self.narrow_at = (self._kv.mode, narrow), self._kv.total + RECENT

    def narrow(self) -> None:
        """Return to the requested budget, unless another mode was entered since."""
        if self._widened:
            mode, narrow = self._widened
            self._widened, self.narrow_at = None, sys.maxsize
            if self._kv.mode is mode:
                self.enter(narrow)

    def _price(self, mode: str) -> Price:
        try:
            built = self.build(self.merged(mode, {}))
            if built.context_policy.is_final:
                self.check_context(self._kv.total)
            return Price(mode, **self._kv.check_switch(built, self._asked.link_bytes_per_s)._asdict())
        except KvchatError as error:
            return Price(mode, refusal=str(error))


def is_quantized(host_dtype: HostDtype) -> bool:
    """True if this format stores pages in 8 bits."""
    if host_dtype not in (known := get_args(HostDtype)):
        raise UsageError(f'K/V pages cannot be stored in "{host_dtype}".'[:200], did_you_mean(host_dtype, known))
    return host_dtype == "int8"
