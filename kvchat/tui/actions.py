"""The table of everything the user can do; keys, slash commands, palette, key hints and help are made from it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from textual.binding import Binding, BindingType

from kvchat.errors import UsageError, resolve
from kvchat.tui.commands import chat, conversations
from kvchat.tui.commands.chat import Handler, alone
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt import arguments
from kvchat.tui.prompt.arguments import Values
from kvchat.tui.prompt.mentions import PUNCTUATION

OFTEN = (
    *("mode", "budget", "new", "model", "conversations", "regenerate", "edit", "file", "export", "compare", "needle"),
    *("system", "set", "undo", "copy", "settings", "help", "stop", "quit"),
)
"""Ids of common commands, the most common first."""
FIRST_KEYS = {
    "prompt.send": "send",
    "prompt.newline": "new line",
    "stop": "stop the answer",
    "mode.next": "next KV mode, also during an answer",
    "regenerate": "answer the last question again",
    "new": "new conversation",
    "conversations": "saved conversations",
    "focus": "what the figures mean; ↑ and ↓ choose one",
}
"""The keys to begin with, by the id of their action."""
_COMMAND = re.compile(r"/(\?|[^\W\d_][\w=,.;:!?-]*)?(?!\S)")
REPLAY = "replay."  # prefix of the ids of actions for replays only
NO_KEY = "none:"  # prefix of a key that no terminal sends, for actions without a key: Textual can rebind only bindings
Scope = Literal[
    "app", "chat", "prompt", "transcript", "ribbon", "panels", "search", "conversations", "title", "models",
    "settings", "compare", "details", "map", "help",
]  # fmt: skip
WIDGETS: tuple[Scope, ...] = (
    "prompt", "transcript", "ribbon", "panels", "search", "conversations", "title", "models", "map",
)  # fmt: skip
"""The scopes of widgets; keys of other scopes take precedence."""
LETTERS: tuple[Scope, ...] = ("transcript", "ribbon", "panels", "compare", "details", "map")
"""Scopes without text input, so that a letter may be a key."""
_CHILDREN: dict[Scope, tuple[Scope, ...]] = {
    "app": ("chat", "search", "title", "settings", "compare", "details", "help"),
    "chat": ("prompt", "transcript", "ribbon", "panels"),
    "search": ("conversations", "models"),
    "details": ("map",),
}


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing the user can do.

    Attributes:
        id: also of its key binding.
        doc: what it does; after a semicolon, what it does in special cases.
        keys: the default keys, separated by commas.
        command: its slash command; ``aliases`` are other programs' names for it.
        usage: the command's argument; ``values`` suggests some.
        run: does the work. Without it ``action`` names a Textual action of the ``scope``; with neither, the action is
            built into a widget and its keys are listed but cannot be changed.
        scope: where the keys act: the application, a screen, or a widget that has the focus.
        needs_argument: the command does nothing without an argument, so a key only begins it in the prompt.
        waits: whether the command is queued behind a model being loaded and queued questions: always, or only with an
            argument; ``questions``: only with an argument, and only behind questions.
        hint: its word in the line of key hints.
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
    def brief(self) -> str:
        """Its ``doc`` without the special cases, for lists."""
        return self.doc.partition(";")[0]

    @property
    def rarity(self) -> int:
        """A sort key for lists: the most used commands come first."""
        return OFTEN.index(self.id) if self.id in OFTEN else len(OFTEN)

    @property
    def line(self) -> str:
        """The slash command as it is typed."""
        return f"/{self.command} {self.usage}".rstrip()

    def needs_model(self, argument: str) -> bool:
        """Return whether the command is queued while a model is being loaded."""
        return self.waits == "always" or (self.waits == "argument" and bool(argument))

    def keeps_turn(self, argument: str) -> bool:
        """Return whether the command is queued behind questions, because it changes how they are answered."""
        return self.needs_model(argument) or (self.waits == "questions" and bool(argument))

    @property
    def is_bindable(self) -> bool:
        """True if its keys can be changed."""
        return bool(self.run or self.action)

    @property
    def hint_word(self) -> str:
        """Its word in the line of key hints; without a default key it is the command, for a key that the user sets."""
        return self.hint or ("" if self.keys else self.command)

    def binding(self) -> Binding:
        """Return the key binding; a key of the application or a screen takes precedence over the focused widget's."""
        priority = self.scope not in WIDGETS and self.id != "stop"
        action = self.action if self.action and not self.usage else f"run({self.id!r})"
        keys = self.keys or f"{NO_KEY}{self.id}"
        return Binding(keys, action, self.hint_word, show=bool(self.hint_word), priority=priority, id=self.id)


ACTIONS = (
    Action(id="prompt.send", keys="enter", action="send", scope="prompt", hint="send", doc="send"),
    Action(
        id="prompt.newline", keys="ctrl+j,shift+enter,alt+enter", action="newline", scope="prompt", hint="newline",
        doc="newline (the last two only where the terminal reports them)",
    ),
    Action(id="prompt.history", keys="up,down",
           doc="at the first or last line: earlier and later prompts; ↑ takes back queued questions first"),
    Action(id="suggestion", keys="tab,escape",
           doc="while you type a command or @file: accept the suggestion, or close the list; ↑ and ↓ choose"),
    Action(id="focus", keys="tab",
           doc="move to the transcript, the figures (with explanations), the ribbon, and back to the prompt"),
    Action(id="message.previous", keys="up", action="choose(-1)", scope="transcript", hint="earlier message",
           doc="in the transcript: choose the previous message"),
    Action(id="message.next", keys="down", action="choose(1)", scope="transcript", hint="later",
           doc="in the transcript: choose the next message"),
    Action(id="message.copy", keys="y", run=chat.copy_message, scope="transcript", hint="copy",
           doc="on a chosen message: copy it"),
    Action(id="message.code", keys="c", run=chat.copy_code, scope="transcript", hint="code",
           doc="on a chosen message: copy its last block of code"),
    Action(id="message.edit", keys="e", run=conversations.edit, scope="transcript", hint="edit",
           doc="on a chosen message: edit a question and ask it, or an answer and continue it, on a new branch"),
    Action(id="message.regenerate", keys="r", run=conversations.regenerate, scope="transcript",
           hint="again", doc="on a chosen message: answer its question again"),
    Action(id="message.fork", keys="b", run=conversations.fork, scope="transcript", hint="fork",
           doc="on a chosen message: fork the conversation here"),
    Action(id="message.pin", keys="p", run=chat.pin, scope="transcript", hint="pin",
           doc="on a chosen message: pin it, so that every mode reads it, or unpin it"),
    Action(id="branch.previous", keys="[", run=alone(lambda it: it.branches.select_sibling(-1)),
           scope="transcript", hint="branch", doc="on a chosen message: the previous branch"),
    Action(id="branch.next", keys="]", run=conversations.show_branch, scope="transcript",
           doc="on a chosen message: the next branch"),
    Action(id="ribbon.left", keys="left", action="move(-1)", scope="ribbon", hint="earlier",
           doc="in the ribbon: the previous stored text"),
    Action(id="ribbon.right", keys="right", action="move(1)", scope="ribbon", hint="later",
           doc="in the ribbon: the next stored text"),
    Action(id="ribbon.first", keys="home", action="move(-100000)", scope="ribbon",
           doc="in the ribbon: the first stored text"),
    Action(id="ribbon.last", keys="end", action="move(100000)", scope="ribbon",
           doc="in the ribbon: the last stored text"),
    Action(id="ribbon.message", keys="enter", action="pick", scope="ribbon", hint="message",
           doc="in the ribbon (or click): choose the message that the text belongs to"),
    Action(id="figure.previous", keys="up", action="choose(-1)", scope="panels", hint="what a figure means",
           doc="in the panels: choose the previous figure, which is explained below them"),
    Action(id="figure.next", keys="down", action="choose(1)", scope="panels", hint="what a figure means",
           doc="in the panels: choose the next figure"),
    Action(id="stop", keys="escape", command="stop", action="stop", hint="stop",
           doc="stop the answer and keep its text; queued questions are held; otherwise go to the prompt"),
    Action(id="queue", command="queue", usage="send", values=arguments.one_of("send", "clear"),
           run=chat.manage_queue,
           doc="queued questions: send those held by a stop, or clear them; no argument: take the last one back"),
    Action(id="interrupt", keys="ctrl+c", action="interrupt",
           doc="copy the selection; else stop the answer; pressed twice: quit"),
    Action(id="mode", command="mode", usage="NAME key=value…", values=arguments.modes, run=chat.switch_mode,
           waits="argument",
           doc="switch the KV mode, also during an answer; no argument: list the modes"),
    Action(id="mode.next", keys="f6", command="next", run=alone(lambda it: it.switch_by(1)), waits="always",
           hint="mode", doc="next KV mode, also during an answer"),
    Action(id="mode.previous", keys="shift+f6", command="previous", run=alone(lambda it: it.switch_by(-1)),
           waits="always", doc="previous KV mode, also during an answer"),
    Action(id="compare", keys="f8", command="compare", usage="MODE MODE…", run=chat.compare,
           waits="always",
           doc="answer the last question in several modes; as in /compare full sync budget=256; no argument: full and "
               "the current one"),
    Action(id="needle", command="needle", usage="TOKENS", run=chat.search_needle, waits="always",
           doc="hide a fact in a long text and ask every mode for it; your conversation stays as it is"),
    Action(id="budget", command="budget", usage="N", needs_argument=True, values=arguments.tokens("budget"),
           run=chat.set_tokens("budget"), waits="argument",
           doc="how many tokens a new token may read, per KV head"),
    Action(id="sink", command="sink", usage="N", needs_argument=True, values=arguments.tokens("sink"),
           run=chat.set_tokens("sink"), waits="argument",
           doc="how many of the first tokens are always read"),
    Action(id="window", command="window", usage="N", needs_argument=True, values=arguments.tokens("window"),
           run=chat.set_tokens("window"), waits="argument",
           doc="how many of the most recent tokens are always read"),
    Action(id="draft", command="draft", usage="WHAT", needs_argument=True,
           values=arguments.one_of("auto", "lookup", "window", "off"), run=chat.set_draft, waits="argument",
           doc="let full mode guess tokens and check them at once; WHAT: auto, lookup, window or off"),
    Action(id="set", command="set", usage="KEY VALUE", values=arguments.values_to_set, run=chat.set_value,
           waits="argument",
           doc="change a parameter of sampling or of the mode; no argument: list all"),
    Action(id="system", command="system", usage="TEXT", values=arguments.one_of("none"), run=chat.set_system,
           waits="questions",
           doc="change the system prompt; none removes it; no argument: show it"),
    Action(id="preset", command="preset", usage="NAME", values=arguments.presets, run=chat.preset, waits="argument",
           doc="use a saved system prompt, sampling and mode; save NAME: save the current ones; no argument: "
               "list all"),
    Action(id="pin", command="pin", usage="N", values=arguments.one_of("system", "none"), run=chat.pin,
           doc="pin the N-th question: every mode reads it, even beyond its budget; again: unpin it; no argument: "
               "the last one; system: the system prompt; none: unpin all"),
    Action(id="regenerate", keys="f5", command="regen", aliases=("retry", "again"),
           run=conversations.regenerate, waits="always",
           doc="answer the last question again; the answers so far stay as branches"),
    Action(id="continue", command="continue", run=alone(lambda it: it.branches.resume()), waits="always",
           doc="continue the last answer"),
    Action(id="edit", command="edit", usage="TEXT", run=conversations.edit,
           doc="ask TEXT instead of the last question; it becomes a new branch; no argument: edit that question"),
    Action(id="undo", command="undo", run=alone(lambda it: it.branches.undo()),
           doc="withdraw the last question; it stays as a branch"),
    Action(id="branch", command="branch", usage="previous", values=arguments.one_of("previous", "next"),
           run=conversations.show_branch,
           doc="show the previous or next branch; no argument: the next"),
    Action(id="model", keys="ctrl+o", command="model", usage="NAME key=value…", run=chat.choose,
           doc="load another model for this conversation; no argument: the models on this machine"),
    Action(id="servers", command="servers", run=alone(lambda it: it.models.show_all(looks_around=True)),
           doc="list models, also those of servers on this machine's usual ports"),
    Action(id="think", command="think", usage="on", run=chat.think, waits="argument",
           values=arguments.one_of("on", "off", "low", "medium", "high", "auto"),
           doc="let the model think before it answers, and how much; auto: its own default; no argument: show it"),
    Action(id="template", command="template", usage="KEY=VALUE…", values=arguments.one_of("own"), run=chat.template,
           waits="argument",
           doc="set chat template variables; FILE: use another template; own: the model's own; no argument: show them"),
    Action(id="unload", command="unload", run=alone(ChatController.unload),
           doc="unload the model to free its memory; the next question loads it again"),
    Action(id="plan", command="plan", usage="NAME context=N", run=chat.plan,
           doc="show the memory a model needs; no argument: the current model, planned and measured"),
    Action(id="profile", command="profile", run=chat.show_profile,
           doc="show the profiles that apply to this machine"),
    Action(id="rebuild", command="rebuild", run=alone(ChatController.rebuild), waits="always",
           doc="recompute the tokens that were computed with reduced context"),
    Action(id="new", keys="ctrl+n", command="new", aliases=("clear", "reset"), run=alone(ChatController.new),
           doc="new conversation; the current one is saved"),
    Action(id="last", keys="ctrl+r", command="last", run=alone(ChatController.open_last),
           doc="go back to the previous conversation"),
    Action(id="open", command="open", usage="TEXT", needs_argument=True, run=conversations.open_found,
           doc="reopen the latest conversation that contains TEXT, or number N of /chats"),
    Action(id="title", command="title", usage="TEXT", run=conversations.set_title,
           doc="rename the conversation; no argument: show its title"),
    Action(id="fork", command="fork", run=conversations.fork, doc="fork the conversation"),
    Action(id="delete", command="delete", run=conversations.delete, doc="delete the conversation"),
    Action(id="restore", command="restore", run=alone(ChatController.restore),
           doc="restore the conversation deleted last"),
    Action(id="export", command="export", usage="FILE", aliases=("save",), run=conversations.export_file,
           doc="save the conversation as .md or .json; no argument: to a file named by its title"),
    Action(id="import", command="import", usage="FILE", needs_argument=True,
           run=conversations.import_file,
           doc="continue a conversation from an exported FILE.json"),
    Action(id="stats", command="stats", run=chat.show_stats, doc="show the tokens and times of this conversation"),
    Action(id="copy", command="copy", usage="FILE", run=chat.copy_message,
           doc="copy the last answer into a new file; no argument: to the clipboard"),
    Action(id="code", command="code", usage="FILE", run=chat.copy_code,
           doc="copy the last block of code of the last answer into a new file; no argument: to the clipboard"),
    Action(id="editor", keys="f4", command="editor", action="editor",
           doc="write the prompt in your editor: $VISUAL, $EDITOR, or one that kvchat finds"),
    Action(id="file", command="file", usage="PATH", needs_argument=True, run=chat.attach,
           doc="attach a text file (or write @PATH in a question)"),
    Action(id="theme", command="theme", usage="NAME", values=arguments.themes, action="app.theme",
           doc="change the theme; no argument: list them"),
    Action(id="thinking", keys="ctrl+t", command="thinking", action="thinking",
           doc="show or hide the model's thoughts before its answers"),
    Action(id="panels", keys="f7", command="panels", action="panels", hint="figures",
           doc="show all figures, none, or four"),
    Action(id="details", keys="shift+f7", command="details", action="details",
           doc="details: what each layer and KV head reads and holds; fetch times, the GPU's last minutes, events"),
    Action(id="page.up", keys="pageup", action="page('up')", doc="scroll the transcript up"),
    Action(id="page.down", keys="pagedown", action="page('down')", doc="scroll the transcript down"),
    Action(id="newest", keys="ctrl+end", command="newest", action="newest",
           doc="scroll to the newest line and follow it"),
    Action(id="replay.pause", keys="f10", command="pause", run=alone(lambda it: it.replay.pause()),
           hint="pause", doc="in a replay: pause or resume"),
    Action(id="replay.faster", keys="ctrl+up", run=alone(lambda it: it.replay.change(2)), hint="faster",
           doc="in a replay: twice as fast"),
    Action(id="replay.slower", keys="ctrl+down", run=alone(lambda it: it.replay.change(0.5)), hint="slower",
           doc="in a replay: half as fast"),
    Action(id="replay.speed", command="speed", usage="FACTOR", run=chat.set_pace,
           doc="in a replay: playback speed; 2 is twice as fast"),
    Action(id="restart", command="restart", run=alone(ChatController.restart),
           doc="restart the engine; the conversation is kept"),
    Action(id="palette", keys="ctrl+p", action="app.command_palette", scope="app", hint="palette",
           doc="find and run a command"),
    Action(id="help", keys="f1", command="help", aliases=("?", "commands"), action="app.help", scope="app", hint="help",
           doc="keys, commands and modes"),
    Action(id="settings", keys="f2", command="settings", action="app.settings", scope="app",
           doc="edit settings (saved to config.toml)"),
    Action(id="conversations", keys="f9,f3", command="chats", usage="TEXT", action="conversations", hint="chats",
           aliases=("find", "search", "sessions", "history"),
           doc="saved conversations: search, open, rename, delete"),
    Action(id="quit", keys="ctrl+q", command="quit", aliases=("exit", "bye"), action="app.quit", scope="app",
           doc="quit"),
    Action(id="search.up", keys="up", action="screen.move('cursor_up')", scope="search", hint="choose",
           doc="in the lists of conversations and models: the previous row"),
    Action(id="search.down", keys="down", action="screen.move('cursor_down')", scope="search", hint="choose",
           doc="in these lists: the next row"),
    Action(id="search.pageup", keys="pageup", action="screen.move('page_up')", scope="search",
           doc="in these lists: a page up"),
    Action(id="search.pagedown", keys="pagedown", action="screen.move('page_down')", scope="search",
           doc="in these lists: a page down"),
    Action(id="search.choose", keys="enter", action="screen.choose", scope="search", hint="open",
           doc="in these lists: open the conversation, load the model"),
    Action(id="conversations.rename", keys="ctrl+r", action="screen.rename", scope="conversations", hint="rename",
           doc="in the list of conversations: rename one"),
    Action(id="title.take", keys="enter", action="submit", scope="title", hint="save the title",
           doc="while renaming: accept the title"),
    Action(id="title.leave", keys="escape", action="screen.leave_title", scope="title", hint="cancel",
           doc="while renaming: keep the old title"),
    Action(id="conversations.delete", keys="ctrl+d,delete", action="screen.delete", scope="conversations",
           hint="delete", doc="in the list of conversations: delete one"),
    Action(id="conversations.restore", keys="ctrl+z", action="screen.restore", scope="conversations", hint="restore",
           doc="in the list of conversations: restore the one deleted last"),
    Action(id="models.plan", keys="ctrl+l", action="screen.plan", scope="models", hint="memory it needs",
           doc="in the list of models: the memory a model needs"),
    Action(id="search.close", keys="escape", action="screen.dismiss", scope="search", hint="close",
           doc="close these lists"),
    Action(id="settings.up", keys="up", action="move(-1)", scope="settings", hint="choose",
           doc="in the settings: the previous row"),
    Action(id="settings.down", keys="down", action="move(1)", scope="settings", hint="choose",
           doc="in the settings: the next row"),
    Action(id="settings.pageup", keys="pageup", action="move(-8)", scope="settings", doc="in the settings: 8 rows up"),
    Action(id="settings.pagedown", keys="pagedown", action="move(8)", scope="settings",
           doc="in the settings: 8 rows down"),
    Action(id="settings.change", keys="enter", scope="settings", hint="change",
           doc="in the settings: edit the chosen one, then accept the new value"),
    Action(id="settings.default", keys="ctrl+d", action="default", scope="settings", hint="default",
           doc="in the settings: reset the chosen one to its default"),
    Action(id="settings.save", keys="ctrl+s", action="save", scope="settings", hint="save to file",
           doc="in the settings: save the changes to config.toml"),
    Action(id="settings.close", keys="escape", action="leave", scope="settings", hint="close",
           doc="in the settings: cancel the edit, else close"),
    Action(id="compare.write", keys="w", action="write", scope="compare", hint="write to files",
           doc="in a comparison: write it to files, as Markdown and as JSON"),
    Action(id="compare.close", keys="escape", action="leave", scope="compare", hint="stop or close",
           doc="in a comparison: stop it; when it is over, close it"),
    Action(id="details.part", keys="tab", scope="details", hint="next part", doc="in the details: the next part"),
    Action(id="map.left", keys="left", action="move(-1, 0)", scope="map", hint="layer and head",
           doc="in a map of layers and KV heads: the previous layer"),
    Action(id="map.right", keys="right", action="move(1, 0)", scope="map", hint="layer and head",
           doc="in a map: the next layer"),
    Action(id="map.up", keys="up", action="move(0, -1)", scope="map", hint="layer and head",
           doc="in a map: the previous KV head"),
    Action(id="map.down", keys="down", action="move(0, 1)", scope="map", hint="layer and head",
           doc="in a map: the next KV head"),
    Action(id="details.close", keys="escape,q", action="dismiss", scope="details", hint="close",
           doc="close the details"),
    Action(id="help.up", keys="up", action="scroll('up')", scope="help", doc="in the help: a line up"),
    Action(id="help.down", keys="down", action="scroll('down')", scope="help", doc="in the help: a line down"),
    Action(id="help.pageup", keys="pageup", action="scroll('page_up')", scope="help", doc="in the help: a page up"),
    Action(id="help.pagedown", keys="pagedown", action="scroll('page_down')", scope="help",
           doc="in the help: a page down"),
    Action(id="help.close", keys="escape", action="dismiss", scope="help", hint="close", doc="close the help"),
)  # fmt: skip
BY_ID = {action.id: action for action in ACTIONS}
COMMANDS = {action.command: action for action in ACTIONS if action.command}
KEYED = [action for action in ACTIONS if action.is_bindable and not action.command]  # without a command
ALIASES = {alias: action for action in ACTIONS for alias in action.aliases}
HINTED = sorted(
    (action for action in ACTIONS if action.hint_word),
    key=lambda action: (not action.id.startswith(REPLAY), not action.hint),
)


def bindings(scope: Scope) -> list[BindingType]:
    return [action.binding() for action in ACTIONS if action.scope == scope and action.is_bindable]


def is_command(text: str) -> bool:
    """Return whether a typed text is a command: a slash and a name, which in several lines must be a known one.

    A path with another slash, or one that exists (``/tmp is full``), is not, nor is a comment or a pattern in code.
    """
    begun = _COMMAND.match(text)
    if begun is None:
        return False
    name = begun[1] or ""
    if name in COMMANDS or "\n" in text.strip():
        return name in COMMANDS
    return not name or name.lower() in ALIASES or not os.path.lexists(f"/{name.rstrip(PUNCTUATION)}")


def parse_command(line: str) -> tuple[Action, str]:
    """Split a line such as ``/mode streaming budget=512`` into its action and argument.

    Raises:
        UsageError: as in ``find_command``; or the command accepts no argument, or needs one.
    """
    text = line.removeprefix("/")
    name = re.split(r"\s", text, maxsplit=1)[0]
    action, argument = find_command(name.lower()), text[len(name) :].strip()
    if argument and not action.usage:
        line = f"/{action.command}"
        raise UsageError(f'{line} "{argument}" is not valid.', "It accepts no argument.", f"Use {line} alone.")
    if action.needs_argument and not argument:
        raise UsageError(f"/{action.command} needs an argument.", hint=f"Use {action.line}: {action.doc}.")
    return action, argument


def find_command(name: str) -> Action:
    """Return the action of a command by its name, an alias, or an unambiguous abbreviation of one.

    Raises:
        UsageError: no command or several begin like this; the message suggests similar ones.
    """
    is_alias = name in ALIASES or (not _begins_any(name, COMMANDS) and _begins_any(name, ALIASES))
    known = ALIASES if is_alias else COMMANDS
    if not name or not _begins_any(name, known):
        near = " or ".join(f"/{word}" for word in get_close_matches(name, COMMANDS, cutoff=0.5))
        hint = f"Did you mean {near}? " if near else ""
        raise UsageError(f"There is no command /{name}.", hint=f"{hint}/help lists all.")
    return known[resolve(name, known, "command")]


def _begins_any(name: str, known: Iterable[str]) -> bool:
    return any(word.startswith(name) for word in known)


def scopes_at(scope: Scope) -> Iterator[Scope]:
    """Yield the scopes whose keys act in ``scope``: itself and those around it."""
    yield scope
    for outer, inner in _CHILDREN.items():
        if scope in inner:
            yield from scopes_at(outer)
