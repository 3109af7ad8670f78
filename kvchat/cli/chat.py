"""``kvchat``, ``kvchat chat`` and ``kvchat replay``: the application, on the whole screen or line by line.

The question of a command is its argument, the files before it and what was piped in. A recorded run is played without
torch and without a model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvchat
from kvchat import files, paths, process
from kvchat.cli.profile import load_settings
from kvchat.config import modes, profiles, sources
from kvchat.config.schema import Settings
from kvchat.config.sources import Key, Resolved, SettingsSource, unknown_variables
from kvchat.conversations.attachments import MAX_BYTES, fenced
from kvchat.errors import UsageError
from kvchat.protocol import recording
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Keeping, Load, Turn

if TYPE_CHECKING:
    from kvchat.tui.state import AppConfig


ENGINE = process.python("-m", "kvchat.replay.engine")


def chat(flags: SettingsSource, resume: bool, plain: bool, record: Path | None = None, prompt: str = "") -> int:
    """Run the application until the user leaves; the exit code.

    ``plain`` has it line by line, which it also is without a terminal or on one that can only print. ``record`` is a
    new file for what the engine reports. ``prompt`` is asked first, about what is piped in.
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
        problems=(*problems, *modes.problems(), *unknown_variables()),
        resolved=resolved,
        config_file=paths.config_file(),
    )
    return start(config, plain)


def start(config: AppConfig, plain: bool) -> int:
    """Run the application as it suits the terminal; the exit code."""
    if plain or prefers_lines():
        from kvchat.tui.plain.chat import run as run_plain

        return run_plain(config)
    from kvchat.tui import themes
    from kvchat.tui.app import run

    if ("ui", "theme") not in config.resolved.origins:
        config = replace(config, theme=themes.suited())
    return run(config)


def prefers_lines() -> bool:
    """True if there is no terminal to draw on, it can only print ASCII or lines, or ``ACCESSIBLE`` asks for lines.

    Textual draws on stderr: in a file or in /dev/null the whole screen would be there.
    """
    if os.environ.get("TERM") == "dumb" or os.environ.get("ACCESSIBLE", "") not in ("", "0"):
        return True
    return not (all(map(_is_terminal, (sys.stdin, sys.stdout, sys.stderr))) and _draws(sys.stdout))


def load_of(chosen: Settings) -> Load:
    """The model, device and mode that the engine loads."""
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
    """K/V tell what was said: they are on disk, in ``folder``, only where the conversations are."""
    return Keeping(int(chosen.kv.parked_gib * 2**30), int(chosen.kv.saved_gib * 2**30), str(folder) if on_disk else "")


def is_asked_for(resolved: Resolved, key: Key) -> bool:
    """True if a setting was given to this start, on the command line or by a variable."""
    return resolved.origins.get(key, "").startswith(("--", "KVCHAT_"))


def _asked_params(resolved: Resolved) -> dict[str, Params]:
    """The parameters of modes given to this start, by the mode."""
    asked: dict[str, Params] = {}
    for key in resolved.origins:
        if key[0] == "kv" and len(key) == 3 and is_asked_for(resolved, key):
            asked.setdefault(key[1], {})[key[2]] = resolved.settings.kv.params(key[1])[key[2]]
    return asked


def _draws(stream: Any) -> bool:
    """True if the stream's encoding has the signs that a screen is drawn with."""
    try:
        return bool("╭─▓".encode(stream.encoding or "ascii"))
    except (LookupError, UnicodeEncodeError):
        return False


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def turns(prompt: str | None, named: Sequence[Path], system: str | None) -> tuple[Turn, ...]:
    """The turns of a command: the system prompt, if there is one, and the question with the text that was piped in.

    Raises:
        KvchatError: as ``piped`` and ``compose``.
    """
    asked = Turn("user", compose(prompt, named, piped()))
    return (Turn("system", system), asked) if system else (asked,)


def piped() -> bytes:
    """The text that comes through stdin; empty from a terminal.

    Raises:
        DoesNotFitError: it is more than a model could read, perhaps without an end.
    """
    raw = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(MAX_BYTES + 1)
    return files.limited(raw, MAX_BYTES, "stdin")


def compose(prompt: str | None, named: Sequence[Path], piped: bytes) -> str:
    """The user's turn: the ``named`` files, what was piped in as one more of them, and the prompt.

    Without a prompt what was piped in is the prompt.

    Raises:
        UsageError: nothing is left, a file cannot be read, or something is not UTF-8.
        DoesNotFitError: a file is larger than what a model could read.
    """
    parts = [fenced(str(path), _read(path)) for path in named]
    written, context = typed(prompt or ""), files.for_a_model(piped, "stdin")
    parts += [context, written] if not written.strip() else [as_file(context), written]
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise UsageError("The prompt is empty.", hint="Put it after the command, or pipe it in.")
    return text


def typed(prompt: str) -> str:
    """A prompt of the command line; the shell hands on bytes that are not UTF-8 as lone surrogates.

    Raises:
        UsageError: it has such bytes.
    """
    return files.for_a_model(prompt.encode("utf-8", "surrogateescape"), "The prompt")


def as_file(piped: str) -> str:
    """The text piped in beside a prompt, as a file is sent; nothing for white space."""
    return fenced("stdin", piped) if piped.strip() else ""


def _read(path: Path) -> str:
    """The text of a file, or of a pipe, as of a shell's ``<(COMMAND)``."""
    try:
        if not path.is_fifo():
            return files.read_text(path, MAX_BYTES)
        with path.open("rb") as pipe:
            raw = pipe.read(MAX_BYTES + 1)
    except OSError as error:
        raise files.unreadable(str(path), error) from None
    return files.for_a_model(files.limited(raw, MAX_BYTES, str(path)), str(path))


def replay(file: Path | None, plain: bool) -> int:
    """Play ``file``, or the demonstration that comes with kvchat; the exit code.

    Raises:
        UsageError: the file is no recording, or a setting is wrong.
    """
    chosen = file or paths.bundled_recording()
    recording.read(chosen)  # refused here, not behind the screen
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
