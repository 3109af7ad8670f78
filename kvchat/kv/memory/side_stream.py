"""A CUDA stream beside the one the model runs on, so that copies overlap with the layers that follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream beside the current one; on a CPU everything runs in order.

    ``inside`` is true while it is entered, and its work runs beside that of another; ``running`` until ``join``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._inputs: list[Tensor] = []
        self.running = False
        self.inside = False

    @contextmanager
    def __call__(self, *inputs: Tensor) -> Iterator[None]:
        """Queue the work inside behind everything queued so far; it ends before the next ``join``.

        Keep ``inputs`` alive until ``join()``; otherwise the allocator may reuse their memory while the side stream
        still reads it.
        """
        if self._stream is None:
            yield
            return
        self.inside = True
        try:
            self._inputs += inputs
            self.running = True
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self.inside = False

    def join(self) -> None:
        """Make the current stream wait for the work queued on the side stream."""
        if self._stream is not None and self.running:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._inputs.clear()
        self.running = False
