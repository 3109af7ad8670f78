"""The settings screen: find a setting, change it, save it."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from kvchat.config.sources import Key, dotted
from kvchat.errors import KvchatError
from kvchat.foreign_text import visible
from kvchat.tui.actions import BY_ID, bindings
from kvchat.tui.rebinding import describe_keys
from kvchat.tui.screens.base import Dialog
from kvchat.tui.settings import DEFAULT, HERE, Setting, SettingsEditor
from kvchat.tui.widgets.bars import KeyHints

REFRESH_S = 0.3  # the engine confirms a change of the mode later
NAME_CELLS, VALUE_CELLS = 24, 26


class SettingsScreen(Dialog):
    """A list narrowed by the typed text; Enter or a click edits the highlighted setting below the list."""

    CSS = """
    SettingsScreen > Vertical { width: 104; height: 94%; }
    SettingsScreen Input { border: none; height: 1; padding: 0; background: $surface; }
    SettingsScreen #find { margin: 0 0 1 0; }
    SettingsScreen OptionList { height: 1fr; border: none; padding: 0; background: $surface; }
    SettingsScreen OptionList > .option-list--option-disabled { color: $primary; text-style: bold; }
    SettingsScreen #choices { height: auto; max-height: 7; margin: 0 0 0 2; }
    SettingsScreen #about { height: auto; max-height: 6; margin: 1 0 0 0; }
    SettingsScreen #edit { height: 1; }
    SettingsScreen #edit Static { width: auto; color: $accent; }
    SettingsScreen #edit Input { width: 1fr; background: $panel; }
    SettingsScreen #refusal { height: auto; color: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("settings")
    AUTO_FOCUS = "#find"

    def __init__(self, editor: SettingsEditor) -> None:
        super().__init__()
        self._editor = editor
        self._listed: dict[str, Setting] = {}
        self._edited: Setting | None = None

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "settings"
            yield Input(placeholder="Find a setting…", id="find")
            yield OptionList(id="list")
            yield Static(id="about", markup=False)
            yield OptionList(id="choices")
            with Horizontal(id="edit"):
                yield Static(id="name", markup=False)
                yield Input(id="value")
            yield Static(id="refusal", markup=False)
            yield KeyHints()

    def on_mount(self) -> None:
        self._close_edit()
        self._show()
        self.set_interval(REFRESH_S, self._refresh)

    # ---- user actions ----------------------------------------------------------------------------

    @on(OptionList.OptionHighlighted, "#list")
    def explain(self) -> None:
        setting = self._highlighted
        self.query_one("#about", Static).update(about(setting) if setting else "Nothing found.")

    @on(Input.Submitted, "#find")
    @on(OptionList.OptionSelected, "#list")
    def edit(self) -> None:
        """Edit the highlighted setting: show its choices as a list, or its value in a text field."""
        setting = self._highlighted
        if setting is None:
            return
        self._close_edit()
        self._edited = setting
        if setting.choices:
            choices = self.query_one("#choices", OptionList)
            choices.display = True
            choices.clear_options()
            choices.add_options(Option(visible(word)) for word in setting.choices)
            choices.highlighted = setting.choices.index(setting.text) if setting.text in setting.choices else 0
            self.set_focus(choices)  # focus() would take effect only after the next key
        else:
            self.query_one("#edit").display = True
            self.query_one("#name", Static).update(f"{setting.key[-1]} = ")
            value = self.query_one("#value", Input)
            value.value = visible(setting.text)
            self.set_focus(value)

    @on(Input.Submitted, "#value")
    def submit_value(self, event: Input.Submitted) -> None:
        self._change(event.value.strip())

    @on(OptionList.OptionSelected, "#choices")
    def submit_choice(self, event: OptionList.OptionSelected) -> None:
        if self._edited is not None:
            self._change(self._edited.choices[event.option_index])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Leave these keys to the text field while a value is edited in it."""
        return action not in ("default", "move") or not self.query_one("#value").has_focus

    def action_move(self, rows: int) -> None:
        """Move the highlight by ``rows``: in the open list of choices, else in the list of settings."""
        options = self.query_one("#choices" if self.query_one("#choices").has_focus else "#list", OptionList)
        for _ in range(abs(rows)):
            (options.action_cursor_down if rows > 0 else options.action_cursor_up)()

    def action_default(self) -> None:
        """Reset the highlighted setting to its default."""
        if (setting := self._highlighted) is not None:
            self._close_edit()
            self._edited = setting
            self._change("")

    def action_save(self) -> None:
        try:
            self.app.notify(self._editor.save(), timeout=8)
        except KvchatError as error:
            self._refuse(str(error))
        self._show()

    def action_leave(self) -> None:
        """Cancel editing; else close the screen, with a note if settings are unsaved."""
        if self._edited is not None:
            self._close_edit()
        else:
            if self._editor.unsaved:
                keys = describe_keys(BY_ID["settings.save"], self._editor.rebound)
                text = f"Changed settings last until kvchat is closed; {keys} in the settings saves them to the file."
                self.app.notify(text, timeout=6)
            self.dismiss()

    @property
    def _highlighted(self) -> Setting | None:
        option = self.query_one("#list", OptionList).highlighted_option
        return self._listed.get(option.id or "") if option else None

    def _change(self, text: str) -> None:
        if self._edited is None:
            return
        try:
            self._editor.change(self._edited.key, text)
        except KvchatError as error:
            self._refuse(str(error))
            return
        self._close_edit()
        self._show()

    def _refuse(self, reason: str) -> None:
        refusal = self.query_one("#refusal", Static)
        refusal.display = True
        refusal.update(f"✗ {visible(reason)}")

    def _close_edit(self) -> None:
        self._edited = None
        for selector in ("#choices", "#edit", "#refusal"):
            self.query_one(selector).display = False
        self.set_focus(self.query_one("#find"))

    def _refresh(self) -> None:
        if self._found() != list(self._listed.values()):
            self._show()

    def _found(self) -> list[Setting]:
        words = self.query_one("#find", Input).value.lower().split()
        texts = ((setting, f"{dotted(setting.key)} {setting.doc}".lower()) for setting in self._editor.settings())
        return [setting for setting, text in texts if all(word in text for word in words)]

    @on(Input.Changed, "#find")
    def _show(self) -> None:
        """List the settings that match the typed text, and keep the highlight on the same setting."""
        found = self._found()
        before = self._highlighted
        self._listed = {dotted(setting.key): setting for setting in found}
        rows: list[Option] = []
        section: Key = ()
        for setting in found:
            if setting.key[:-1] != section:
                section = setting.key[:-1]
                rows.append(Option(Content(f"[{dotted(section)}]"), disabled=True))
            rows.append(Option(line(setting), dotted(setting.key)))
        options = self.query_one("#list", OptionList)
        options.set_options(rows)  # in one call: each added row would cost a layout
        if found:
            shown = before if before is not None and dotted(before.key) in self._listed else found[0]
            options.highlighted = options.get_option_index(dotted(shown.key))
        unsaved = self._editor.unsaved
        self.query_one(Vertical).border_subtitle = f"{unsaved} changed, not saved" if unsaved else ""
        self.explain()


def line(setting: Setting) -> Content:
    """Return name, value and source in columns; a value other than the default is bold."""
    value = visible(setting.shown).replace("\n", " ")
    if len(value) >= VALUE_CELLS:
        value = f"{value[: VALUE_CELLS - 2]}…"
    is_own = setting.origin != DEFAULT
    mark = "● " if setting.origin == HERE else "  "
    return Content.assemble(
        (mark, "$accent"),
        f"{setting.key[-1]:<{NAME_CELLS}}",
        (f"{value:<{VALUE_CELLS}}", "bold" if is_own else ""),
        (visible(setting.origin), "$accent" if is_own else "dim"),
    )


def about(setting: Setting) -> Content:
    """Explain a setting: its values, when a change takes effect and which source set it."""
    takes = f"Takes {setting.takes}. " if setting.takes != setting.doc else ""
    when = "A change takes effect at once." if setting.is_live else "A change takes effect at the next start."
    return Content.assemble(
        (visible(f"{setting.doc[:1].upper()}{setting.doc[1:]}."), "bold"),
        f"\n{visible(takes)}{when}",
        (f"\n{dotted(setting.key)} = {visible(setting.shown)}   ({visible(setting.origin)})", "dim"),
    )
