"""Changing settings while the application runs; the rows are the fields of ``kvchat.config`` and the actions' keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import tomli
from textual.theme import Theme

from kvchat.config import modes, sources
from kvchat.config.sources import KEYS, Key
from kvchat.config.validation_errors import choices, expected
from kvchat.errors import UsageError
from kvchat.tui.actions import ACTIONS
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt import arguments
from kvchat.tui.rebinding import keys_of
from kvchat.tui.state import AppConfig

HERE, SESSION, DEFAULT = "changed, not saved", "this session", "default"


class Appearance(Protocol):
    """The application's own settings; ``keys`` are the changed ones by the id of their action."""

    keys: dict[str, str]
    theme: str
    themes: dict[str, Theme]

    def use_theme(self, name: str) -> None:
        """Change the colors."""

    def rebind(self, keys: Mapping[str, str]) -> None:
        """Change keys."""


@dataclass(frozen=True)
class Setting:
    """A setting's current state.

    ``text`` is its value as typed and ``shown`` as displayed; ``takes`` describes the valid values and ``choices``
    lists them if they are few. A change takes effect at once if it ``is_live``.
    """

    key: Key
    text: str
    shown: str
    origin: str
    doc: str
    takes: str
    choices: tuple[str, ...]
    is_live: bool


class SettingsEditor:
    """Changes settings for this session; ``save`` keeps the changes in config.toml."""

    def __init__(self, config: AppConfig, chat: ChatController, appearance: Appearance | None) -> None:
        """``appearance`` is None in line mode."""
        self.file = config.config_file
        self._chat = chat
        self._appearance = appearance
        self._resolved = config.resolved
        self._changed: dict[Key, Any] = {}
        self._unsaved: dict[Key, Any] = {}

    @property
    def unsaved(self) -> int:
        """Number of changed settings that are not in config.toml."""
        return len(self._unsaved)

    @property
    def rebound(self) -> Mapping[str, str]:
        """The changed keys by the id of their action."""
        return self._appearance.keys if self._appearance else {}

    def settings(self) -> list[Setting]:
        """Return all settings in the order of the schema, then the keys; modes for comparison only if current."""
        rows = [
            self._setting(key, info.description or "", expected(info), choices(info))
            for key, info in sources.leaves()
            if not self._is_left_out(key)
        ]
        keys = [
            self._setting((KEYS, action.id), action.doc, "keys such as f9, ctrl+n or shift+f6, separated by commas", ())
            for action in ACTIONS
            if action.is_bindable
        ]
        return rows + keys

    def change(self, key: Key, text: str) -> None:
        """Set the typed value, which takes effect at once if the setting ``is_live``, else at the next start.

        An empty ``text`` restores the default, for this session only if config.toml does not have the setting.

        Raises:
            UsageError: the value is invalid, or config.toml cannot be read.
        """
        value = _parsed(key, text) if text else None
        is_to_save = value is not None or (self.file is not None and key in sources.file_source(self.file).values)
        self._apply(key, self._default(key) if value is None else value)
        self._unsaved.pop(key, None)
        self._changed.pop(key, None)
        if is_to_save:
            self._unsaved[key] = value
        if is_to_save or _is_live(key):
            self._changed[key] = value

    def save(self) -> str:
        """Write the unsaved changes to config.toml; return a sentence that says so and what overrides the file.

        Raises:
            UsageError: no file is configured, or it is invalid or cannot be written; it is unchanged.
        """
        from kvchat.config import settings_file  # tomlkit: 70 ms that only saving needs

        if self.file is None:
            raise UsageError("Settings are not saved here.", hint="kvchat config show says where they are saved.")
        if not self._unsaved:
            return "Nothing has changed since it was saved."
        settings_file.save(self.file, self._unsaved)
        saved, self._unsaved = self._unsaved, {}
        set_before = {self._resolved.origins.get(key, "") for key in saved}
        stronger = sorted(origin for origin in set_before if origin.startswith(("--", "KVCHAT_")))  # of this run
        origins = {key: origin for key, origin in self._resolved.origins.items() if key not in saved}
        written = {key: origin for key, origin in sources.file_source(self.file).origins.items() if key in saved}
        self._resolved = replace(self._resolved, origins=origins | written)
        before = f" {', '.join(stronger)} overrides config.toml for this run." if stronger else ""
        return f"Saved in {self.file}.{before}"

    # ---- the current value of a setting -------------------------------------------------------------------

    def _setting(self, key: Key, doc: str, takes: str, words: tuple[str, ...]) -> Setting:
        value = self._value(key)
        shown = _shown(key, value)
        match key:
            case ("kv", mode, name) if value is None and mode == self._chat.state.mode:
                chosen = self._chat.state.params.get(name)
                shown = shown if chosen is None else f"auto, now {chosen}"
            case ("sampling", "temperature"):
                shown = arguments.in_words(self._chat.state, "temperature")
            case ("ui", "theme") if self._appearance:
                words = tuple(self._appearance.themes)
        return Setting(key, _text(value), shown, self._origin(key, value), doc, takes, words, _is_live(key))

    def _is_left_out(self, key: Key) -> bool:
        mode = modes.registered().get(key[1]) if key[0] == "kv" else None
        return mode is not None and mode.for_comparison and mode.name != self._chat.state.mode

    def _value(self, key: Key) -> Any:
        state = self._chat.state
        match key:
            case ("sampling", name):
                return getattr(state.sampling, name)
            case ("model", "system"):
                return state.conversation.system or ""
            case ("kv", "mode"):
                return state.asked
            case ("ui", "theme"):
                return self._appearance.theme if self._appearance else "none"
            case (section, id) if section == KEYS:
                action = next(action for action in ACTIONS if action.id == id)
                return ",".join(keys_of(action, self.rebound))
            case ("kv", mode, name) if name in (given := self._given(mode)):
                return given[name]
        return self._settled(key)

    def _settled(self, key: Key) -> Any:
        """Return the value from the settings, with changes."""
        if key in self._changed:
            value = self._changed[key]
            return self._default(key) if value is None else value
        return sources.at(self._resolved.settings, key)

    def _given(self, mode: str) -> modes.Params:
        state = self._chat.state
        shared, own = modes.overrides_for(state.given, mode)
        newly_shared, newly_own = modes.overrides_for(state.pending, mode)
        return {**shared, **own, **newly_shared, **state.awaiting.get(mode, {}), **newly_own}

    def _origin(self, key: Key, value: Any) -> str:
        if key[0] != KEYS and value != self._settled(key):
            return SESSION
        if key in self._unsaved:
            return HERE
        origin = self._resolved.origins.get(key, DEFAULT)
        return SESSION if origin != DEFAULT and self._changed.get(key, origin) is None else origin

    # ---- what a change does ----------------------------------------------------------------------

    def _apply(self, key: Key, value: Any) -> None:
        match key:
            case ("sampling", name):
                self._chat.state.sampling = replace(self._chat.state.sampling, **{name: value})
            case ("model", "system"):
                self._chat.set_system(value or None)
            case ("kv", "mode"):
                if value != self._chat.state.asked:
                    self._chat.switch(value)
            case ("kv", "host_dtype"):
                self._chat.models.keep_pages(value)
            case ("kv", mode, name):
                self._chat.set_for_mode(mode, name, value)
            case ("ui", "theme") if self._appearance:
                self._appearance.use_theme(value)
            case (section, id) if section == KEYS and self._appearance:
                others = {other: keys for other, keys in self.rebound.items() if other != id}
                self._appearance.rebind({**others, id: value} if value else others)

    @staticmethod
    def _default(key: Key) -> Any:
        return "" if key[0] == KEYS else sources.at(sources.resolve().settings, key)


def _is_live(key: Key) -> bool:
    """Return whether a change takes effect at once; the engine reads the limits for kept K/V only when it starts."""
    if key in (("kv", "parked_gib"), ("kv", "saved_gib")):
        return False
    return key[0] in ("kv", "sampling", KEYS) or key in (("model", "system"), ("ui", "theme"))


def _parsed(key: Key, text: str) -> Any:
    """Parse a typed value: a newline is written ``\\n``, several stop strings as a TOML list."""
    if text.startswith("["):
        try:
            return sources.typed(key, tomli.loads(f"typed = {text}")["typed"])
        except (tomli.TOMLDecodeError, RecursionError):
            pass
    return sources.typed(key, text.replace("\\n", "\n"))


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case tuple():
            return sources.to_toml(value) if value else ""
    return str(value).replace("\n", "\\n")


def _shown(key: Key, value: Any) -> str:
    if value is None:
        return "auto" if key[0] == "kv" else "unset"
    return _text(value) or "none"
