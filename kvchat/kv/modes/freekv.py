"""speculative with ``unit=page``: retrieves pages one step ahead, and corrects heads whose query changed direction.

Paper: FreeKV (speculative retrieval, fine-grained correction; sections 3.2-3.3). Step i attends to sinks, window and
the k = (budget - sink - window) / p pages chosen with the query of step i-1. After its attention, the pages for step
i+1 are chosen with q_i, and missing ones are recalled. Before attention, a KV head whose C, the mean of
cos(q_i, q_{i-1}) over its group, is below tau gets the pages of q_i immediately.

Departures and decisions:
    * The window is exact (the last W tokens, a ring), not whole pages. A page becomes a candidate when its first token
      leaves the window, and only its tokens outside sinks and window are read. So a token reads at most ``budget``
      tokens, none of them twice, and candidates for position i+1 include every page that the next step needs.
    * Page scores of all heads are computed before attention in every step, and are used again after it. The paper
      computes them only for flagged heads, but asking for the flags costs a GPU a round trip per layer.
    * S is 4. W is a quarter of the budget plus the rest that does not fill a page. The paper uses S = W = 128 of 2,048
      for long prompts, and 512 with tau = 0.9 for long answers (``profile=paper``; a quarter each of another budget).
      First tokens beyond 4 are retrieved if they matter.
    * tau is one value for long prompts and long answers (the paper: 0.8 and 0.9), and C depends on the model: see the
      figures "heads corrected" and "mean C".
    * Recall gathers blocks from the pinned host pool, which has the same layout (HND pages) on host and device. The
      paper's section 4 converts between two layouts and streams through a double buffer.
    * On a CPU nothing runs in parallel, so nothing is chosen ahead: a layer chooses once, before its attention, with
      q_i for heads that need a correction and with q_{i-1} for the others. The sets are the same for half the work (the
      bundled model corrects 27 of 28 heads per step). Nothing is chosen while all candidates are resident.
    * Scores are scaled by the layer's attention scale (``selection.page_scores``).
    * The window has at least one page, so that candidates are always complete.
    * A page whose tokens are all pinned or sinks is chosen last, because they are read anyway.

Instead of Quest's bound, ``index=blocks`` ranks a page by its best block of 8 keys, and ``bits2`` and ``bits4`` by the
mass of its keys in 2 or 4 bits. ``query=own`` corrects every head (tau above 1).

``profile=paper`` uses the paper's values with all these departures: apart from the edge of the window the sets are the
same, and only when and how they are computed differs.

Shapes: per layer tables ``[H, k*p + S + W]``; bounds ``[layers, H, page, 2*d_k]``. The first layer is full by default.
Costs: a step scores all pages (2*d_k elements per page and head), and recalls only (page, head) blocks that changed.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

import torch
from torch import Tensor

from kvchat.config.modes import SpeculativeParameters
from kvchat.errors import UsageError
from kvchat.kv.attention import AttentionSpec, Weights
from kvchat.kv.modes.base import ModeReport, Step, budget_of
from kvchat.kv.modes.page_index import IndexedMode, KeyCodes, PageBounds
from kvchat.kv.ops.selection import Candidates, chosen_by
from kvchat.kv.state import KVState

SINK = 4
QUARTER = 4  # the window is a quarter of the budget plus what fills no page; the paper's sinks are a quarter
TAU = 0.8


class FreeKV(IndexedMode):
    """Sinks, a window and k retrieved pages per layer and KV head."""

    parameters: SpeculativeParameters
    index: PageBounds | KeyCodes

    def _set_up(self) -> None:
        budget = budget_of(self.parameters, self.traits.context)
        self._share_out(budget, *self._split(budget), self.parameters.first_full)
        self.k = (self.budget - self.sink - self.window) // self.geometry.page
        self._pin_to_sinks()
        self.tau = self._tau()

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), self.cosine, self._wholly_pinned]

    def attach(self, state: KVState) -> None:
        super().attach(state)
        self.cosine = torch.zeros((), dtype=torch.float64, device=state.device)
        p = self.geometry.page
        read = Counter(position // p for position in self.pins)
        read[self.sink // p] += self.sink % p
        pages = [page for page, tokens in read.items() if tokens == p]  # all tokens are pinned or sinks
        self._wholly_pinned = torch.tensor(pages, dtype=torch.int64, device=state.device)
        self._entered_at = state.steps, state.transfer.totals.corrections

    def fill(self, fresh: bool) -> None:
        super().fill(fresh)
        if not self.k:
            return
        position = self.state.position
        self._choose_all(self._candidates(position))
        self._open_pages(self.slots, slice(None), position - self.window)

    def prepare_step(self) -> Step:
        super().prepare_step()
        if self._widens:
            self.index.tokens = self.state.total + 1
        else:
            self.index.follow(self.state.host)
        return Step(exact=self._reads_all(self.state.total + 1))

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._page = torch.div(position, self.geometry.page, rounding_mode="floor").view(1)
        self._now, self._next = self._candidates(position), self._candidates(position + 1)
        self._oldest = position - self.window
        self._flags: list[Tensor] = []
        self._query = self.state.query[self.first :].clone()
        self._has_all = self.state.ops.reads_back and self._holds_all(self._now, self.state.total + 1)
        if self._has_all:
            self._open_pages(self.slots, slice(None), self._oldest)

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        if layer < self.first:
            return False
        if self.state.ops.reads_back:
            if self.k and not self._has_all:
                self._choose_late(layer, query)
            return False
        if self._widens:
            self.state.ops.update_bounds(self.index.of(layer), self._page, key)
        if self.k:
            self._score = self._correct(layer, query) if self.tau > -1 else None
        return False

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        # With tau > 1 every head is corrected in every step, so speculatively chosen pages would never be read.
        if layer >= self.first and self.k and self.tau <= 1 and not self.state.ops.reads_back:
            with self.state.transfer.side_stream()(query if self._score is None else self._score):
                scores = self._scores(layer, query) if self._score is None else self._score
                self._recall(layer, self.choose(layer, scores, self._next))

    def forward_end(self, position: Tensor) -> None:
        if self.k and not self.state.ops.reads_back:
            self._open_pages(self.slots, slice(None), self._oldest + 1)
        elif self.k and self._reads_all(self.state.total + 2) and not self._holds_all(self._next, self.state.total + 2):
            self._choose_all(self._next)
        if self.k:
            query = self.state.query[self.first :]
            self.cosine += torch.cosine_similarity(query.float(), self._query.float(), -1).mean()
        if self._flags:
            self.state.transfer.count_corrections(torch.cat(self._flags).sum())

    def report(self) -> ModeReport:
        chosen = {"budget": self.budget, "sink": self.sink, "window": self.window, "tau": self.tau}
        pages = {"pages per head": self.k, "candidate pages": self._candidate_pages(self.state.total + 1)}
        params, cosine = self.parameters.model_dump() | chosen, float(self.cosine)
        heads, stats = self._heads() if self.k else 0, pages | self._corrections(cosine)
        return ModeReport(params, stats, correctable=heads, cosine=cosine, badges=self._badges())

    def _split(self, budget: int) -> tuple[int, int]:
        """Return the sinks and the window of a budget; the rest is for pages."""
        p, given = self.geometry.page, self.parameters
        quarter = max(p, budget // QUARTER // p * p)
        published = given.profile == "paper"
        sink = given.sink if given.sink is not None else quarter if published else SINK
        left = 0 if published else max(0, budget - sink - quarter) % p
        return sink, quarter + left if given.window is None else given.window

    def _tau(self) -> float:
        """Return tau as given, otherwise ``TAU``; with ``query=own`` above 1, to correct every head in every step."""
        if self.parameters.query == "ahead":
            raise UsageError(
                "Pages are not chosen one layer ahead.",
                f"query = ahead chooses tokens, but unit = {self.parameters.unit}.",
                "Set unit=token, or query=last or own.",
            )
        if self.parameters.query == "own":
            return 2.0
        return TAU if self.parameters.tau is None else self.parameters.tau

    def _new_index(self, device: torch.device) -> PageBounds | KeyCodes:
        kind = self.parameters.index or "bits2"
        if kind in ("bits2", "bits4"):
            return KeyCodes(self.geometry, device, self.first, int(kind[-1]))
        return PageBounds(self.geometry, device, self.first, in_blocks=kind == "blocks")

    @property
    def _widens(self) -> bool:
        """True if each step updates the bounds of the page being filled, which the next step may choose."""
        return self.parameters.index == "bounds" and not self.state.ops.reads_back

    def _badges(self) -> tuple[str, ...]:
        """Return a warning if sinks and window leave no room for a page, unless everything is read."""
        if self.k or self._reads_all(self.state.total):
            return ()
        enough = next(n for n in count(self.budget) if n >= sum(self._split(n)) + self.geometry.page)
        held = f"sinks and window take {sum(self._split(self.budget))} of the budget of {self.budget} tokens"
        return (f"recalls nothing: {held}, which leaves no page; use a budget of at least {enough} tokens",)

    def _heads(self) -> int:
        """Return the number of KV heads that retrieve pages."""
        return (self.geometry.layers - self.first) * self.geometry.kv_heads

    def _corrections(self, cosine: float) -> dict[str, str | float]:
        """Return the share of heads corrected per step and the mean of C, since the mode was entered."""
        steps = self.state.steps - self._entered_at[0]
        if not (steps and self.k):
            return {}
        corrected = (self.state.transfer.totals.corrections - self._entered_at[1]) / steps / self._heads()
        return {"heads corrected": f"{corrected:.0%}", "mean C": round(cosine / steps, 3)}

    def _scores(self, layer: int, query: Tensor) -> Tensor:
        """Return the pages' scores ``[H, G, page]``; the lowest possible for pages that are read anyway."""
        scores = self.index.scores(self.state.ops, layer, query, self.state.scaling(layer))
        if len(self._wholly_pinned):
            scores.index_fill_(-1, self._wholly_pinned, torch.finfo(scores.dtype).min)
        return scores

    def choose(self, layer: int, scores: Tensor, candidates: Candidates, flagged: Tensor | None = None) -> Tensor:
        """Return the pages for the layer's page slots, ``[H, k]``; only ``flagged`` heads may change theirs."""
        return self.state.ops.choose(scores, candidates, self.slots.pages_of(layer), flagged)

    def needs_correction(self, layer: int, query: Tensor) -> Tensor:
        """Return which heads' queries changed direction since the last token, bool ``[H]``."""
        return self.state.ops.needs_correction(query, self.state.query[layer], self.tau)

    def _correct(self, layer: int, query: Tensor) -> Tensor:
        """Recall pages now for heads whose query changed direction; return the pages' scores."""
        scores = self._scores(layer, query)
        again = self.tau <= 1  # pages were already chosen for this step
        corrected = self.needs_correction(layer, query)
        self._flags.append(corrected)
        self._recall(layer, self.choose(layer, scores, self._now, corrected), again)
        self._open_layer(layer)
        return scores

    def _choose_late(self, layer: int, query: Tensor) -> None:
        """Choose once instead of twice: by this query for heads to correct, by the last token's for the others."""
        by = self.state.query[layer]
        if self.tau > -1:
            corrected = self.needs_correction(layer, query)
            self._flags.append(corrected)
            by = chosen_by(corrected, query, by)
        self._recall(layer, self.choose(layer, self._scores(layer, by), self._now))
        self._open_layer(layer)

    def _choose_all(self, candidates: Candidates) -> None:
        """Recall in all layers the pages chosen with the last token's queries."""
        for layer in range(self.first, self.geometry.layers):
            self._recall(layer, self.choose(layer, self._scores(layer, self.state.query[layer]), candidates))

    def _holds_all(self, candidates: Candidates, tokens: int) -> bool:
        """Return whether all candidate pages, the newest included, are resident for the step that makes ``tokens``."""
        if not self._reads_all(tokens):
            return False
        newest = int(candidates.last)
        return newest < candidates.first or bool((self.slots.pages == newest).any(2).all())

    def _candidates(self, position: Tensor) -> Candidates:
        """Return the pages with a token between sinks and window in the step at ``position``."""
        p = self.geometry.page
        last = torch.div(position - self.window, p, rounding_mode="floor")
        return Candidates.between(self.sink // p, last, self.index.pages)

    def _recall(self, layer: int, placed: Tensor, again: bool = False) -> None:
        self.state.transfer.load_pages(self.slots, layer, placed, self.slots.pages_of(layer), again)

    def _open_layer(self, layer: int) -> None:
        index = layer - self.first
        self._open_pages(self.slots, slice(index, index + 1), self._oldest)

    def _reads_all(self, tokens: int) -> bool:
        """Return whether the token decoded as number ``tokens`` reads all earlier tokens."""
        return self._candidate_pages(tokens) <= self.k

    def _candidate_pages(self, tokens: int) -> int:
        """Return how many pages have a token between sinks and window for the token decoded as number ``tokens``."""
        p = self.geometry.page
        return max(0, (tokens - 1 - self.window) // p - self.sink // p + 1)
