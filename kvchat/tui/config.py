"""The application's settings: plain frozen data, filled by the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvchat.config import sources
from kvchat.config.sources import Resolved
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Load, Sampling
from kvchat.protocol.recording import Recorder


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """Options of the application; paths are absolute and need not exist yet.

    ``theme_dirs`` are the user's, beside the bundled themes. ``keys`` replaces keys by the id of their action.
    ``history_file`` None keeps the prompt history in memory, ``database`` None the conversations; ``resume`` opens the
    latest one. ``prompt`` is sent first, as if it were typed, with ``piped`` before it. ``model_folders`` are looked
    into for models. ``engine_command`` and ``download_command`` None start the real ones. ``profile`` names the
    profiles in force.
    New conversations are kept on disk where it ``keeps_new``. ``asked_mode`` and ``asked_params``, by mode, were asked
    for on the command line: they go before what the conversation gone on with was in.
    ``recorder`` notes what the engine reports, ``replay`` is the name of the recording that the engine plays.
    ``problems`` are shown once: settings that could not be used. ``resolved`` are all settings with their sources,
    ``config_file`` is where changed ones are saved; None saves none.
    """

    log_file: Path
    load: Load = field(default_factory=Load)
    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    theme: str = "kvchat-dark"
    theme_dirs: tuple[Path, ...] = ()
    keys: dict[str, str] = field(default_factory=dict)
    history_file: Path | None = None
    database: Path | None = None
    resume: bool = False
    keeps_new: bool = True
    asked_mode: str = ""
    asked_params: dict[str, Params] = field(default_factory=dict)
    prompt: str = ""
    piped: str = ""
    model_folders: tuple[Path, ...] = ()
    engine_command: tuple[str, ...] | None = None
    download_command: tuple[str, ...] | None = None
    profile: str = ""
    recorder: Recorder | None = None
    replay: str = ""
    problems: tuple[str, ...] = ()
    resolved: Resolved = field(default_factory=sources.resolve)
    config_file: Path | None = None
