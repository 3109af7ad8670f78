"""An answer that is held to a JSON schema: before each token those are ruled out that cannot go on with it.

llguidance knows which ones; it is asked once a token, on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvchat import libraries
from kvchat.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedTokenizerBase


# Between the parts of JSON, or a small model may write white space without end.
WHITE_SPACE = r"[ \n]{0,16}"


class Vocabulary:
    """The tokens as llguidance knows them, of ``vocab`` logits; making it takes a second."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, ends: Collection[int]) -> None:
        """Raises UsageError: llguidance is missing, or does not know such a tokenizer."""
        if libraries.absent("grammar"):
            hint = f"Run: {libraries.extra('grammar')}"
            raise UsageError("To hold an answer to JSON takes llguidance.", "It is not installed.", hint)
        from llguidance.hf import from_tokenizer

        self.vocab = vocab
        try:
            self.tokens = from_tokenizer(tokenizer, n_vocab=vocab, eos_token=sorted(ends))
        except ValueError as error:
            raise UsageError("This model's answers cannot be held to JSON.", f"Its tokenizer: {error}.") from None


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
            EngineError: llguidance gave up.
        """
        if not self._matcher.consume_token(token):
            raise EngineError("The answer cannot be held to its schema any more.", self._matcher.get_error())
        self._taken += 1

    def go_back(self, tokens: int) -> None:
        """Forget the last ``tokens`` drawn, of which those of a thought were not taken."""
        self._matcher.rollback(min(tokens, self._taken))
        self._taken -= min(tokens, self._taken)


def _refused(why: str) -> UsageError:
    return UsageError("An answer cannot be held to this JSON schema.", f"{why.splitlines()[0]}."[:500])
