"""Tensors on the fake CUDA device, and how it runs torch's operations and kernels."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from support.fake_cuda import attention, races
from support.fake_cuda.tape import UNWRITTEN, WAITS, Tape, poison
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TOTAL = 8 * 2**30
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

COPIES = ("copy_", "_to_copy", "_copy_from", "_copy_from_and_resize")
# May take an index in host memory.
INDEXES = ("index", "index_put_", "index_put", "_index_put_impl_")
# Touch only the rows that their index picks.
PICKS = ("index_select", "index_copy_", "index_fill_")
# Composed of others but run as one: torch decomposes them in Python, which took a tenth of a forward.
PRODUCTS = ("linear", "matmul")
INTEGER_PRODUCTS = (*PRODUCTS, "mm", "bmm", "addmm", "baddbmm", "mv", "dot")


class Refused(RuntimeError):
    """An error that CUDA would raise."""


class Hold:
    """A target for a weak reference, which a wrapper tensor does not support."""


class OnGpu(torch.Tensor):
    """A tensor on the fake device; ``inner`` is the CPU tensor that holds its elements."""

    inner: torch.Tensor
    hold: Hold

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device = GPU, requires_grad: bool = False) -> OnGpu:
        """Wrap ``inner`` as a tensor on a fake device."""
        device = GPU if device.index is None else device
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        made.inner = inner
        made.hold = gpu.hold(inner, device.index)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return gpu.operation(func, args, kwargs or {})

    def tolist(self) -> list:
        gpu.wait("tolist")
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return gpu.seen_at(self.inner)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def numpy(self, *, force: bool = False):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"OnGpu({self.inner!r})"

    def __deepcopy__(self, memo: dict) -> OnGpu:
        return OnGpu(self.inner.clone(), self.device)


class Everywhere(TorchDispatchMode):
    """Dispatches operations without an operand on the device: factories and copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return gpu.operation(func, args, kwargs or {})


class Numbered(TorchFunctionMode):
    """Replaces the device ``cuda`` by ``cuda:0``, which torch without CUDA cannot resolve, and runs fused attention."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.cuda:
            return args[0].to(GPU)
        if func is torch.Tensor.numpy and gpu.addresses(args[0]):
            gpu.order.launch(races.HOST, "numpy", [races.of_tensor(inner_of(args[0]), writes=False)])
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnGpu):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, "device": args[0].device, **(kwargs or {})})
        kwargs = {key: _numbered(value) for key, value in (kwargs or {}).items()}
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            gpu.pin(made.untyped_storage())
            return made
        if func is torch._C._nn.scaled_dot_product_attention and set(map(type, args)) <= {OnGpu}:
            fused = attention.fused(*args, **kwargs)
            if fused is not None:
                return fused
        return func(*map(_numbered, args), **kwargs)


def _numbered(value: Any) -> Any:
    return GPU if isinstance(value, str | torch.device) and str(value) == "cuda" else value


@dataclass
class Memory:
    """Bytes of one device."""

    total: int = TOTAL
    allocated: int = 0
    peak: int = 0

    @property
    def free_and_total(self) -> tuple[int, int]:
        return self.total - self.allocated, self.total


class Gpu:
    """State of the fake devices: allocated and pinned memory, streams, the capture in progress.

    There are ``count`` of them, each with its own of ``memories`` and ``capabilities``, and ``current`` is the number
    of a thread's current one. Work goes to the current stream of its operands' device; a kernel goes to that of the
    current device, on which all its operands must be. Only a copy takes operands on two devices.
    At most ``pinnable`` bytes of host memory can be pinned. With ``elsewhere``, as in WSL2, each registration has an
    address on the device that no other had before. The first device has ``total`` bytes of memory. ``through`` is the
    number of the last event that each stream has reached, among those ``recorded``: it grows by ``chance``, not while
    the device is ``behind``, and at least to those ``waited`` for.
    """

    def __init__(self) -> None:
        self.count, self.memories, self.capabilities = 1, (Memory(), Memory()), ((9, 0), (9, 0))
        self._thread = threading.local()
        self.behind, self.chance = False, random.Random(0)
        self.recorded, self.waited, self.through = 0, 0, Counter[int]()
        self.pinnable, self.elsewhere = 2**40, False
        self._shifts: dict[int, int] = {}
        self._registered = 0
        self.tape: Tape | None = None
        self.impatient = False
        self.hazards: list[str] = []
        self.pinned: dict[int, int] = {}
        # The last is current: a capture has its own order.
        self.orders = [races.Order()]
        self.streams: list[Any] = []
        self._holders: Counter[int] = Counter()
        self._held_by: dict[int, Memory] = {}
        self._aliases: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Bytes of the first device."""
        return self.memories[0].total

    @total.setter
    def total(self, size: int) -> None:
        self.memories[0].total = size

    @property
    def allocated(self) -> int:
        """Bytes allocated on the first device."""
        return self.memories[0].allocated

    @property
    def order(self) -> races.Order:
        """The order of launches: of the capture in progress, if there is one."""
        return self.orders[-1]

    @property
    def current(self) -> int:
        return getattr(self._thread, "current", 0)

    @current.setter
    def current(self, number: int) -> None:
        self._thread.current = number

    def stream_of(self, number: int) -> Any:
        """The current stream of a device."""
        return next(stream for stream in reversed(self.streams) if stream.device.index == number)

    # ---- operations

    def operation(self, func, args: tuple, kwargs: dict) -> Any:
        """Run one of torch's operations and record its accesses."""
        if _is_composed(func) and func.overloadpacket.__name__ not in (*PRODUCTS, *attention.REPLACED):
            with Everywhere():  # in inference mode it arrives before it is decomposed
                return func.decompose(*args, **kwargs)
        name, schema = func.overloadpacket.__name__, func._schema
        leaves = tensors_of((*args, *kwargs.values()))
        on_gpu = [leaf for leaf in leaves if isinstance(leaf, OnGpu)]
        wanted = kwargs.get("device")
        device = torch.device(wanted) if wanted is not None else on_gpu[0].device if on_gpu else CPU
        here = device.type == "cuda"
        if not on_gpu and not here:
            if any(map(self.addresses, leaves)):
                self._note(func, args, kwargs, None, races.HOST)
            return func(*args, **kwargs)
        waits = not kwargs.get("non_blocking") and not (name == "copy_" and args[2:] and args[2])
        self._refuse(name, leaves, on_gpu, here, waits)
        inner_args, inner_kwargs = mapped(inner_of, args), mapped(inner_of, kwargs)
        run = functools.partial(attention.REPLACED.get(name, func), *inner_args, **inner_kwargs)
        result = run() if self.tape is None else self.tape.operation(run, schema)
        if schema.name in UNWRITTEN:
            poison(result)
        outer = self._outer(func, leaves, on_gpu, result, device)
        used = {(leaf.device.index or 0) for leaf in on_gpu} | ({device.index or 0} if here else set())
        streams = [self.stream_of(number).cuda_stream for number in used]
        for one, other in itertools.permutations(streams, 2):  # a copy from one device to another
            self.order.waits(one, other)
        self._note(func, args, kwargs, outer, streams[0], waits)
        for other in streams[1:]:
            self.order.waits(other, streams[0])
        return outer

    def launch(self, name: str, run: Callable[[], races.Touched], tensors: list[torch.Tensor]) -> None:
        """Run a kernel on ``tensors`` (inner ones); ``run`` returns the addresses it touched.

        Raises:
            Refused: it reaches beyond pinned memory.
        """
        touched = run() if self.tape is None else self.tape.kernel(run, tensors)
        accesses = races.of_kernel(touched, tensors)
        for access in accesses:
            if access.address in self._aliases and access.end > self._pinned_from(access.address):
                raise Refused(f"an illegal memory access was encountered: {name}")
        self.order.launch(self.stream_of(self.current).cuda_stream, name, accesses)

    def _pinned_from(self, address: int) -> int:
        """Number of contiguous pinned bytes from ``address`` on."""
        end = address
        while end in self.pinned:
            end += self.pinned[end]
        return end - address

    def _note(self, func, args: tuple, kwargs: dict, outer: Any, who: object, waits: bool = True) -> None:
        """Record what one of torch's operations reads and writes."""
        name = func.overloadpacket.__name__
        if "empty" in name or _returns(func, is_write=False):
            return  # an allocation or a view touches nothing
        reads, writes, changed = [], [], _changed(func)
        for spec, given in (*enumerate(args), *kwargs.items()):
            found = [leaf for leaf in tensors_of((given,)) if self.addresses(leaf)]
            (writes if spec in changed else reads).extend(found)
        known = {id(leaf) for leaf in writes}
        made = [leaf for leaf in tensors_of((outer,)) if isinstance(leaf, OnGpu)]
        writes += [leaf for leaf in made if id(leaf) not in known]
        picked = (args[1], inner_of(args[2])) if name in PICKS else None
        accesses = [
            races.of_tensor(inner_of(leaf), mine is writes, picked if picked and leaf is args[0] else None)
            for mine in (reads, writes)
            for leaf in mine
            if leaf.numel()
        ]
        self.order.launch(who, name, accesses)
        if name.startswith(WAITS) or (name in COPIES and not made and waits):
            self.order.host_waits([who])

    def wait(self, what: str, streams: list[int] | None = None) -> None:
        """Wait on the host for the given streams or all of them.

        Raises:
            Refused: during a capture, or while synchronizing operations are errors.
        """
        if self.tape is not None:
            raise Refused(f"operation not permitted when stream is capturing: {what}")
        if self.impatient:
            raise Refused(f"called a synchronizing CUDA operation: {what}")
        if streams is None:
            self.waited = self.recorded
        for stream in streams or ():
            self.through[stream] = self.recorded
        self.order.host_waits(streams)

    def go_on(self, stream: int) -> None:
        """Let a stream reach all, some or none of the further events recorded so far."""
        before = self.through[stream]
        self.through[stream] = min(self.recorded, self.chance.randint(before, 2 * self.recorded - before))

    def _refuse(self, name: str, leaves: list, on_gpu: list, here: bool, waits: bool) -> None:
        off = [leaf for leaf in leaves if not isinstance(leaf, OnGpu)]
        if name.startswith(WAITS):
            self.wait(name, [])
        if name in COPIES:
            if off or not here:
                if waits or not off or not all(map(self.addresses, off)):  # otherwise it is queued, even in a capture
                    self.wait(f"{name} between host and device", [])
                for tensor in off:
                    self._one_segment(tensor)
            return
        if self.tape is not None and any(leaf.dim() for leaf in off):
            self.wait(f"{name} with an operand in host memory", [])
        if len(devices := {str(leaf.device) for leaf in on_gpu}) > 1:
            raise Refused(f"Expected all tensors to be on the same device, {name}: {' and '.join(sorted(devices))}")
        beside = [leaf for leaf in off if leaf.dim() or name.startswith((*INDEXES, "index_", "gather", "scatter"))]
        if on_gpu and beside and name not in INDEXES:
            raise Refused(f"Expected all tensors to be on the same device, {name}: {on_gpu[0].device} and cpu")
        if name in INDEXES and off and not isinstance(leaves[0], OnGpu):
            raise Refused("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if name in INTEGER_PRODUCTS and not on_gpu[0].is_floating_point():
            raise Refused(f'"{name}" not implemented for integers')

    def _one_segment(self, tensor: torch.Tensor) -> None:
        """Refuse a copy across two separately pinned segments."""
        first = tensor.data_ptr()
        last = first + max(0, sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
        last = first + (last - first) * tensor.element_size()
        segments = [next((a for a, size in self.pinned.items() if a <= x < a + size), None) for x in (first, last)]
        if tensor.numel() and segments[0] != segments[1]:
            raise Refused("invalid argument: a copy across two segments of pinned memory")

    def _outer(self, func, operands: list, on_gpu: list, result: Any, device: torch.device) -> Any:
        """Wrap a result for its device; an operation in place returns the tensor it was given."""
        given = {id(inner_of(leaf)): leaf for leaf in operands}

        def outer(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in given:
                return given[id(value)]
            return OnGpu(value, device) if device.type == "cuda" else value

        # A view is an inference tensor if its base is one, whatever mode it was made in.
        is_view = on_gpu and (_returns(func, is_write=False) or _returns(func, is_write=True))
        with torch.inference_mode(on_gpu[0].is_inference()) if is_view else nullcontext():
            return mapped(outer, result)

    # ---- memory

    def hold(self, tensor: torch.Tensor, number: int = 0) -> Hold:
        """Count the device tensors of an allocation: it is freed with the last one, even if a tape still holds it."""
        hold, storage = Hold(), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._aliases:
            return hold
        if not self._holders[address]:
            memory = self._held_by[address] = self.memories[number]
            if memory.allocated + size > memory.total:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes. GPU {number}")
            memory.allocated += -(-size // 512) * 512
            memory.peak = max(memory.peak, memory.allocated)
            self.order.made(address, size, self.stream_of(number).cuda_stream)
        self._holders[address] += 1
        weakref.finalize(hold, self._let_go, address, size, self.order).atexit = False
        return hold

    def _let_go(self, address: int, size: int, order: races.Order) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self._held_by.pop(address).allocated -= -(-size // 512) * 512
            hazard = order.freed(address)
            # Memory of a finished capture is reused only in another graph, which runs after all of this one.
            self.hazards += filter(None, [hazard] if order in self.orders else [])
            self._forget(address)  # what a capture made may have been used outside

    def _forget(self, address: int) -> None:
        """Drop the accesses to an address that another allocation may reuse."""
        for order in self.orders:
            order.shadows.pop(address, None)

    def pin(self, storage: torch.UntypedStorage) -> None:
        """Pin ``storage`` in host memory."""
        self.pinned[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, self.unpin, storage.data_ptr())

    def unpin(self, address: int) -> bool:
        """Unpin the memory at ``address``; return False if it was not pinned."""
        self._aliases.pop(address, None)
        self._shifts.pop(address, None)
        self._forget(address)
        return self.pinned.pop(address, None) is not None

    def device_address(self, address: int) -> int | None:
        """``cuMemHostGetDevicePointer`` of the first byte of a registration."""
        if address not in self.pinned:
            return None
        self._registered += 1
        self._shifts[address] = self.elsewhere * self._registered * 2**44
        return address + self._shifts[address]

    def seen_at(self, tensor: torch.Tensor) -> int:
        """The device's address of a tensor's first element."""
        return tensor.data_ptr() + self._aliases.get(tensor.untyped_storage().data_ptr(), 0)

    def addresses(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, OnGpu) or any(
            start <= tensor.data_ptr() < start + size for start, size in self.pinned.items()
        )

    def alias(self, interface: dict, device: torch.device) -> OnGpu:
        """Return the device's view of pinned host memory.

        Raises:
            Refused: nothing is pinned at this address of the device.
        """
        (size,), (seen, _) = interface["shape"], interface["data"]
        found = [start for start, shift in self._shifts.items() if start + shift == seen]
        if not found:
            raise Refused(f"invalid argument: no memory of the device at {seen:#x}")
        (address,) = found
        self._aliases[address] = seen - address
        buffer = (ctypes.c_uint8 * size).from_address(address)
        return OnGpu(torch.frombuffer(buffer, dtype=torch.uint8), device)


def inner_of(leaf: Any) -> Any:
    if isinstance(leaf, OnGpu):
        return leaf.inner
    return CPU if isinstance(leaf, torch.device) else leaf


@functools.cache
def _is_composed(func) -> bool:
    """Whether an operation is composed of others, which are dispatched in its place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _returns(func, is_write: bool) -> bool:
    """Whether an operation returns a view of an operand, or one that it writes."""
    return any(each.alias_info is not None and each.alias_info.is_write == is_write for each in func._schema.returns)


@functools.cache
def _changed(func) -> set[int | str]:
    """Positions and names of the operands that an operation writes."""
    specs = enumerate(func._schema.arguments)
    written = [(i, spec.name) for i, spec in specs if spec.alias_info is not None and spec.alias_info.is_write]
    return {key for keys in written for key in keys}


def tensors_of(operands: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among operands, which may be lists of them."""
    found = []
    for each in operands:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += tensors_of(each)
    return found


def mapped(change: Callable[[Any], Any], operands: Any) -> Any:
    if isinstance(operands, list):
        return [mapped(change, each) for each in operands]
    if isinstance(operands, tuple):
        return tuple(mapped(change, each) for each in operands)
    if isinstance(operands, dict):
        return {name: mapped(change, each) for name, each in operands.items()}
    return change(operands)


gpu = Gpu()
