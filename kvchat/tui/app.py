"""The application: themes, the engine client and the one screen."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from kvchat.errors import UsageError, did_you_mean
from kvchat.tui import themes
from kvchat.tui.client import EngineClient
from kvchat.tui.config import AppConfig
from kvchat.tui.palette import Commands
from kvchat.tui.screens.chat import ChatScreen


def run(config: AppConfig) -> int:
    """Run the application until the user leaves; the exit code. No engine outlives it."""
    app = KvchatApp(config)
    try:
        app.run()
    finally:
        app.client.kill()
    return app.return_code or 0


class KvchatApp(App[None]):
    """Owns the themes and the engine's child process; ``chat`` owns everything on the screen."""

    TITLE = "kvchat"
    CSS = "ToastRack { dock: top; align: right top; margin: 1 0 0 0; }"
    COMMANDS = {Commands}  # noqa: RUF012  (Textual's own declaration)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True, id="quit"),
    ]

    def __init__(self, config: AppConfig) -> None:
        super().__init__()
        self.config = config
        self.client = EngineClient(config.engine_command, config.log_file)
        self.themes, self._theme_problems = themes.load_all(config.theme_dirs)
        self.chat = ChatScreen(self)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """The ribbon's colors where a theme leaves them out."""
        return themes.RIBBON_DEFAULTS

    def on_mount(self) -> None:
        for theme in self.themes.values():
            self.register_theme(theme)
        try:
            self.use_theme(self.config.theme)
        except UsageError as unknown:
            self._theme_problems.append(unknown)
            self.theme = themes.DEFAULT
        self.push_screen(self.chat)
        for wrong in self.config.problems:
            self.notify(wrong, title="Settings", severity="warning", timeout=12, markup=False)
        for problem in self._theme_problems:
            self.notify(str(problem), title="Theme", severity="warning", timeout=12, markup=False)

    async def on_unmount(self) -> None:
        await self.client.close()

    def use_theme(self, name: str) -> None:
        """Change the colors.

        Raises:
            UsageError: there is no such theme.
        """
        if name not in self.themes:
            raise UsageError(f'There is no theme "{name}".', did_you_mean(name, self.themes))
        self.theme = name
