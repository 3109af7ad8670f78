"""The fake device's ``torch.cuda``: streams, events, graphs and the CUDA runtime."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from support.fake_cuda import races
from support.fake_cuda.device import TOTAL, Memory, Refused, gpu
from support.fake_cuda.tape import Tape

NAME = "fake CUDA device"


class Stream:
    """A stream. Its work runs at once; waits are recorded for the race detector."""

    numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = torch.device("cuda", number_of(device)), priority
        self._before: list[int] = []
        self.cuda_stream = next(self.numbers)

    def wait_stream(self, other: Stream) -> None:
        gpu.order.waits(self.cuda_stream, other.cuda_stream)

    def wait_event(self, event: Event) -> None:
        gpu.order.reaches(self.cuda_stream, event.clock)

    def synchronize(self) -> None:
        gpu.wait("synchronize", [self.cuda_stream])

    def __enter__(self) -> Stream:
        gpu.streams.append(self)
        self._before.append(gpu.current)
        gpu.current = self.device.index
        return self

    def __exit__(self, *_: object) -> None:
        gpu.streams.pop()
        gpu.current = self._before.pop()


class Event:
    """An event; it measures whether there was work, not its time. A replay records the external ones of its capture.

    When the device reaches it is random: until then it can be queried any number of times.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.enable_timing, self.external = enable_timing, external
        self.clock: races.Clock = {}
        self.number, self.stream = 0, 0  # of its last recording, among those of all events
        self.device: torch.device | None = None  # the first that it was recorded on

    @property
    def is_recorded(self) -> bool:
        return self.number > 0

    @property
    def is_through(self) -> bool:
        return self.number <= max(gpu.through[self.stream], gpu.waited) and not (self.is_recorded and gpu.behind)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or gpu.stream_of(gpu.current)
        if (self.device or stream.device) != stream.device:
            raise Refused(f"Event device {self.device} does not match recording stream's device {stream.device}.")
        self.device, self.stream = stream.device, stream.cuda_stream
        self.clock = gpu.order.now(self.stream)
        self.place = self.clock[self.stream]
        if gpu.tape is None:
            self.record_again(stream)
        elif self.external:
            gpu.tape.events.append(self)

    def record_again(self, stream: Stream) -> None:
        """Record it as a replay of its graph on ``stream`` does."""
        self.stream = stream.cuda_stream
        self.clock = gpu.order.now(self.stream)
        gpu.recorded = self.number = gpu.recorded + 1

    def wait(self, stream: Stream | None = None) -> None:
        (stream or gpu.stream_of(gpu.current)).wait_event(self)

    def synchronize(self) -> None:
        gpu.wait("synchronize", [])
        gpu.through[self.stream] = max(gpu.through[self.stream], self.number)
        gpu.order.reaches(races.HOST, self.clock)

    def query(self) -> bool:
        gpu.go_on(self.stream)
        if self.is_through:
            gpu.order.reaches(races.HOST, self.clock)
        return self.is_through

    def elapsed_time(self, end: Event) -> float:
        if not (self.enable_timing and end.enable_timing and self.is_recorded and end.is_recorded):
            raise Refused("Both events must be recorded before calculating elapsed time.")
        if not (self.is_through and end.is_through):
            raise Refused("device not ready")
        if self.device != end.device:
            raise Refused("invalid resource handle: events of two devices")
        return float(end.place > self.place)


class Graph:
    """``torch.cuda.CUDAGraph``"""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: Tape | None = None
        self.device = 0  # replays run on its current stream, whichever device is current
        self.order = races.Order()

    def replay(self) -> None:
        if self.tape is None:
            raise Refused("Called CUDAGraph::replay without a preceding successful capture.")
        if gpu.tape is not None:
            raise Refused("a graph is replayed while another is captured")
        stream = gpu.stream_of(self.device)
        gpu.order.as_one(self.order, stream.cuda_stream, "a graph")
        self.tape.replay()
        for event in self.tape.events:
            event.record_again(stream)


@contextmanager
def capturing(graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    """``torch.cuda.graph``"""
    gpu.wait("capture begin")  # torch synchronizes the device
    gpu.tape = tape = Tape()
    gpu.orders.append(graph.order)
    try:
        with stream or Stream() as origin:
            graph.device = origin.device.index
            yield
            if unjoined := gpu.order.unjoined(origin.cuda_stream):
                raise Refused(f"capturing stream has unjoined work: {unjoined}")
    finally:
        gpu.tape = None
        gpu.orders.pop()
        tape.undo()
    graph.tape = tape


class CurrentDevice:
    """``torch.cuda.device``, which can be entered repeatedly."""

    def __init__(self, device: Any = None) -> None:
        self.number = number_of(device)

    def __enter__(self) -> None:
        self._before, gpu.current = gpu.current, self.number

    def __exit__(self, *_: object) -> None:
        gpu.current = self._before


def number_of(device: Any) -> int:
    """The number of a device in any form that torch accepts; without one, that of the current device."""
    if isinstance(device, torch.Tensor):
        return device.device.index or 0
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return gpu.current if index is None else index


gpu.streams += [Stream(0), Stream(1)]  # the default streams


def memory_of(device: Any) -> Memory:
    return gpu.memories[number_of(device)]


def reset_peak(device: Any = None) -> None:
    """``torch.cuda.reset_peak_memory_stats``"""
    memory_of(device).peak = memory_of(device).allocated


class Runtime:
    """``torch.cuda.cudart()``"""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if any(a < address + size and address < a + taken for a, taken in gpu.pinned.items()):
            return 712
        if size + sum(gpu.pinned.values()) > gpu.pinnable:
            return 2
        gpu.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if gpu.unpin(address) else 713

    def cudaGetErrorString(self, code: int) -> str:
        known = {2: "out of memory", 712: "part or all of the requested memory range is already mapped"}
        return known.get(int(code), "unknown error")


class Generator(torch.Generator):
    """A CPU generator for any device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls)


def replaced() -> dict[str, Any]:
    """Replacements for the attributes of ``torch.cuda``, by name."""
    properties = SimpleNamespace(name=NAME, total_memory=TOTAL, multi_processor_count=1, major=9, minor=0, uuid="0")
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpu.count,
        "current_device": lambda: gpu.current,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: gpu.capabilities[number_of(device)],
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: memory_of(device).free_and_total,
        "memory_allocated": lambda device=None: memory_of(device).allocated,
        "memory_reserved": lambda device=None: memory_of(device).allocated,
        "max_memory_allocated": lambda device=None: memory_of(device).peak,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: gpu.wait("synchronize"),
        "set_sync_debug_mode": lambda mode: setattr(gpu, "impatient", mode == "error"),
        "current_stream": lambda device=None: gpu.stream_of(number_of(device)),
        "set_stream": lambda stream: None,
        "stream": lambda stream: stream,
        "device": CurrentDevice,
        "device_of": CurrentDevice,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capturing,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: gpu.tape is not None,
        "cudart": Runtime,
        "_sleep": lambda cycles: None,
    }
