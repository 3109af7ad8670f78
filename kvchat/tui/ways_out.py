"""Ways out where memory ran out or a model does not fit: commands that a click runs."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

from kvchat.config import modes
from kvchat.errors import UsageError
from kvchat.protocol.messages import Load
from kvchat.tui.state import ChatState


@dataclass(frozen=True)
class WayOut:
    """``doc`` says what ``lines``, slash commands one after the other, do."""

    doc: str
    lines: tuple[str, ...]


def ways_out(state: ChatState, is_cut_off: bool) -> tuple[WayOut, ...]:
    """Half the budget, the mode that holds least, no model.

    An answer that ``is_cut_off`` goes on after the first two; else its question lies in the prompt again.
    """
    after = ("/continue",) if is_cut_off else ()
    goes_on = " and go on" if is_cut_off else ", then ask again"
    found = []
    if (half := _half_budget(state)) is not None:
        found.append(WayOut(f"halve the budget{goes_on}", (f"/budget {half}", *after)))
    if state.mode != modes.HOLDS_LEAST:
        found.append(WayOut(f"take the mode that holds least{goes_on}", (f"/mode {modes.HOLDS_LEAST}", *after)))
    return (*found, WayOut("unload the model, which frees all its memory", ("/unload",)))


def load_anyway(load: Load, settings: Load) -> tuple[WayOut, ...]:
    """Loading a model that does not fit, with what was given beside the ``settings``, unless that has been tried."""
    if load.force:
        return ()
    given = (name for name in ("device", "dtype", "quantize") if getattr(load, name) != getattr(settings, name))
    words = (quote(load.model), *(f"{name}={getattr(load, name)}" for name in given), "force=true")
    return (WayOut("load it anyway", (f"/model {' '.join(words)}",)),)


def _half_budget(state: ChatState) -> int | None:
    """Half of what the mode may read; None where it has no budget, or one that cannot be halved."""
    budget = state.params.get("budget")
    if not isinstance(budget, int):
        return None
    try:
        modes.parse(state.mode, {**state.params, "budget": budget // 2})
    except UsageError:
        return None
    return budget // 2
