"""``kvchat``, ``kvchat chat`` and ``kvchat replay``: the application, on the whole screen or line by line.

This module also composes the questions of other commands from their arguments, files and piped text. ``replay`` needs
neither torch nor a model.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvchat
from kvchat import files, paths, process
from kvchat.cli.output import note
from kvchat.cli.profile import load_settings
from kvchat.config import modes, profiles, sources
from kvchat.config.schema import Settings
from kvchat.config.sources import Key, Resolved, SettingsSource
from kvchat.conversations.attachments import MAX_BYTES, fenced
from kvchat.errors import UsageError
from kvchat.protocol import recording
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Keeping, Load, Turn

if TYPE_CHECKING:
    from kvchat.tui.state import AppConfig


PATIENCE_S = 3.0  # after which a line says that stdin is still being read
ENGINE = process.python("-m", "kvchat.replay.engine")


def chat(flags: SettingsSource, resume: bool, plain: bool, record: Path | None = None, prompt: str = "") -> int:
    """Run the application until the user leaves; return the exit code.

    It runs line by line if ``plain``, without a terminal, or on one that can only print. ``record`` is a new file for
    the engine's events. ``prompt`` is the first question; piped text is attached to it.
    """
    problems: list[str] = []
    resolved = load_settings(flags, problems.append)
    from kvchat.protocol.recording import Recorder
    from kvchat.tui.actions import is_command
    from kvchat.tui.state import AppConfig

    asked = typed(prompt)
    is_question = asked.strip() and not is_command(asked)
    chosen = resolved.settings
    config = AppConfig(
        load=replace(load_of(chosen), keeping=keeping(chosen, chosen.ui.conversations, paths.saved_kv_dir())),
        sampling=chosen.sampling.sampling(),
        system=chosen.model.system or None,
        theme=chosen.ui.theme,
        theme_dirs=(paths.user_themes_dir(),),
        keys=chosen.keys.given(),
        log_file=paths.log_file(),
        history_file=paths.history_file() if chosen.ui.history else None,
        database=paths.database() if chosen.ui.conversations else None,
        resume=resume,
        keeps_new=resume or _is_terminal(sys.stdin) or is_asked_for(resolved, ("ui", "conversations")),
        asked_mode=chosen.kv.mode if is_asked_for(resolved, ("kv", "mode")) else "",
        asked_params=_asked_params(resolved),
        prompt=asked,
        piped=as_file(files.for_a_model(piped(), "stdin")) if is_question else "",
        recorder=Recorder(record, kvchat.__version__) if record else None,
        model_folders=tuple(map(Path, chosen.model.folders)),
        servers=chosen.model.servers,
        profile=profiles.find(chosen.model.device).describe(),
        problems=(*problems, *modes.problems()),
        resolved=resolved,
        config_file=paths.config_file(),
    )
    return start(config, plain)


def start(config: AppConfig, plain: bool) -> int:
    """Run the application on the whole screen or line by line; return the exit code."""
    if plain or prefers_lines():
        from kvchat.tui.plain.chat import run as run_plain

        return run_plain(config)
    from kvchat.tui import themes
    from kvchat.tui.app import run

    if ("ui", "theme") not in config.resolved.origins:
        config = replace(config, theme=themes.suited())
    return run(config)


def prefers_lines() -> bool:
    """Return whether to run line by line: without a terminal, on one that prints only ASCII or lines, or by request.

    ``ACCESSIBLE`` requests lines. stderr must be a terminal too, because Textual draws on it.
    """
    if os.environ.get("TERM") == "dumb" or os.environ.get("ACCESSIBLE", "") not in ("", "0"):
        return True
    return not (all(map(_is_terminal, (sys.stdin, sys.stdout, sys.stderr))) and _draws(sys.stdout))


def load_of(chosen: Settings) -> Load:
    """Return what the engine loads: the model, its device and the mode."""
    measured = profiles.find(chosen.model.device).measured
    return Load(
        **chosen.model.of_load(),
        mode=chosen.kv.mode,
        mode_params={mode: params for mode in modes.choosable() if (params := chosen.kv.params(mode))},
        host_dtype=chosen.kv.host_dtype,
        link_bytes_per_s=measured.link_bytes_per_s,
        read_bytes_per_s=measured.read_bytes_per_s,
    )


def keeping(chosen: Settings, on_disk: bool, folder: Path) -> Keeping:
    """Return how much K/V to keep; on disk only if conversations are saved, because K/V reveal their text."""
    return Keeping(int(chosen.kv.parked_gib * 2**30), int(chosen.kv.saved_gib * 2**30), str(folder) if on_disk else "")


def is_asked_for(resolved: Resolved, key: Key) -> bool:
    """Return whether a setting was given for this run, by a flag or an environment variable."""
    return resolved.origins.get(key, "").startswith(("--", "KVCHAT_"))


def _asked_params(resolved: Resolved) -> dict[str, Params]:
    """Return the mode parameters given for this run, by mode."""
    asked: dict[str, Params] = {}
    for key in resolved.origins:
        if key[0] == "kv" and len(key) == 3 and is_asked_for(resolved, key):
            asked.setdefault(key[1], {})[key[2]] = resolved.settings.kv.params(key[1])[key[2]]
    return asked


def _draws(stream: Any) -> bool:
    """Return whether the stream's encoding has the characters that the screen is drawn with."""
    try:
        return bool("╭─▓".encode(stream.encoding or "ascii"))
    except (LookupError, UnicodeEncodeError):
        return False


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def turns(prompt: str | None, named: Sequence[Path], system: str | None) -> tuple[Turn, ...]:
    """Return the turns of a command: the system prompt, if there is one, and the question with piped text.

    Raises:
        KvchatError: as ``piped`` and ``compose``.
    """
    asked = Turn("user", compose(prompt, named, piped()))
    return (Turn("system", system), asked) if system else (asked,)


def piped() -> bytes:
    """Return the bytes piped into stdin; none if it is a terminal.

    Raises:
        DoesNotFitError: there are more than any model reads, perhaps without end.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return b""
    waiting = threading.Timer(PATIENCE_S, note, ("reading stdin until it ends; < /dev/null asks without it.",))
    waiting.start()
    try:
        return files.limited(sys.stdin.buffer.read(MAX_BYTES + 1), MAX_BYTES, "stdin")
    finally:
        waiting.cancel()


def compose(prompt: str | None, named: Sequence[Path], piped: bytes) -> str:
    """Return the user's turn: the ``named`` files, piped text as another file, and the prompt.

    Without a prompt the piped text is the prompt.

    Raises:
        UsageError: the turn is empty, a file cannot be read, or something is not UTF-8.
        DoesNotFitError: a file is longer than any model reads.
    """
    parts = [fenced(str(path), _read(path)) for path in named]
    written, context = typed(prompt or ""), files.for_a_model(piped, "stdin")
    parts += [context, written] if not written.strip() else [as_file(context), written]
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise UsageError("The prompt is empty.", hint="Put it after the command, or pipe it in.")
    return text


def typed(prompt: str) -> str:
    """Return a prompt from the command line as text.

    Raises:
        UsageError: it has bytes that are not UTF-8, which Python has decoded to lone surrogates.
    """
    return files.for_a_model(prompt.encode("utf-8", "surrogateescape"), "The prompt")


def as_file(piped: str) -> str:
    """Return text that was piped in along with a prompt, fenced like a file; empty if it is blank."""
    return fenced("stdin", piped) if piped.strip() else ""


def _read(path: Path) -> str:
    """Return the text of a file, or of a pipe such as a shell's ``<(COMMAND)``."""
    try:
        if not path.is_fifo():
            return files.read_text(path, MAX_BYTES)
        with path.open("rb") as pipe:
            raw = pipe.read(MAX_BYTES + 1)
    except OSError as error:
        raise files.unreadable(str(path), error) from None
    return files.for_a_model(files.limited(raw, MAX_BYTES, str(path)), str(path))


def replay(file: Path | None, plain: bool) -> int:
    """Play ``file``, or the demonstration that comes with kvchat; return the exit code.

    Raises:
        UsageError: the file is not a recording, or a setting is wrong.
    """
    chosen = file or paths.bundled_recording()
    recording.read(chosen)  # before a screen hides the error
    from kvchat.tui.state import AppConfig

    resolved = sources.load()
    config = AppConfig(
        log_file=paths.log_file(),
        theme=resolved.settings.ui.theme,
        theme_dirs=(paths.user_themes_dir(),),
        keys=resolved.settings.keys.given(),
        engine_command=(*ENGINE, str(chosen.absolute())),
        replay=chosen.name,
        resolved=resolved,
    )
    return start(config, plain)
