"""One thing the user can do: its key binding, its slash command, its word in the line of key hints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from textual.binding import Binding

from kvchat.tui.commands.chat import Handler
from kvchat.tui.prompt.arguments import Values
from kvchat.tui.scopes import WIDGETS, Scope

NO_KEY = "none:"  # begins a key that no terminal sends: Textual changes keys of bindings, and makes no binding for one


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing the user can do.

    ``id`` is the id of its key binding, ``keys`` are its keys by default, separated by commas. ``command`` is its slash
    command, ``usage`` the command's argument, ``values`` offers what that may be; ``aliases`` are other programs'
    names of the command. ``run`` does the work; without it ``action`` names a Textual action of
    the ``scope``, the screen or widget where the keys act. An action with neither is built into a widget: its keys are
    listed, but cannot be changed.
    ``needs_argument``: its command does nothing alone, so that a key types the command's beginning into the prompt.
    ``waits`` says when it is queued while a model is being loaded, and when it is typed behind questions that wait:
    always, or with an argument only; ``questions``: with an argument, behind questions only.
    ``hint`` is its word in the line of key hints.
    """

    id: str
    doc: str
    keys: str = ""
    command: str = ""
    usage: str = ""
    aliases: tuple[str, ...] = ()
    values: Values | None = None
    run: Handler | None = None
    action: str = ""
    scope: Scope = "chat"
    needs_argument: bool = False
    waits: Literal["", "always", "argument", "questions"] = ""
    hint: str = ""

    @property
    def line(self) -> str:
        """The slash command as it is typed."""
        return f"/{self.command} {self.usage}".rstrip()

    def needs_model(self, argument: str) -> bool:
        """True if it is queued while a model is being loaded."""
        return self.waits == "always" or (self.waits == "argument" and bool(argument))

    def keeps_turn(self, argument: str) -> bool:
        """True if it is queued behind questions that wait: it changes how they would be answered."""
        return self.needs_model(argument) or (self.waits == "questions" and bool(argument))

    @property
    def is_bindable(self) -> bool:
        """True if its keys can be changed."""
        return bool(self.run or self.action)

    @property
    def hint_word(self) -> str:
        """Its word in the line of key hints; without a key by default, that of a key that the user gives it."""
        return self.hint or ("" if self.keys else self.command)

    def binding(self) -> Binding:
        """Make the key binding; a key of the application or of a screen goes before those of the focused widget."""
        priority = self.scope not in WIDGETS and self.id != "stop"
        action = self.action if self.action and not self.usage else f"run({self.id!r})"
        keys = self.keys or f"{NO_KEY}{self.id}"
        return Binding(keys, action, self.hint_word, show=bool(self.hint_word), priority=priority, id=self.id)
