"""The one-line bars: the mode bar above the transcript, the status bar and key hints below it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from kvchat.models.catalog import short_name
from kvchat.protocol.figures import Params, Snapshot
from kvchat.protocol.messages import Loaded
from kvchat.tui.actions import BY_ID, HINTED, NO_KEY, Action
from kvchat.tui.rebinding import hint_key
from kvchat.tui.state import Phase, described
from kvchat.units import bars, figure, percent, size

SPARK_POINTS = 8
FULL = (0.8, 0.95)  # shares of the context from which its use is shown as a warning, and as an error
# Dot, style and word of each phase; dots differ in shape so that they can be told apart without color.
DOTS = {
    Phase.LOADING: ("◌", "$warning", "loading"),
    Phase.READY: ("●", "$success", "ready"),
    Phase.PREFILL: ("◔", "$accent", "reading"),
    Phase.ANSWERING: ("◉", "$primary", "answering"),
    Phase.COMPARING: ("◈", "$primary", "comparing"),
    Phase.DOWN: ("○", "$warning", "no model"),
}
STATUS = {
    "tok/s": "tokens generated per second, over the last 32 of this answer; the bars are the last readings",
    "first token": "from the question to the first token of its answer",
    "fetch p95": "for 95 % of tokens fetching took less time than this",
    "VRAM": "GPU memory in use, out of all it has; read by NVML",
    "context": "stored tokens, as a share of what the model can attend to",
}
"""What the words of the status bar mean, except those that the panels have too."""
BADGE_GLYPH = "⚠"
BADGE_STYLE = "bold $warning"


def spread(left: Content, right: Content, width: int) -> Content:
    """Return a line of ``width`` cells with ``left`` and ``right`` at its ends; cut ``left`` if both do not fit."""
    room = width - right.cell_length
    if room <= 0:
        return right.truncate(width)
    return left.truncate(room, ellipsis=True, pad=True) + right


class ModeBar(Widget):
    """Model with its weights' type and device, mode (and the ``coming`` one), budget, phase; a recording is marked."""

    DEFAULT_CSS = "ModeBar { height: 1; background: $panel; color: $text-muted; }"

    phase: reactive[Phase] = reactive(Phase.LOADING)
    download: reactive[str] = reactive("")
    info: reactive[Loaded | None] = reactive(None)
    mode: reactive[str] = reactive("")
    coming: reactive[str] = reactive("")
    is_recording: reactive[bool] = reactive(False)
    params: reactive[Params] = reactive(dict)

    def render(self) -> Content:
        """Draw the model at the left, mode and phase at the right; a narrow bar leaves out words."""
        wide = self.size.width >= 72
        mark = ("▶ recording  " if self.is_recording else "", "bold $warning")
        model = ""
        if self.info is not None:
            model = f"{described(self.info)} · {self.info.device}" if wide else short_name(self.info.model)
        left = Content.assemble((" kvchat  ", "bold $primary"), mark, (model, "$foreground"))
        mode = (f" {self.mode.upper()} ", "bold reverse $foreground") if self.mode else ""
        budget = f"{'  budget' if wide else ''} {limit}" if (limit := self.params.get("budget")) else ""
        coming = f"  → {self.coming.upper()}" if wide and self.coming else ""
        far = f" {self.download.removeprefix('Downloading ')}" if wide else ""
        download = (f"  ↓{far}", "$accent") if self.download else ""
        dot, style, word = DOTS[self.phase]
        phase = f" {word} " if wide else " "
        state = Content.assemble(mode, budget, coming, download, "  ", (dot, f"bold {style}"), phase)
        return spread(left, state, self.size.width)


class StatusBar(Widget):
    """Speed and its recent history, time to first token, fetching, badges and context used; or the stage of loading."""

    DEFAULT_CSS = "StatusBar { height: 1; color: $text-muted; }"

    snapshot: reactive[Snapshot | None] = reactive(None)
    stage: reactive[str] = reactive("")

    def __init__(self) -> None:
        super().__init__()
        self._speeds: deque[float] = deque(maxlen=SPARK_POINTS)
        self._speed: float | None = None  # the last one measured

    def add(self, snapshot: Snapshot, answering: bool) -> None:
        """Show a snapshot; only speeds during an answer are plotted."""
        if not snapshot.total:
            self._speeds.clear()
            self._speed = None
        if snapshot.tokens_per_s is not None:  # None for the first tokens after a switch
            self._speed = snapshot.tokens_per_s
            if answering:
                self._speeds.append(self._speed)
        self.snapshot = snapshot

    def clear(self) -> None:
        self._speeds.clear()
        self._speed = self.snapshot = None

    def render(self) -> Content:
        """Draw the figures that are measured and fit; while a model loads, the stage of loading."""
        if self.stage:
            line = Content.assemble(f" {self.stage[0].upper()}{self.stage[1:]}")
            return line.truncate(self.size.width, ellipsis=True)
        s = self.snapshot
        if s is None:
            return Content("")
        speed = Content.assemble(
            " ",
            (f"{figure(self._speed, 'tok/s', 1)} " if self._speed is not None else "", "bold $foreground"),
            (bars(self._speeds), "$primary"),
        )
        reads = f"reads {percent(s.active / s.total)}{' (prompt)' * s.is_prompt}" if s.total and not s.server else ""
        words = [
            reads,
            f"first token {figure(s.ttft_s, 's', 2)}" if s.ttft_s is not None else "",
            f"fetch p95 {figure(s.recall_ms_p95, 'ms', 1)}" if s.recall_ms_p95 is not None else "",
            f"hit rate {percent(s.recall_hit_rate)}" if s.recall_hit_rate is not None else "",
            f"VRAM {size(s.gpu.used)}/{size(s.gpu.total)}" if s.gpu else "",
        ]
        used = s.total / s.context if s.context else None
        style = ("$foreground", "bold $warning", "bold $error")[sum((used or 0) >= level for level in FULL)]
        right = Content.assemble((f" context {percent(used)} ", style))
        right = short_badges(s.badges, self.size.width - speed.cell_length - right.cell_length) + right
        line = speed
        for word in filter(None, words):
            spaced = f"   {word}" if line.plain.strip() else word
            if line.cell_length + len(spaced) + right.cell_length <= self.size.width:
                line += spaced
        return spread(line, right, self.size.width)


class KeyHints(Widget):
    """The keys that act now: those of the screen and of the focused widget."""

    DEFAULT_CSS = "KeyHints { height: 1; color: $text-muted; }"

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.refresh())

    def render(self) -> Content:
        """Draw as many keys with their words as fit; keys with the same word share it."""
        words: dict[str, list[str]] = {}
        for action, key in self._hinted():
            words.setdefault(action.hint_word, []).append(hint_key(key))
        line = Content("")
        for hint, keys in words.items():
            word = Content.assemble((f" {'/'.join(keys)}", "bold $primary"), f" {hint} ")
            if line.cell_length + word.cell_length > self.size.width:
                break
            line += word
        return line

    def _hinted(self) -> Iterator[tuple[Action, str]]:
        """Yield the actions with a hint, each with its first key that acts now; built-in keys come from the table."""
        acting: dict[str, list[str]] = {}
        for active in self.screen.active_bindings.values():
            if active.binding.key.startswith(NO_KEY):
                continue
            acting.setdefault(active.binding.id or "", []).append(active.binding.key)
        scopes = {BY_ID[id].scope for id in acting if id in BY_ID}
        for action in HINTED:
            if keys := acting.get(action.id):
                yield action, next((key for key in action.keys.split(",") if key in keys), keys[0])
            elif not action.is_bindable and action.scope in scopes:
                yield action, action.keys


class TooSmall(Static):
    """Covers the screen in a terminal that is too small."""

    def on_resize(self) -> None:
        size = self.app.size
        self.update(f"kvchat needs 40x12, this terminal has {size.width}x{size.height}: enlarge it")


def short_badges(badges: Sequence[str], room: int) -> Content:
    """Return the badges without their reasons, or only their number if they need more than ``room`` cells."""
    words = f" {BADGE_GLYPH} {' · '.join(badge.partition(':')[0] for badge in badges)} "
    if len(words) > room:
        words = f" {BADGE_GLYPH} {len(badges)} "
    return Content.assemble((words, BADGE_STYLE)) if badges else Content("")


class Badges(Static):
    """All badges with their reasons, a paragraph each; hidden while there are none."""

    DEFAULT_CSS = "Badges { display: none; height: auto; padding: 0 1; }"

    badges: reactive[tuple[str, ...]] = reactive(())

    def watch_badges(self, badges: tuple[str, ...]) -> None:
        self.display = bool(badges)
        self.update(Content("\n").join(Content.assemble((f"{BADGE_GLYPH} {badge}", BADGE_STYLE)) for badge in badges))
