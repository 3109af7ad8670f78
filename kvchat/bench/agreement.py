"""Agreement of a mode with full: both decode the same text, and their next-token distributions are compared.

Decoding is teacher-forced: after a context that full attention prefills, the mode decodes every token of the text, so
that only the tokens that its steps read differ. The divergence is KL(full || mode) in nats. The attention covered is
the share of attention over all stored tokens, for the mode's own queries, that falls on the tokens read. Perplexity is
over the same tokens, each predicted from the step before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kvchat.bench.frame import Frame, ModelChoice, Result, Row, experiment, mean, methods, parsed, quantile, wilson
from kvchat.bench.settings import Agreement
from kvchat.bench.texts import Passage, passages
from kvchat.bench.walk import Walk
from kvchat.config.modes import FullParameters, ModeParameters
from kvchat.engine.compare import divergence


def run(settings: Agreement, choice: ModelChoice = ModelChoice(), frame: Frame | None = None) -> Result:
    """Measure and return plain data, ready for JSON: a row for each passage and variant, ``summary`` for each variant.

    Raises:
        UsageError: no text is long enough; KvchatError: the model cannot be loaded, or all modes refuse.
    """
    frame, found = frame or Frame(), methods(settings.modes)
    model = choice.load(frame.progress)
    size = settings.context + settings.tokens
    texts = passages(settings.texts, size, model.tokenizer)[: settings.passages]
    head = experiment(
        "agreement",
        "KL divergence from full attention in nats, top-1 agreement and attention mass covered, token by token",
        asdict(settings) | choice.settings(),
        found,
        model,
    )
    forced = Forced(Walk(model), settings, texts, choice.host_dtype == "int8")
    return frame.measure(
        head,
        [{"passage": number, "variant": variant} for number in range(len(texts)) for variant in settings.modes],
        lambda cell: [forced.row(cell["passage"], parsed(cell["variant"]))],
        lambda row: f"{row['text']}: {row['variant']:<48} KL {mean(row['kl']):.4f}",
        lambda rows: [summarized(rows, variant) for variant in dict.fromkeys(settings.modes)],
    )


@dataclass(eq=False)
class Forced:
    """Decodes each passage once in full mode and in the variants; with ``quantizes`` only these use 8-bit pages."""

    walk: Walk
    settings: Agreement
    texts: Sequence[Passage]
    quantizes: bool = False
    _exact: tuple[int, Tensor] | None = None

    def row(self, number: int, parameters: ModeParameters) -> Row:
        """Decode passage ``number`` in a mode; lists are by token, ``covered`` is by layer and KV head.

        Raises:
            KvchatError: the mode refuses.
        """
        text, walk, exact = self.texts[number], self.walk, self._of_full(number)
        context = self.settings.context
        logits = walk.begin(text.ids[:context], parameters, self.settings.tokens, self.quantizes)
        divergences, same, read, covered, nats = [], [], [], [], []
        for token, reference in zip(text.ids[context:], exact[1:], strict=True):
            nats.append(_nats(logits, token))
            logits = walk.step(token)
            divergences.append(divergence(reference, logits))
            same.append(bool(reference.argmax() == logits.argmax()))
            read.append(walk.tokens_read())
            covered.append(walk.covered())
        shares = torch.stack(covered)
        return {
            "text": text.text,
            "kl": [round(each, 6) for each in divergences],
            "same_top": same,
            "nats_mean": mean(nats),
            "nats_mean_full": mean(map(_nats, exact, text.ids[context:])),
            "read_mean": mean(read),
            "covered": [[round(share, 4) for share in layer] for layer in shares.mean(0).tolist()],
            "covered_along": [round(share, 4) for share in shares.mean((1, 2)).tolist()],
        }

    def _of_full(self, number: int) -> Tensor:
        """Return full's logits before and after each decoded token, ``[tokens + 1, vocab]``; cache the last."""
        if self._exact is None or self._exact[0] != number:
            ids, context = self.texts[number].ids, self.settings.context
            logits = self.walk.begin(ids[:context], FullParameters(), self.settings.tokens)
            self._exact = number, torch.stack([logits, *(self.walk.step(token) for token in ids[context:])])
        return self._exact[1]


def _nats(logits: Tensor, token: int) -> float:
    """Return the token's negative log-probability in nats, given the previous step's logits ``[vocab]``."""
    return -float(logits.float().log_softmax(-1)[token])


def summarized(rows: Sequence[Row], variant: str) -> Row:
    mine = [row for row in rows if row["variant"] == variant and "refused" not in row]
    if not mine:
        return {"variant": variant, "refused": next(row["refused"] for row in rows if row["variant"] == variant)}
    divergences = [each for row in mine for each in row["kl"]]
    same = [each for row in mine for each in row["same_top"]]
    layers = torch.tensor([row["covered"] for row in mine]).mean(0)
    return {
        "variant": variant,
        "decoded": len(divergences),
        "kl_mean": mean(divergences),
        "kl_median": quantile(divergences, 0.5),
        "kl_99": quantile(divergences, 0.99),
        "kl_999": quantile(divergences, 0.999),
        "same_top": mean(same),
        "same_top_interval": wilson(sum(same), len(same)),
        "perplexity": _perplexity(row["nats_mean"] for row in mine),
        "perplexity_full": _perplexity(row["nats_mean_full"] for row in mine),
        "read_mean": mean(row["read_mean"] for row in mine),
        "covered": float(layers.mean()),
        "covered_least": float(layers.min()),
        "covered_heads": [[round(share, 4) for share in layer] for layer in layers.tolist()],
    }


def _perplexity(nats: Iterable[float]) -> float:
    return math.exp(mean(nats) or 0.0)
