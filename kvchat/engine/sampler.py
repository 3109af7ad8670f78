"""Logits -> the next token, on the logits' device and without waiting for it.

The order is transformers': repetition penalty, temperature, top-k, top-p, min-p; OpenAI's penalties for presence and
frequency come after the first, and count the answer's tokens alone, as in vLLM. Departure: top-k keeps exactly k
tokens where several tie for the last place. Nothing here synchronizes; only ``read`` waits.

On a GPU a call launches 7 kernels if greedy, 19 if it draws, 30 with top-k and top-p, 46 with every setting. They are
in no CUDA graph: the step's graph still computes while they are queued, so that a graph would save the gaps between
them, about 1 us each: by computation at most 1 % of an 8B's token on an H200 (4.7 ms), 0.3 % on an RTX 3060. What the
GPU waits for between two tokens is the number that ``read`` brings, by which the answer may end; a step that began
without it would have to be taken back, and its slots filled again.

A ``Grammar`` holds an answer to a JSON schema: before each token those are ruled out that cannot go on with it.
llguidance knows which ones; it is asked once a token, on the CPU.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvchat import libraries
from kvchat.config.schema import checked_sampling
from kvchat.errors import EngineError, UsageError
from kvchat.protocol.messages import TEMPERATURE, Sampling

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedTokenizerBase

DEFAULTS, ADVISED = Sampling(), Sampling(temperature=TEMPERATURE)
DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # what a model's makers may advise
GREEDY_BELOW = 1e-5  # a temperature that leaves one token in float32
LEAST_TOP_P = 1e-6  # a much smaller one, of which one token is left, is lost in float32 when it is subtracted from 1
LONGEST = 32.0  # a random time that is none of 2**24: finite, so that no token of weight 0 comes as early
NO_TOKEN = -1  # drawn from logits that are not finite
# Between the parts of JSON, or a small model may write white space without end.
WHITE_SPACE = r"[ \n]{0,16}"


class SamplerState(NamedTuple):
    """The state of a sampler: that of the generator, ``seen`` [vocab], bools, and how often each was ``drawn``."""

    generator: Tensor
    seen: Tensor
    drawn: Tensor


def _with(advised: Sampling, sampling: Sampling) -> Sampling:
    """``sampling`` with what is ``advised``, all of it or nothing: a temperature of a person's own takes its place."""
    if sampling.temperature is not None:
        return sampling
    left = [name for name in DRAWN if getattr(sampling, name) == getattr(DEFAULTS, name)]
    return replace(sampling, **{name: getattr(advised, name) for name in left})


class Sampler:
    """Draws the tokens of one answer; the same seed gives the same tokens.

    On a CPU a greedy call costs about 10 µs at 8,192 logits, a drawn one 40 µs and at 49,152 200 µs; top-p costs a sort
    of the tokens that might be kept.
    """

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device | str, advised: Sampling = ADVISED) -> None:
        """``advised`` is for what a ``sampling`` that names no temperature leaves as it is by default.

        Raises UsageError: a setting is out of range.
        """
        self.sampling = sampling = _with(advised, checked_sampling(sampling))
        self.temperature = TEMPERATURE if sampling.temperature is None else sampling.temperature
        self.greedy = self.temperature < GREEDY_BELOW or sampling.top_p < LEAST_TOP_P
        self.generator = torch.Generator(device)
        self._seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._forks = 0
        self.generator.manual_seed(self._seed)
        self._vocab = vocab
        self._penalized = sampling.repetition_penalty != 1
        self._seen = torch.zeros(vocab if self._penalized else 0, dtype=torch.bool, device=device)
        self._counts = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._drawn = torch.zeros(vocab if self._counts else 0, device=device)
        self._once = torch.ones(1, device=device)

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token, 0-d int64, from float32 logits [vocab]; ``NO_TOKEN`` where they hold NaN or infinity.

        Logits of -infinity are tokens that the model rules out, unless all are.
        """
        if self._penalized:  # divide what speaks for a seen token, multiply what speaks against it (arXiv:1909.05858)
            penalty = self.sampling.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self._counts:
            logits = logits - self.sampling.frequency_penalty * self._drawn
            logits = logits - self.sampling.presence_penalty * (self._drawn > 0)
        top, token = logits.max(0)
        if not self.greedy:
            token = self._draw(*self.weights(logits - top))
        token = token.masked_fill(~top.isfinite(), NO_TOKEN)
        if self._penalized:
            self._seen.index_fill_(0, token.clamp(min=0).view(1), True)
        if self._counts:
            self._drawn.index_add_(0, token.clamp(min=0).view(1), self._once)
        return token

    def agrees(self, rows: Tensor, drafts: Sequence[int]) -> int:
        """The number of ``drafts`` [n] that it draws itself, one after the other, from logits ``rows`` [n, vocab].

        It is then as after drawing these: the token after them is still to be drawn.

        Raises:
            EngineError: logits are not finite.
        """
        for number, draft in enumerate(drafts):
            before = self.state()
            if read(self(rows[number])) != draft:
                self.set_state(before)
                return number
        return len(drafts)

    def see(self, ids: Sequence[int] | Tensor) -> None:
        """Count ids of the prompt as seen by the repetition penalty; drawn tokens are counted as they are drawn."""
        if self._penalized:
            self._seen[torch.as_tensor(ids, dtype=torch.int64, device=self._seen.device)] = True

    def weights(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Relative probabilities [n] and the tokens [n] that they belong to, None for all tokens in order.

        ``scores`` [vocab] are logits less their maximum, so the largest weight is 1. Not for greedy sampling.
        """
        scores, tokens = scores / self.temperature, None
        if 0 < self.sampling.top_k < len(scores):
            scores, tokens = scores.topk(self.sampling.top_k)
        weights = scores.exp()
        if self.sampling.top_p < 1:
            weights, tokens = _top_p(weights, tokens, self.sampling.top_p)
        if self.sampling.min_p > 0:
            weights = weights * (weights >= self.sampling.min_p)
        return weights, tokens

    def state(self) -> SamplerState:
        return SamplerState(self.generator.get_state(), self._seen.clone(), self._drawn.clone())

    def set_state(self, state: SamplerState) -> None:
        self.generator.set_state(state.generator)
        self._seen.copy_(state.seen)
        self._drawn.copy_(state.drawn)

    def fork(self) -> None:
        """Go on with other random numbers, which the seed and the number of forks so far determine."""
        self._forks += 1
        self.generator.manual_seed((self._seed + self._forks * 0x9E3779B97F4A7C15) % 2**63)

    def _draw(self, weights: Tensor, tokens: Tensor | None) -> Tensor:
        """One token by its weight: the one that comes first, where each waits for a random time over its weight.

        Each token has a random number of its own, so that nearly the same weights nearly always draw the same token:
        drafts are accepted (Daliri et al., arXiv:2408.07978). One number for all, sought in the sums of the weights,
        draws another token wherever the weights before it changed.
        """
        bits = torch.empty(self._vocab, dtype=torch.int32, device=weights.device).random_(generator=self.generator)
        chances = ((bits if tokens is None else bits[tokens]) + 0.5) * 2.0**-31  # of 31 bits: above 0
        index = (weights / chances.neg_().log1p_().neg_().clamp_(max=LONGEST)).argmax()
        return index if tokens is None else tokens.take(index)  # an index of no dimension would be read by the CPU


def read(token: Tensor) -> int:
    """The token as a number; waits for the device.

    Raises:
        EngineError: it was drawn from logits that are not finite.
    """
    return checked(int(token))


def checked(token: int) -> int:
    """The token that was read.

    Raises:
        EngineError: it was drawn from logits that are not finite.
    """
    if token == NO_TOKEN:
        raise EngineError(
            "The model produced no finite logits.",
            "They hold NaN or infinity, so there is no next token.",
            "Load the model with dtype bfloat16 or float32; if that fails too, its weights are damaged.",
        )
    return token


def _top_p(weights: Tensor, tokens: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of the heaviest tokens that holds the share ``p``, in descending order; others weigh 0."""
    wanted = weights.sum(dtype=torch.float64) * p
    if tokens is None and weights.device.type == "cpu":
        # All tokens below an equal part of 1 - p hold less than 1 - p together. Leaving them out of the sort is a
        # shape that depends on data, free on a CPU only: 2 ms instead of 12 at 150,000 tokens, peaked as models are.
        tokens = (~(weights * len(weights) <= (1 - p) * weights.sum())).nonzero().squeeze(1)  # not >: keeps NaN
        weights = weights[tokens]
    weights, order = weights.sort(descending=True)
    before = weights.cumsum(0, dtype=torch.float64) - weights
    return weights * (before < wanted), order if tokens is None else tokens[order]


# ---- answers that are held to a JSON schema
class Vocabulary:
    """The tokens as llguidance knows them, of ``vocab`` logits; making it takes a second."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, ends: Collection[int]) -> None:
        """Raises UsageError: llguidance is missing, or does not know such a tokenizer."""
        libraries.require("grammar", "An answer constrained to JSON")
        from llguidance.hf import from_tokenizer

        self.vocab = vocab
        try:
            self.tokens = from_tokenizer(tokenizer, n_vocab=vocab, eos_token=sorted(ends))
        except ValueError as error:
            hint = "Use another model, or omit response_format."
            raise UsageError("This model cannot be constrained to JSON.", f"Its tokenizer: {error}.", hint) from None


class Grammar:
    """The state of one answer."""

    def __init__(self, vocabulary: Vocabulary, schema: str) -> None:
        """Raises UsageError: ``schema`` is no JSON schema, or has what llguidance does not know."""
        from llguidance import LLMatcher

        self._vocab = vocabulary.vocab
        self._bits = torch.arange(32)
        self._taken = 0
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITE_SPACE})
        except ValueError as error:
            raise _refused(str(error)) from None
        self._matcher: Any = LLMatcher(vocabulary.tokens, grammar, log_level=0)
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())

    def masked(self, logits: Tensor) -> Tensor:
        """``logits`` [vocab], -infinity where a token cannot come next."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        allowed = (words.unsqueeze(1) >> self._bits & 1).bool().flatten()[: self._vocab]
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def take(self, token: int) -> None:
        """Go on with the token that was drawn.

        Raises:
            UsageError: llguidance gave up: the schema has too many ways to go on.
        """
        if not self._matcher.consume_token(token):
            raise _refused(self._matcher.get_error())
        self._taken += 1

    def go_back(self, tokens: int) -> None:
        """Forget the last ``tokens`` drawn, of which those of a thought were not taken."""
        self._matcher.rollback(min(tokens, self._taken))
        self._taken -= min(tokens, self._taken)


def _refused(why: str) -> UsageError:
    hint = "Change the part of the schema named above, or use a simpler one."
    return UsageError("This JSON schema is not supported.", f"{why.splitlines()[0]}."[:500], hint)
