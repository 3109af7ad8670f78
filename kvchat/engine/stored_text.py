"""The part of ``Session`` that shows what is stored."""

from __future__ import annotations

from torch import Tensor

from kvchat.engine.generate.answer import AnswerLoop
from kvchat.engine.guards import whole
from kvchat.engine.model.load import LoadedModel
from kvchat.errors import UsageError
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager


class StoredText:
    """The tokens that attention read, with their text."""

    _loop: AnswerLoop
    _kv: KVManager
    _model: LoadedModel

    def attended(self, layer: int) -> Tensor:
        """The stored tokens that the last token's attention read in ``layer``, as a mask: bool ``[kv_head, total]``.

        Raises:
            UsageError: the model has no such layer.
        """
        if not 0 <= whole(layer, "A layer") < self._model.layers:
            raise UsageError(
                f"There is no layer {layer}.",
                f"The model has layers 0 to {self._model.layers - 1}.",
                "Give one of these.",
            )
        return attended(self._kv.state, layer)

    def text(self, start: int, end: int) -> str:
        """The text of the stored tokens ``start`` to ``end``, control tokens included."""
        ids = self._loop.stored.ids[whole(start, "A position") : whole(end, "A position")]
        text: str = self._model.tokenizer.decode(ids)
        return text
