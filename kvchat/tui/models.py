"""Loading another model, downloading one in a process of its own, and the table of a memory plan."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from kvchat import libraries, process
from kvchat.config.schema import checked_model
from kvchat.errors import INSTEAD, EngineError, KvchatError, ModelError, UsageError
from kvchat.foreign_text import visible
from kvchat.models import catalog
from kvchat.models.catalog import FoundModel
from kvchat.paths import is_server
from kvchat.protocol.client import EngineClient
from kvchat.protocol.figures import MemoryPlan, Planned, Proposal
from kvchat.protocol.messages import HostDtype, KeepPages, Load, Plan, Quantize, SetTemplateArgs, Stop, parse_args
from kvchat.tui.state import AppConfig, ChatState, Phase, no_engine
from kvchat.tui.view import ChatView, Remedy, load_anyway
from kvchat.units import count, figure, size

ANSWER_POLL_S = 0.2
SERVER = "server"  # the kind of a server that does not respond
DOWNLOAD = process.python("-m", "kvchat.models.download", str(os.getpid()))
# Values of --quantize to put in a command; other names are formats of quantized checkpoints.
CHOICES = {*get_args(Quantize)} - {"auto", "none"}
FLOOR = (
    "floor: reading the weights once, at the rate measured by kvchat bench decode --save-profile; no token is faster"
)
PLANNED = {
    "weights": "the model's weights, by how they are quantized",
    "K/V read": "what each mode holds besides the weights to read K/V, once the conversation is as long as planned",
    "unpacked": "all weights in RAM while loading, before they are requantized",
    "streamed from RAM": "what full mode with resident reads from RAM for every token, with the named weights",
    "recurrent state": "layers that keep a fixed-size state instead of K/V",
    "workspace": "temporary memory for computing: an estimate",
    "K/V stored": "the K/V of all tokens in RAM, in every mode; on a CPU full mode reads them there",
    "snapshots": "saved copies of the recurrent state, at most",
    "free": "unused memory",
    "measured": "what the loaded model takes now, next to what was planned; memory allocated for a longer "
    "conversation stays allocated",
}
"""What the rows of ``/plan`` mean, by how their names begin."""


@dataclass(eq=False)
class Models:
    """The model ``in_use``, which a restart loads again, and those being loaded, downloaded or planned for."""

    config: AppConfig
    state: ChatState
    client: EngineClient
    view: ChatView
    restart: Callable[[], Awaitable[None]]

    def __post_init__(self) -> None:
        self.in_use = self._base = self.config.load
        self._used = {self.in_use.model}  # in this session, some of them outside the folders that are searched
        self._asked: Load | None = None
        self._keeps_old = False
        self._stops = 0
        self._plans = 0  # requested and not answered yet
        self.download = Download(self.config.download_command)
        self._downloading: asyncio.Task[None] | None = None

    @property
    def is_working(self) -> bool:
        """True while a model is downloaded or planned for, which the engine's phase does not show."""
        return self._downloading is not None or (self._plans > 0 and self.state.phase is not Phase.DOWN)

    async def show_all(self, looks_around: bool = False) -> None:
        """Show the models of this machine and of the servers in the settings and in use; see ``of_servers``."""

        def on_this_machine() -> list[FoundModel]:
            found = catalog.find(self.config.model_folders)
            missing = self._used - {model.name for model in found}
            return found + [model for name in sorted(missing) if (model := catalog.at(Path(name)))]

        async def find() -> list[FoundModel]:
            served = of_servers(dict.fromkeys((*self.config.servers, *in_use)), looks_around)
            here, there = await asyncio.gather(asyncio.to_thread(on_this_machine), served)
            return here + there

        in_use = [self.in_use.model] if is_server(self.in_use.model) else []
        await self.view.show_models(find)

    # ---- loading ---------------------------------------------------------------------------------

    async def choose(self, name: str, options: dict[str, Any]) -> None:
        """Load another model, downloaded first if necessary; the next question lets it process the conversation."""
        load = self._load(name, options)
        if await asyncio.to_thread(catalog.is_here, load.model):
            self._require_idle()
            await self._begin(load)
        elif self._downloading is not None:
            raise UsageError("Another model is being downloaded.", hint="/stop stops it; it can be resumed later.")
        else:
            self._downloading = asyncio.create_task(self._fetch(load))

    def load_in_use(self) -> None:
        """Let a fresh engine load the model in use, in the current mode; requested plans are lost."""
        self._plans = 0
        self._send(self.in_use)

    def loaded(self) -> bool:
        """Note that a model was loaded; return False if it is the old one, because another could not be loaded."""
        if self._keeps_old:
            self._keeps_old = False
            return False
        asked, self._asked = self._asked or self.in_use, None
        if asked != self.in_use:
            self.state.forget_engine()
            self.view.show_snapshot(None)
        self.in_use = asked
        self._used.add(asked.model)
        return True

    def failed(self, is_fatal: bool) -> bool:
        """Note a failure; return True if the old model will report that it is loaded, because another could not be."""
        was_loading, self._asked = self._asked is not None, None
        self._keeps_old = was_loading and not is_fatal
        return self._keeps_old

    def remedies(self) -> tuple[Remedy, ...]:
        """Return the remedies if the model being loaded does not fit."""
        return load_anyway(self._asked, self._base) if self._asked is not None else ()

    async def stop(self) -> None:
        """Stop loading or downloading a model.

        Loading the first model stops at the second call. One more call ends an engine that does not stop, and a fresh
        one loads the model in use.
        """
        if self._asked is None or self.state.phase is not Phase.LOADING:
            self.download.stop()
            return
        self._stops += 1
        name, needed = self._asked.model, 1 if self.state.info is not None else 2
        if self._stops == needed:
            self.client.send(Stop())
            self.view.toast(f"Stopping the loading of {name}; /stop again ends the engine.")
        elif self._stops > needed:
            self._asked = None
            await self.restart()
        else:
            self.view.toast(f"/stop again stops loading {name}.")

    def keep_pages(self, host_dtype: HostDtype) -> None:
        """Set the number format of pages of K/V that fill up from now on, also during an answer."""
        self.in_use, self._base = (replace(load, host_dtype=host_dtype) for load in (self.in_use, self._base))
        if self.state.info is not None and not self.state.is_served and self.state.phase is not Phase.DOWN:
            self.client.send(KeepPages(host_dtype))

    async def use_template(self, file: str) -> None:
        """Load the model in use again with the chat template in ``file``; empty for its own."""
        self._require_idle()
        await self._begin(replace(self.in_use, chat_template=file))

    def set_template_args(self, args: Sequence[str]) -> None:
        """Give the chat template these variables, from the next answer on."""
        parse_args(args)
        if args and (info := self.state.info) and not info.takes_variables:
            raise UsageError(f"{info.server} accepts no chat template variables.", hint=INSTEAD)
        self.in_use, self._base = (replace(load, template_args=tuple(args)) for load in (self.in_use, self._base))
        if self.state.info is not None and self.state.phase is not Phase.DOWN:
            self.client.send(SetTemplateArgs(tuple(args)))

    async def _begin(self, load: Load) -> None:
        if self.state.phase is Phase.DOWN:
            self.in_use = load
            await self.restart()
        else:
            self._send(load)

    def _send(self, load: Load) -> None:
        self._asked, self._stops = load, 0
        self.state.enter_phase(Phase.LOADING, f"loading {load.model}")
        self.view.show_state(self.state)
        mode = load.mode if self.state.is_served else self.state.asked  # a server has no mode
        self.client.send(replace(load, mode=mode, given=self.state.given))

    def _load(self, name: str, options: dict[str, Any]) -> Load:
        is_other = name != self._base.model  # with another template
        base = replace(self._base, chat_template="", template_args=()) if is_other else self._base
        return replace(base, **checked_model(name, options))

    def _require_idle(self) -> None:
        if self.state.phase.busy:
            raise UsageError("An answer is in progress.", hint="/stop stops it; then choose the model.")
        if self.state.phase is Phase.LOADING:
            raise UsageError("A model is being loaded.", hint="/stop stops it; then choose another one.")

    # ---- downloading -----------------------------------------------------------------------------

    async def _fetch(self, load: Load) -> None:
        """Download a model and, after the answer in progress, load it."""
        self._show_download(f"Starting the download of {load.model}")
        try:
            if await self.download.run(load.model, self._show_download):
                while self.state.phase.busy or self.state.phase is Phase.LOADING:
                    await asyncio.sleep(ANSWER_POLL_S)
                await self._begin(load)
            else:
                self.view.toast(f"The download was stopped; /model {load.model} resumes it.", timeout=10)
        except KvchatError as error:
            self.view.add_error(error)
        finally:
            self._downloading = None
            self._show_download("")

    def _show_download(self, stage: str) -> None:
        self.state.download = stage
        self.view.show_state(self.state)

    # ---- planning --------------------------------------------------------------------------------

    def plan(self, name: str, context: int | None) -> None:
        """Request a memory plan of a model, by default the one in use."""
        if self.state.phase is Phase.DOWN or not self.client.alive:
            raise no_engine()
        load = self._load(name, {}) if name else self.in_use
        load = replace(load, given=self.state.given)
        self.view.toast(f"Planning memory for {load.model} …")
        self.client.send(Plan(load, context))
        self._plans += 1

    def show_plan(self, planned: Planned) -> None:
        """Show a plan as a table; for the model in use, with measured bytes next to it."""
        self._plans = max(0, self._plans - 1)  # a recording contains plans that were not requested here
        if planned.plan is None:
            self.view.add_error(UsageError(f"{planned.model} cannot be planned for.", planned.refusal))
            return
        measured = dict[str, int]()  # bytes, by the key of a row
        s, info = self.state.snapshot, self.state.info
        if s and info and planned.model == self.in_use.model:
            measured[f"weights {info.weights or 'none'}"] = s.weight_bytes
            if s.total:
                measured |= {"state": s.state_bytes, "snapshots": s.snapshot_bytes}
                measured |= {"read now": s.kv_device_bytes - s.state_bytes}
                measured |= {"stored now": s.kv_host_bytes - s.snapshot_bytes}
        self.view.add_note("\n".join(plan_lines(planned.plan, measured)))


async def of_servers(addresses: Iterable[str], looks_around: bool = False) -> list[FoundModel]:
    """Return the models of the servers at these addresses; a server that does not respond has a ``problem``.

    ``looks_around`` adds servers on this machine's usual ports.
    """
    named, found = list(addresses), {}
    if not (named or looks_around):
        return []
    try:
        libraries.require("remote", f"Talking to {named[0] if named else 'servers'}")
    except UsageError as refused:
        return [FoundModel(text, SERVER, problem=str(refused)) for text in named or ("servers",)]
    from kvchat.remote import servers  # imports httpx2

    around = await servers.find_usual(named) if looks_around else []
    for server in await servers.find(named) + around:
        if isinstance(server, tuple):
            text, error = server
            found[text] = FoundModel(text, SERVER, problem=str(error))
            continue
        for model in server.models:
            facts = (f"context {count(model.context)}" if model.context else "", "loaded" if model.is_loaded else "")
            name = server.address.name(model.id)
            found[name] = FoundModel(name, server.kind, served=" · ".join(filter(None, (model.weights, *facts))))
    return list(found.values())


class Download:
    """Downloads one model at a time by ``command``, whose last argument is the model's name."""

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = tuple(command or DOWNLOAD)
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopped = False

    async def run(self, name: str, report: Callable[[str], None]) -> bool:
        """Download the model ``name``, reporting each stage; return False if it was stopped."""
        self._is_stopped = False
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                name,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(
                "The download cannot be started.", f"{self._command[0]}: {error.strerror}.", "Install kvchat again."
            ) from None
        if self._is_stopped:  # while it was being started
            self.stop()
        try:
            return await self._follow(self._process, name, report)
        finally:
            self.stop()
            await self._process.communicate()  # an unread pipe would outlive the event loop
            self._process = None

    def stop(self) -> None:
        """End the download; the cache keeps what has arrived."""
        self._is_stopped = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _follow(self, process: asyncio.subprocess.Process, name: str, report: Callable[[str], None]) -> bool:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            if "done" in said:
                return True
            if "error" in said:
                raise ModelError(*map(visible, said["error"]))
            report(visible(said["stage"]))
        if self._is_stopped:
            return False
        raise EngineError(f"The download of {name} ended unexpectedly.", hint=f"/model {name} resumes it.")


class Row(NamedTuple):
    """A line of the table; ``key`` names what is measured for it."""

    key: str
    name: str
    place: str
    amount: str


def plan_lines(made: MemoryPlan, measured: Mapping[str, int] | None = None) -> Iterator[str]:
    """Yield the table as lines; ``measured`` holds bytes of a loaded model by the key of a row."""
    yield f"{made.model} ({made.architecture}) in {made.dtype} on {made.device}, {count(made.context)} tokens"
    yield ""
    yield from _table("", list(_rows(made)), measured)
    if made.floor_ms:
        yield FLOOR
    yield ""
    if measured and (stored := made.stored) and stored.tokens:
        where = "RAM" if made.device == "cpu" else made.device
        read = f"K/V read, {stored.mode}, up to {count(stored.device_room)}"
        kept = f"K/V stored, up to {count(stored.host_room)}"
        rows = [
            Row("read now", read, where, size(stored.device_bytes, 2)),
            Row("stored now", kept, "RAM", size(stored.host_pool, 2)),
        ]
        yield from _table(f"{count(stored.tokens, 'token')} now", rows, measured)
        yield ""
    yield from _proposed(made)


def command_line(made: MemoryPlan, proposal: Proposal) -> str:
    """Return the command that starts kvchat as planned and proposed."""
    is_named = proposal.quantize in CHOICES or "quantize" in made.given  # "none" overrides the settings
    quantize = f" --quantize {proposal.quantize}" if is_named else ""
    budget = "" if proposal.budget is None else f" --budget {proposal.budget}"
    return f"{_started(made)} --mode {proposal.mode}{budget}{quantize}"


def _started(made: MemoryPlan) -> str:
    given = {name: value for name, value in made.given.items() if name != "quantize"}
    options = (word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value))
    return shlex.join(["kvchat", "-m", made.model, *options])


def _table(title: str, rows: list[Row], measured: Mapping[str, int] | None) -> Iterator[str]:
    name, place = max(len(title), *(len(row.name) for row in rows)), max(len(row.place) for row in rows)
    if measured:
        yield f"{title:<{name}}  {'':<{place}}  {'planned':<10}  measured"
    for row in rows:
        found = size(measured[row.key], 2) if measured and row.key in measured else ""
        yield f"{row.name:<{name}}  {row.place:<{place}}  {row.amount:<10}  {found}".rstrip()


def _rows(made: MemoryPlan) -> Iterator[Row]:
    where = "RAM" if made.device == "cpu" else made.device
    for name, needed in made.weights.items():
        chosen = ", by default" if name == made.by_default != "none" else ""
        unpacked = f", unpacked from {size(made.packed, 2)}" if made.packed and name == "none" else ""
        kind = "not quantized" if name == "none" else name
        yield Row(f"weights {name}", f"weights, {kind}{chosen}{unpacked}", where, size(needed, 2))
        for device, nbytes in made.elsewhere.get(name, {}).items():
            yield Row(f"weights {name} {device}", "  of it there", device, size(nbytes, 2))
        if name in made.floor_ms:
            yield Row(f"floor {name}", "  floor, a token", where, figure(made.floor_ms[name], "ms", 1))
    for name, need in made.modes.items():
        given = [f", {key} {need.params[key]}" for key in ("budget", "resident") if need.params.get(key)]
        read = f"K/V read, {name}{''.join(given)}"
        held = size(need.device_bytes, 2) if need.device_bytes else "nothing more"
        yield Row(f"read {name}", read, where, need.refusal or held)
        if need.link_bytes:
            streamed = f"  streamed from RAM per token, with weights, {made.beside}"
            yield Row(f"link {name}", streamed, "RAM", size(need.link_bytes, 2))
    if made.unpacked:
        yield Row("unpacked", "unpacked while it is loaded", "RAM", size(made.unpacked, 2))
    if made.state:
        yield Row("state", "recurrent state", where, size(made.state, 2))
    yield Row("workspace", "workspace, estimated", where, size(made.workspace, 2))
    yield Row("stored", "K/V stored", "RAM", size(made.host_pool, 2))
    if made.snapshots:
        yield Row("snapshots", "snapshots of the state", "RAM", size(made.snapshots, 2))
    free = "free without the model in use" if made.stored else "free"
    if made.device != "cpu":
        yield Row("device free", free, made.device, size(made.device_free, 2))
    for device, nbytes in made.others_free.items():
        yield Row(f"{device} free", free, device, size(nbytes, 2))
    yield Row("host free", free, "RAM", size(made.host_free, 2))


def _proposed(made: MemoryPlan) -> Iterator[str]:
    if made.proposal is None:
        yield "Nothing fits: use a smaller model or a shorter context."
        yield f"{_started(made)} --force loads it anyway."
        return
    if made.proposal.install:
        yield made.proposal.install
    yield command_line(made, made.proposal)
    yield from (f"  gives up {each}" for each in made.proposal.gave_up or ("nothing",))
