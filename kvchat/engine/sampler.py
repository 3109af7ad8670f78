"""Sample the next token from logits, on the logits' device and without waiting for it.

The order is transformers': repetition penalty, temperature, top-k, top-p, min-p. OpenAI's presence and frequency
penalties come after the first, and count only the answer's tokens, as in vLLM. Departure: top-k keeps exactly k tokens
even if several tie for the last place. Nothing here synchronizes; only ``read`` waits.

On a GPU, one call launches 7 kernels if greedy, 19 if it samples, 30 with top-k and top-p, and 46 with every setting.
They are not in a CUDA graph: they are queued while the step's graph still runs, so a graph would only save the gaps of
about 1 us between them: by computation at most 1 % of an 8B model's token on an H200 (4.7 ms), and 0.3 % on an RTX
3060. Between two tokens the GPU waits for the id that ``read`` returns, because it may end the answer; a step started
without it would have to be undone, and its slots filled again.

A ``Grammar`` makes an answer follow a JSON schema or be a tool call: before each token, tokens that cannot continue it
are ruled out. llguidance computes them on the CPU, once per token.
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
DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # settings that a model's authors may advise
GREEDY_BELOW = 1e-5  # below this temperature only one token is left in float32
LEAST_TOP_P = 1e-6  # below this top-p only one token is left; subtracting a much smaller one from 1 gives 1 in float32
LONGEST = 32.0  # replaces an infinite random time (the others are shorter), so that no token of weight 0 ties with it
NO_TOKEN = -1  # sampled from logits that are not finite
# llguidance's options. A small model may write white space between the parts of JSON forever, if nothing limits it.
# oneOf, which pydantic writes for unions, is read as anyOf.
OF_JSON = {"whitespace_pattern": r"[ \n]{0,16}", "coerce_one_of": True}


class SamplerState(NamedTuple):
    """The state of a sampler: of its generator, bools ``seen`` [vocab], and how often each token was ``drawn``."""

    generator: Tensor
    seen: Tensor
    drawn: Tensor


def _with(advised: Sampling, sampling: Sampling) -> Sampling:
    """Fill in ``advised`` settings that ``sampling`` leaves at their defaults, unless the user set a temperature."""
    if sampling.temperature is not None:
        return sampling
    left = [name for name in DRAWN if getattr(sampling, name) == getattr(DEFAULTS, name)]
    return replace(sampling, **{name: getattr(advised, name) for name in left})


class Sampler:
    """Samples the tokens of one answer; the same seed gives the same tokens.

    On a CPU a greedy call takes about 10 µs for 8,192 logits and a sampled one 40 µs (200 µs for 49,152); top-p adds a
    sort of the tokens that may be kept.
    """

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device | str, advised: Sampling = ADVISED) -> None:
        """``advised`` replaces defaults in a ``sampling`` without a temperature.

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
        """Return the next token, 0-d int64, for float32 logits [vocab]; ``NO_TOKEN`` if they hold NaN or infinity.

        Logits of -infinity rule tokens out, unless all are -infinity.
        """
        if self._penalized:  # divide positive logits of seen tokens, multiply negative ones (arXiv:1909.05858)
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
        """Return how many of ``drafts`` [n] the sampler itself samples, in order, from logits ``rows`` [n, vocab].

        Afterwards its state is as after sampling these; the next token is still to be sampled.

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
        """Mark prompt ids as seen, for the repetition penalty; sampled tokens are marked as they are sampled."""
        if self._penalized:
            self._seen[torch.as_tensor(ids, dtype=torch.int64, device=self._seen.device)] = True

    def weights(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return relative probabilities [n] and their tokens [n], which are None for all tokens in order.

        ``scores`` [vocab] are logits minus their maximum, so the largest weight is 1. Not for greedy sampling.
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
        """Switch to other random numbers, determined by the seed and the number of forks so far."""
        self._forks += 1
        self.generator.manual_seed((self._seed + self._forks * 0x9E3779B97F4A7C15) % 2**63)

    def _draw(self, weights: Tensor, tokens: Tensor | None) -> Tensor:
        """Sample a token by weight: each gets a random time divided by its weight, and the first one wins.

        Each token has its own random number, so that nearly equal weights nearly always give the same token, and drafts
        are accepted (Daliri et al., arXiv:2408.07978). With a single random number, looked up in the cumulative
        weights, any change of earlier weights would give another token.
        """
        bits = torch.empty(self._vocab, dtype=torch.int32, device=weights.device).random_(generator=self.generator)
        chances = ((bits if tokens is None else bits[tokens]) + 0.5) * 2.0**-31  # 31 random bits, never 0
        index = (weights / chances.neg_().log1p_().neg_().clamp_(max=LONGEST)).argmax()
        return index if tokens is None else tokens.take(index)  # indexing with a 0-d tensor would wait for the GPU


def read(token: Tensor) -> int:
    """Return the token as a number; waits for the device.

    Raises:
        EngineError: it was sampled from logits that are not finite.
    """
    return checked(int(token))


def checked(token: int) -> int:
    """Return ``token``, which was read from the device.

    Raises:
        EngineError: it was sampled from logits that are not finite.
    """
    if token == NO_TOKEN:
        raise EngineError(
            "The model produced no finite logits.",
            "They hold NaN or infinity, so there is no next token.",
            "Load the model with dtype bfloat16 or float32; if that fails too, its weights are damaged.",
        )
    return token


def _top_p(weights: Tensor, tokens: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    """Return the smallest set of the heaviest tokens that has the share ``p``, in descending order; others weigh 0."""
    wanted = weights.sum(dtype=torch.float64) * p
    if tokens is None and weights.device.type == "cpu":
        # Tokens whose weight is below an equal share of 1 - p add up to less than 1 - p. Leaving them out of the sort
        # gives a data-dependent shape, which is free only on a CPU: 2 ms instead of 12 for 150,000 peaked logits.
        tokens = (~(weights * len(weights) <= (1 - p) * weights.sum())).nonzero().squeeze(1)  # not >: keeps NaN
        weights = weights[tokens]
    weights, order = weights.sort(descending=True)
    before = weights.cumsum(0, dtype=torch.float64) - weights
    return weights * (before < wanted), order if tokens is None else tokens[order]


# ---- answers constrained to a JSON schema or a tool call
class Vocabulary:
    """The tokens in llguidance's form, for ``vocab`` logits; building it takes a second."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, ends: Collection[int]) -> None:
        """Raises UsageError: llguidance is missing or does not support this tokenizer."""
        libraries.require("grammar", "An answer constrained to JSON")
        from llguidance.hf import from_tokenizer

        self.vocab = vocab
        try:
            self.tokens = from_tokenizer(tokenizer, n_vocab=vocab, eos_token=sorted(ends))
        except ValueError as error:
            hint = "Use another model, or omit response_format and tool_choice."
            raise UsageError("This model cannot be constrained to JSON.", f"Its tokenizer: {error}.", hint) from None


def grammar_of(schema: str) -> str:
    """Return the grammar of the JSON that matches ``schema``. Raises UsageError: it is not a JSON schema."""
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=OF_JSON))
    except ValueError as error:
        raise _refused(str(error)) from None


class Grammar:
    """The parser state of one answer."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        """``grammar`` is in llguidance's syntax. Raises UsageError: llguidance does not support it."""
        from llguidance import LLMatcher

        self._vocab = vocabulary.vocab
        self._bits = torch.arange(32)
        self._taken = 0
        self._matcher: Any = LLMatcher(vocabulary.tokens, grammar, log_level=0)
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())

    def masked(self, logits: Tensor) -> Tensor:
        """Return ``logits`` [vocab] with -infinity for tokens that cannot come next."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        allowed = (words.unsqueeze(1) >> self._bits & 1).bool().flatten()[: self._vocab]
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def take(self, token: int) -> None:
        """Advance by a sampled token.

        Raises:
            UsageError: llguidance gave up, because the schema is too ambiguous.
        """
        if not self._matcher.consume_token(token):
            raise _refused(self._matcher.get_error())
        self._taken += 1

    def go_back(self, tokens: int) -> None:
        """Go back by ``tokens`` sampled tokens; those of a thought had not advanced the grammar."""
        self._matcher.rollback(min(tokens, self._taken))
        self._taken -= min(tokens, self._taken)


def _refused(why: str) -> UsageError:
    hint = "Change the part of the schema named above, or use a simpler one."
    reason = why.splitlines()[0].rpartition("JSON schema: ")[2]
    return UsageError("This JSON schema is not supported.", f"{reason}."[:500], hint)
