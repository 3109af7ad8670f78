"""A frame is drawn by what changed, and is as Textual's own."""

from __future__ import annotations

import random

from support.app_driver import finished, typed
from textual._compositor import Compositor
from textual.widget import Widget

from kvchat.tui.widgets.base import MOST_CHANGES, ChangesCompositor
from kvchat.tui.widgets.panels import KvColumn
from kvchat.tui.widgets.ribbon import Ribbon


def frame(app, kind, changes):
    """What a terminal is sent for changes of these regions."""
    app.chat._compositor._dirty_regions = set(changes)
    return kind.render_partial_update(app.chat._compositor).render_segments(app.console)


async def test_a_frame_is_as_textuals_own_whatever_changed(running):
    async with running(size=(200, 60)) as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        shown = app.chat._compositor.visible_widgets.values()
        regions = [part for region, clip in shown if (part := region.intersection(clip))]
        regions += [region.crop_size((region.width, 1)) for region in regions]
        chance = random.Random(0)
        for _ in range(30):
            changes = chance.sample(regions, chance.randint(1, MOST_CHANGES + 2))
            assert frame(app, ChangesCompositor, changes) == frame(app, Compositor, changes)


async def test_what_did_not_change_is_not_asked(running, monkeypatch):
    async with running(size=(200, 60)) as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        asked, lines = [], Widget.render_lines

        def noted(widget, crop):
            asked.append((type(widget).__name__, crop.height))
            return lines(widget, crop)

        block, ribbon = app.chat.query_one(KvColumn).query_one("#plain-rows"), app.chat.query_one(Ribbon)
        # Frames of the application's own timers are not counted.
        with monkeypatch.context() as counted:
            counted.setattr(Widget, "render_lines", noted)
            frame(app, ChangesCompositor, [block.region, ribbon.region])
        heights = dict(asked)
        assert heights["KvColumn"] == block.region.height
        assert not heights.keys() & {"Transcript", "Answer", "MarkdownParagraph", "DetailColumn"}
