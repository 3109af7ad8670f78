"""The part of ``Session`` that takes tokens one by one, for whoever draws them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvchat.engine.generate.answer import AnswerLoop
from kvchat.engine.generate.mode_switcher import ModeSwitcher
from kvchat.engine.guards import token_ids, whole_number
from kvchat.engine.keep.keeper import Keeper
from kvchat.errors import UsageError
from kvchat.kv.manager import KVManager


class Tokens:
    """Stores and forgets tokens."""

    _loop: AnswerLoop
    _kv: KVManager
    _keeper: Keeper
    _switcher: ModeSwitcher

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Store ``ids`` after what is stored, exactly, in any mode; the next token's logits ``[vocab]``.

        Raises:
            UsageError: no ids, or one that is no token; DoesNotFitError: longer than the model's context, or memory is
                short.
        """
        ids = token_ids(ids)
        with self._loop.lock:
            self._loop.ask()
            with self._keeper.changing():
                self._switcher.check_prompt(self._kv.total + len(ids))
                logits = self._loop.prefill(ids)
                self._switcher.calibrate()
        return logits

    def step(self, token: int) -> Tensor:
        """Store ``token``, reading what the mode lets it read; the next token's logits ``[vocab]``.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: the model's context is full, or memory is short. Nothing is stored then.
        """
        with self._loop.lock:
            self._loop.lock.check_idle()
            with self._keeper.adding():
                return self._loop.step(whole_number(token, "A token id"))

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` stored tokens; with all that are stored nothing happens.

        Raises:
            UsageError: no whole number, a negative one, or more than are stored.
        """
        tokens = whole_number(tokens, "The number of tokens")
        with self._loop.lock:
            total = self._kv.total
            if not 0 <= tokens <= total:
                raise UsageError(
                    f"A conversation of {total:,} tokens cannot be truncated to {tokens:,}.",
                    hint=f"Give 0 to {total:,}, the number of tokens to keep.",
                )
            self._loop.ask()
            with self._keeper.changing():
                self._loop.truncate(tokens)
