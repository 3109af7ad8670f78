"""The model in use, the one being loaded in its place, and a download."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from kvchat.config.schema import checked_model
from kvchat.errors import KvchatError, UsageError
from kvchat.models import catalog
from kvchat.protocol.figures import Planned
from kvchat.protocol.messages import HostDtype, KeepPages, Load, Plan, SetTemplateArgs, Stop, parse_args
from kvchat.tui.client import EngineClient
from kvchat.tui.config import AppConfig
from kvchat.tui.model_choice.downloads import Download
from kvchat.tui.model_choice.plan_table import plan_lines
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.view import ChatView
from kvchat.tui.ways_out import WayOut, load_anyway

ANSWER_POLL_S = 0.2


class Models:
    """``in_use`` is what a restart loads. ``restart`` replaces the engine by a fresh one."""

    def __init__(
        self,
        config: AppConfig,
        state: ChatState,
        client: EngineClient,
        view: ChatView,
        restart: Callable[[], Awaitable[None]],
    ) -> None:
        self.in_use = config.load
        self.folders = config.model_folders
        self.profile = config.profile
        self._base = config.load
        self._state, self._client, self._view, self._restart = state, client, view, restart
        self._asked: Load | None = None
        self._is_kept = False
        self._stops = 0
        self._plans = 0  # asked for, and not told yet
        self._download = Download(config.download_command)
        self._downloading: asyncio.Task[None] | None = None

    @property
    def is_working(self) -> bool:
        """True while a model is downloaded or planned for; the engine's phase shows neither."""
        return self._downloading is not None or (self._plans > 0 and self._state.phase is not Phase.DOWN)

    # ---- loading ---------------------------------------------------------------------------------

    async def choose(self, name: str, options: dict[str, Any]) -> None:
        """Load another model, which reads the conversation with the next question; from the hub after a download.

        Raises:
            UsageError: an unknown option or value, an answer is under way, or another model is being loaded.
        """
        load = self._load(name, options)
        if await asyncio.to_thread(catalog.is_here, load.model):
            self._require_idle()
            await self._begin(load)
        elif self._downloading is not None:
            raise UsageError(
                "Another model is being downloaded.", hint="/stop ends that; it can be gone on with later."
            )
        else:
            self._downloading = asyncio.create_task(self._fetch(load))

    def load_in_use(self) -> None:
        """Have a fresh engine load the model in use, in the present mode; of plans it knows nothing."""
        self._plans = 0
        self._send(self.in_use)

    def take(self) -> bool:
        """A model has been loaded; whether it is the one asked for, not the old one that stays."""
        if self._is_kept:
            self._is_kept = False
            return False
        asked, self._asked = self._asked or self.in_use, None
        if asked != self.in_use:
            self._state.forget_engine()
            self._view.show_snapshot(None)
        self.in_use = asked
        return True

    def give_up(self, is_fatal: bool) -> bool:
        """Something failed; whether the model in use reports itself next, because another one could not be loaded."""
        was_loading, self._asked = self._asked is not None, None
        self._is_kept = was_loading and not is_fatal
        return self._is_kept

    def ways_out(self) -> tuple[WayOut, ...]:
        """The ways out where the model being loaded does not fit."""
        return load_anyway(self._asked, self._base) if self._asked is not None else ()

    async def stop(self) -> None:
        """Stop what is being loaded or downloaded.

        The first model of all stops when asked twice. An engine that does not stop is ended, and the model that was in
        use loaded by a fresh one.
        """
        if self._asked is None or self._state.phase is not Phase.LOADING:
            self.stop_download()
            return
        self._stops += 1
        name, others = self._asked.model, self._state.info is not None
        if self._stops == 2 - others:
            self._client.send(Stop())
            self._view.toast(f"Loading {name} is being stopped; /stop once more ends the engine.")
        elif self._stops > 2 - others:
            self._asked = None
            await self._restart()
        else:
            self._view.toast(f"/stop once more ends loading {name}.")

    def keep_pages(self, host_dtype: HostDtype) -> None:
        """Keep pages of K/V that get full from now on exactly or in int8, also during an answer."""
        self.in_use, self._base = (replace(load, host_dtype=host_dtype) for load in (self.in_use, self._base))
        if self._state.info is not None and self._state.phase is not Phase.DOWN:
            self._client.send(KeepPages(host_dtype))

    async def use_template(self, file: str) -> None:
        """Load the model in use again with the chat template in ``file``, "" for its own.

        Raises:
            UsageError: an answer is under way, or a model is being loaded.
        """
        self._require_idle()
        await self._begin(replace(self.in_use, chat_template=file))

    def set_template_args(self, args: Sequence[str]) -> None:
        """Give the chat template these variables, from the next answer on.

        Raises:
            UsageError: one is not written as KEY=VALUE.
        """
        parse_args(args)
        self.in_use, self._base = (replace(load, template_args=tuple(args)) for load in (self.in_use, self._base))
        if self._state.info is not None and self._state.phase is not Phase.DOWN:
            self._client.send(SetTemplateArgs(tuple(args)))

    async def _begin(self, load: Load) -> None:
        if self._state.phase is Phase.DOWN:
            self.in_use = load
            await self._restart()
        else:
            self._send(load)

    def _send(self, load: Load) -> None:
        self._asked, self._stops = load, 0
        self._state.enter_phase(Phase.LOADING, f"loading {load.model}")
        self._view.show_state(self._state)
        self._client.send(replace(load, mode=self._state.mode, given=self._state.given))

    def _load(self, name: str, options: dict[str, Any]) -> Load:
        is_other = name != self._base.model  # whose template is another
        base = replace(self._base, chat_template="", template_args=()) if is_other else self._base
        return replace(base, **checked_model(name, options))

    def _require_idle(self) -> None:
        if self._state.phase.busy:
            raise UsageError("An answer is under way.", hint="/stop ends it; then choose the model.")
        if self._state.phase is Phase.LOADING:
            raise UsageError("A model is being loaded.", hint="/stop ends that; then choose another one.")

    # ---- downloading -----------------------------------------------------------------------------

    def stop_download(self) -> None:
        """Stop the download in progress; what has come is kept."""
        self._download.stop()

    async def _fetch(self, load: Load) -> None:
        """Download a model, wait for the answer in progress, if there is one, and load it."""
        self._show_download(f"Starting the download of {load.model}")
        try:
            if await self._download.run(load.model, self._show_download):
                while self._state.phase.busy or self._state.phase is Phase.LOADING:
                    await asyncio.sleep(ANSWER_POLL_S)
                await self._begin(load)
            else:
                self._view.toast(f"The download is stopped; /model {load.model} goes on with it.", timeout=10)
        except KvchatError as error:
            self._view.add_error(error)
        finally:
            self._downloading = None
            self._show_download("")

    def _show_download(self, stage: str) -> None:
        self._state.download = stage
        self._view.show_state(self._state)

    # ---- planning --------------------------------------------------------------------------------

    def plan(self, name: str, context: int | None) -> None:
        """Ask what a model would take, by default the one in use.

        Raises:
            UsageError: no engine runs.
        """
        if self._state.phase is Phase.DOWN or not self._client.alive:
            raise UsageError("The engine is down.", hint="/restart or the next question starts it again.")
        load = self._load(name, {}) if name else self.in_use
        load = replace(load, given=self._state.given)
        self._view.toast(f"What {load.model} takes is being worked out.")
        self._client.send(Plan(load, context))
        self._plans += 1

    def show_plan(self, planned: Planned) -> None:
        """Show a plan as a table, with what was measured beside it for the model in use."""
        self._plans = max(0, self._plans - 1)  # a recording tells plans that nobody has asked for
        if planned.plan is None:
            self._view.add_error(UsageError(f"{planned.model} cannot be planned for.", planned.refusal))
            return
        measured = self._measured() if planned.model == self.in_use.model else {}
        self._view.add_note("\n".join(plan_lines(planned.plan, measured)))

    def _measured(self) -> dict[str, int]:
        """Bytes of what is there once the model is loaded, by the keys of the table's rows."""
        snapshot, info = self._state.snapshot, self._state.info
        if not snapshot or not info:
            return {}
        loaded = {f"weights {info.weights or 'none'}": snapshot.weight_bytes}
        if not snapshot.total:
            return loaded
        return loaded | {
            "state": snapshot.state_bytes,
            "snapshots": snapshot.snapshot_bytes,
            "read now": snapshot.kv_device_bytes - snapshot.state_bytes,
            "stored now": snapshot.kv_host_bytes - snapshot.snapshot_bytes,
        }
