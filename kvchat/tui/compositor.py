"""Drawing of a frame only those lines of widgets that have changed."""

from __future__ import annotations

from collections.abc import Iterable

# Textual's own draws all within one rectangle around all changes. Where a panel at the top and the ribbon at the bottom
# change ten times a second, that is the whole screen: at 200x60 750 lines of widgets a frame, of which 30 are others.
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.strip import Strip

MOST_CHANGES = 16  # each is compared with each widget; more than those of a layout have one rectangle around them


class ChangesCompositor(Compositor):
    """Asks the widgets under a change, for its lines."""

    _changes: tuple[Region, ...] = ()

    def render_partial_update(self) -> ChopsUpdate | None:
        """The changes, each drawn by the widgets that are there."""
        if len(self._dirty_regions) <= MOST_CHANGES:
            self._changes = tuple(self._dirty_regions)
        try:
            return super().render_partial_update()
        finally:
            self._changes = ()

    def _get_renders(self, crop: Region | None = None) -> Iterable[tuple[Region, Region, list[Strip]]]:
        if not self._changes:
            yield from super()._get_renders(crop)
            return
        for widget, (region, clip) in self.visible_widgets.items():
            seen = region.intersection(clip)
            parts = [part for change in self._changes if (part := seen.intersection(change))]
            if parts:
                rows = Region.from_union(parts)
                shown = Region(seen.x, rows.y, seen.width, rows.height)
                yield region, shown, widget.render_lines(shown.translate(-region.offset))
