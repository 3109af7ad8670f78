"""GraphRunner: a decode step as one CUDA graph, from the token that goes in to the logits that come out.

The first step of a kind runs eagerly, which is the warm-up a capture needs; being a step like any other it leaves no
trace. The second is captured, and from then on replayed: the processor launches one graph a token.
``KVManager.graph_key`` tells kinds apart: the mode, which of its steps it is, and where its tensors lie. After growth
or a switch the next two steps warm up and capture again. What cannot be captured runs eagerly, ``refusal`` says why.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from kvchat.kv.manager import KVManager

Replay = Callable[[], None]

# Kinds of step kept of one mode: sync has as many as it has phases; more come and go as a conversation grows.
MAX_GRAPHS = 16


class Recorder(Protocol):
    """Makes a graph of what a function launches."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Record ``run`` without carrying it out; what replays it, and the tensor where its result will lie."""
        ...


class CudaRecorder:
    """CUDA graphs of one device; those alive share a memory pool, because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch's own stream for captures is one of the device that was current when it was first wanted.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        if not self._graphs:
            # torch asserts that a pool which all its graphs left is empty, and cuBLAS' workspace stays in it for good.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), _uncollected():
            before = torch.cuda.current_stream(self._device)
            try:
                # Other threads of this process (readings of the GPU's state) may go on calling CUDA meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    result = run()
            except Exception:
                self._failed.append(graph)  # torch's allocator goes on asking a capture that failed to end
                raise
            finally:
                torch.cuda.set_stream(before)  # a capture that fails to end leaves its own
        self._graphs.add(graph)
        return graph.replay, result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn the garbage collector off: freeing pinned memory waits for the device, which a capture must not."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records steps on ``device``, None on a CPU."""
    return CudaRecorder(device) if device.type == "cuda" else None


class GraphRunner:
    """Runs the steps of a KV manager, by graphs where there is a recorder; ``refusal`` says why this mode has none.

    A ``refusal`` that is given holds for every mode.
    """

    def __init__(self, kv: KVManager, recorder: Recorder | None, refusal: str = "") -> None:
        self._always = refusal if recorder else ""
        self.refusal = self._always
        self._kv = kv
        self._recorder = recorder
        self._mode = kv.mode
        self._recorded: dict[tuple[object, ...], tuple[Replay, Tensor]] = {}
        self._warm: set[tuple[object, ...]] = set()

    @property
    def prepares(self) -> bool:
        """True if the next steps are slow, because the mode's first ones warm up and are captured."""
        return self._usable() and not self._recorded

    @property
    def badges(self) -> tuple[str, ...]:
        """Warnings about how steps run, for the screen."""
        return (f"no CUDA graph: {self.refusal}",) if self.refusal else ()

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``step``, which the caller may keep."""
        if not self._usable():
            return step()
        kind = self._kv.graph_key()
        if kind not in self._recorded and (kind not in self._warm or not self._record(kind, step)):
            self._warm.add(kind)
            return step()
        replay, result = self._recorded[kind]
        replay()
        return result.clone()

    def _usable(self) -> bool:
        if self._kv.mode is not self._mode:
            self._forget()
        # A pageable host pool is gathered from by the CPU.
        return self._recorder is not None and not self.refusal and self._kv.state.host.pinned

    def _record(self, kind: tuple[object, ...], step: Callable[[], Tensor]) -> bool:
        assert self._recorder is not None
        if len(self._recorded) >= MAX_GRAPHS:
            self._recorded.clear()
        try:
            self._recorded[kind] = self._recorder(step)
        except Exception as error:  # noqa: BLE001  # Triton and transformers raise errors of their own
            # A captured step was not executed: the caller runs it eagerly now, which raises by itself if it cannot run.
            # An error at the end of a capture is only the consequence of the one inside.
            ended = isinstance(error, torch.AcceleratorError)
            first = (error.__context__ if ended else None) or error
            self.refusal = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0]}"
        return not self.refusal

    def _forget(self) -> None:
        """Drop graphs that hold addresses of memory which the mode freed when it was left."""
        self._mode = self._kv.mode
        self.refusal = self._always
        self._recorded.clear()
        self._warm.clear()
