"""Read a model's weights with transformers, pack them and arrange them in memory.

On a CPU the weights are moved next to each other, into huge pages, because every token reads all of them. transformers
leaves small ones scattered over small pages, which are read more slowly (``kv.memory.pinned``). Matrices that are
merged later (``fuse``) are then already adjacent. Weights that do not fit are refused before minutes of reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from kvchat.errors import DoesNotFitError
from kvchat.kv.manager import is_out_of_memory
from kvchat.kv.memory import available
from kvchat.kv.memory.available import free_bytes
from kvchat.kv.memory.pinned import aligned, use_huge_pages
from kvchat.models import attention_hook, gguf_file, repacking, split, support
from kvchat.models import checkpoint as checkpoints
from kvchat.models import gguf as ggufs
from kvchat.models.checkpoint import Checkpoint
from kvchat.models.description import ModelDescription
from kvchat.models.gguf import Unpacked
from kvchat.models.hub import ByteProgress
from kvchat.models.quantize import int8_rows, kept, quantization
from kvchat.models.quantize.int8_rows import ALIGNED, UNPACKED
from kvchat.models.quantize.kept import Kept
from kvchat.models.quantize.quantization import Quantization
from kvchat.models.quantize.rows import PIECE, all_rows, is_tied, packs_head
from kvchat.units import size

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's numbers for these settings
LARGE = 5 * 2**18  # while weights are packed, tensors from this size on are mapped separately: larger than a chunk
LARGEST_THRESHOLD = 2**25  # glibc's own limit


def read(
    described: ModelDescription,
    checkpoint: Checkpoint,
    quantized: Quantization,
    places: Sequence[torch.device] = (),
    packed: Kept | None = None,
) -> Any:
    """Read a model to the CPU: transformers reads to a GPU only with accelerate, which kvchat needs for nothing else.

    Quantized weights are read to their device: most cannot be moved, and formats that cannot need accelerate anyway.
    ``places`` are the layers' devices of a model over several GPUs. Weights in the cache ``packed`` are not read.

    Raises:
        ModelError: transformers refuses them, or a package is missing.
    """
    attention_hook.register()
    quantization.import_package(quantized)
    quantization.unpack_while_reading(described.text_config, described.device)
    in_place = _is_in_place(described, quantized)
    by_name = split.device_map(described, places) if places else {"": described.device}
    placement = {"device_map": by_name} if in_place else {}
    packing = quantized.options.get("quantization_config")
    unpacked = repacking.is_unpacked(described)
    meanwhile = repacking.read_unpacked(described, packing) if unpacked else contextlib.nullcontext()
    if packing is not None and hasattr(packing, "of_4_bits"):
        packing.of_4_bits = repacking.in_equal_steps(described)
    chosen = {} if packed or _is_packed_later(described, quantized) else quantized.options
    source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.folder}
    head, place = None, checkpoint.folder / checkpoint.gguf
    described.check_tensors()
    if checkpoint.gguf:
        head = None if packed else _tied_head(described, quantized)
        source = {"pretrained_model_name_or_path": None, "state_dict": _stored(described, packed or {}, head)}
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),  # packages for quantized weights print, without a switch
            contextlib.redirect_stderr(io.StringIO()),
            meanwhile,
            ggufs.under_their_names() if checkpoint.gguf else contextlib.nullcontext(),
            support.WithoutMemory(),
        ):
            model, info = described.model_class.from_pretrained(
                **source,
                config=described.text_config,
                dtype=described.dtype,
                attn_implementation=attention_hook.NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_tensors reports them
                **placement,
                **chosen,
            )
    except ImportError as error:
        raise quantization.missing(checkpoint.name, quantized, error) from error
    except Exception as error:  # an unknown config may raise anything
        if is_out_of_memory(error):
            raise
        raise support.unreadable(checkpoint.name, "its weights", error) from error
    if in_place and places:
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(model, recurse=True)  # accelerate's hook moves layers' inputs; split has its own
    support.check_tensors(model, place, info)
    if checkpoint.gguf:
        checkpoints.take_from_gguf(described.gguf.values, model.generation_config)
    if checkpoint.gguf and not chosen:
        model.config.quantization_config = {"quant_method": "gguf"}  # marks unpacked weights, as in other checkpoints
    if head:
        int8_rows.install(model.get_output_embeddings(), *head.packed)
        int8_rows.look_up(model.get_input_embeddings(), model.get_output_embeddings())
    return model


def finished(
    model: Any,
    described: ModelDescription,
    quantized: Quantization,
    places: Sequence[torch.device] = (),
    packed: Kept | None = None,
) -> Any:
    """Prepare a model that was read: pack its weights or install those ``packed``, and move it to its devices."""
    device, was_tied = described.device, is_tied(model)
    if not described.location.gguf and quantization.own_method(described.config):
        quantization.finish_loading(model, described.config, described.dtype)
    if packed:
        repacking.mark(model, quantized.options["quantization_config"])
        kept.install(model, packed)
    elif _is_packed_later(described, quantized):
        repacking.pack(model, quantized.options["quantization_config"], described, split.devices_of(model, places))
    if device.type == "cpu":
        quantization.multiply_on_cpu(model)
        if was_tied and not is_tied(model):
            int8_rows.look_up(model.get_input_embeddings(), model.get_output_embeddings())
    model.eval()
    if not _is_in_place(described, quantized):
        split.move(model, device, places)
    if device.type == "cuda":
        quantization.multiply_on_gpu(model)
    split.connect(model, device, places)
    return model


class TiedHead:
    """The head of a GGUF file that shares its weights with the embeddings.

    It is packed in parts while it is read, because the whole would first take four bytes per weight.
    """

    def __init__(self, table: gguf_file.Tensor, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype
        self.packed: tuple[Tensor, ...] = ()

    def make(self) -> Tensor:
        """Pack the head; return a placeholder without memory."""
        self.packed = int8_rows.packed(ggufs.parts(self._table, UNPACKED), self._table.shape)
        return _placeholder(self._table.shape, self._dtype)


def _placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)


def _tied_head(described: ModelDescription, quantized: Quantization) -> TiedHead | None:
    shapes = described.shapes
    head = shapes.get_output_embeddings()
    if described.device.type != "cpu" or not packs_head(quantized.method) or not is_tied(shapes):
        return None
    named = (tensor for tensor in described.gguf.tensors if tensor.name == gguf_file.EMBEDDINGS)
    table = next((tensor for tensor in named if tensor.shape == head.weight.shape), None)
    return TiedHead(table, described.dtype) if table and type(head) is nn.Linear else None


def _stored(described: ModelDescription, packed: Kept, head: TiedHead | None) -> dict[str, Unpacked]:
    """Return the weights of a GGUF file, with placeholders for those in ``packed`` and those that ``head`` packs."""
    parameters = dict(described.shapes.named_parameters(remove_duplicate=False))
    makers: dict[Tensor | None, Callable[[], Tensor]] = {
        parameters[name]: partial(_placeholder, parameters[name].shape, described.dtype) for name in packed
    }
    if head:
        makers[described.shapes.get_output_embeddings().weight] = head.make
    return {
        name: Unpacked(weight.nbytes, makers[parameter]) if (parameter := parameters.get(name)) in makers else weight
        for name, weight in described.gguf_weights.items()
    }


def _is_in_place(described: ModelDescription, quantized: Quantization) -> bool:
    """Return True if transformers reads weights directly to their device."""
    return bool(quantized.method) and not _is_packed_later(described, quantized) and find_spec("accelerate") is not None


def _is_packed_later(described: ModelDescription, quantized: Quantization) -> bool:
    """Return True if packing waits until all weights are unpacked."""
    if described.location.gguf and described.device.type == "cpu":
        return False  # each is packed as soon as it is unpacked
    return repacking.is_unpacked(described) and bool(quantized.options)


@contextmanager
def reported(
    sizes: Mapping[str, int], progress: Callable[[str], None], cores: AbstractContextManager[None]
) -> Iterator[None]:
    """Report to ``progress`` how much of the files is read while the block reads a model.

    ``sizes`` are bytes by tensor, as in the files. Each weight is converted on the ``cores`` that are free.
    """
    shown = ByteProgress(_unredirected(progress), "Loading the weights")
    with repacking.intercepted(lambda items: _counted(items, sizes, shown, cores)):
        yield


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current GPU, if it is one: torchao checks whether the current GPU can multiply 4 bits."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _unredirected(progress: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``progress``, which may print, bound to the current stdout and stderr, because ``read`` redirects both."""
    out, err = sys.stdout, sys.stderr

    def report(stage: str) -> None:
        with redirect_stdout(out), redirect_stderr(err):
            progress(stage)

    return report


def _counted(
    items: list[Any], sizes: Mapping[str, int], shown: ByteProgress, cores: AbstractContextManager[None]
) -> Iterator[Any]:
    nbytes = [sum(sizes.get(name, 0) for names in read.layer_targets.values() for name in names) for _, read in items]
    done, total = 0, sum(nbytes)
    for item, item_bytes in zip(items, nbytes, strict=True):
        with cores:
            yield item
        done += item_bytes
        shown.report(done, total)


def defragment(model: Any) -> None:
    """Move the small weights of a ``model`` on a CPU together, in the order of its modules, aligned as torch does.

    Tensors of a quantizer's own class stay in place.
    """
    for weights in _pieces(model):
        memory, at = aligned(sum(map(_stride, weights))), 0
        use_huge_pages(memory)
        for weight in weights:
            moved = memory[at : at + weight.nbytes].view(weight.dtype).view(weight.shape)
            weight.data = moved.copy_(weight.data)
            at += _stride(weight)
    for _, rows in all_rows(model):
        rows.forget_arrays()


@contextlib.contextmanager
def mmap_large_allocations() -> Iterator[None]:
    """Map each large tensor separately in this block, so that freeing it returns its memory to the system.

    Otherwise packing 573 MiB of bfloat16 as int8 took up to 1.1 GiB, little of it in use: the results fragmented the
    memory that the sources left. Afterwards glibc has the thresholds that it would have chosen for such tensors.
    """
    _glibc("mallopt", M_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        _glibc("mallopt", M_MMAP_THRESHOLD, LARGEST_THRESHOLD)
        _glibc("mallopt", M_TRIM_THRESHOLD, 2 * LARGEST_THRESHOLD)


def malloc_trim() -> None:
    """Return memory that loading freed to the system: glibc kept 190 MiB for a model with 69 MiB of int8 weights."""
    _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # other C libraries lack these functions
        getattr(ctypes.CDLL(None), function)(*arguments)


def _stride(weight: Tensor) -> int:
    """Return the bytes from the start of ``weight`` to the start of the next one."""
    return -(-weight.nbytes // ALIGNED) * ALIGNED


def _pieces(model: Any) -> Iterator[list[nn.Parameter]]:
    """Yield the small weights in runs of at most ``PIECE`` bytes.

    The weights of one module's children are adjacent, matrices first, in the order of merging. Otherwise merging would
    copy them, and the originals would stay in memory with the rest of their run.
    """
    piece: list[nn.Parameter] = []
    for weights in _families(model):
        if piece and sum(map(_stride, [*piece, *weights])) > PIECE:
            yield piece
            piece = []
        if sum(map(_stride, weights)) <= PIECE:
            piece += weights
        else:
            yield from ([weight] for weight in weights)
    if piece:
        yield piece


def _families(model: Any) -> Iterator[list[nn.Parameter]]:
    """Yield the small weights of each module's children; large ones get huge pages and are not moved.

    Embeddings without a head that multiplies by them get none: a token reads one row of them, and huge pages for
    Gemma's 640 MiB cost 1.5 s of processor time.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings -= {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    named = ((name.split("."), weight) for name, weight in model.named_parameters())
    for _, family in itertools.groupby(named, key=lambda each: each[0][:-2]):
        small = []
        for _, weight in family:
            if type(weight) is not nn.Parameter or not weight.is_contiguous():
                continue
            if weight.nbytes <= PIECE:
                small.append(weight)
            elif weight not in embeddings:
                use_huge_pages(weight.data)
        yield sorted(small, key=Tensor.dim, reverse=True)


def check(described: ModelDescription, quantize: str) -> None:
    """Refuse weights that do not fit the device once loaded, or do not fit RAM while they are unpacked.

    Raises:
        DoesNotFitError: with the sizes.
        ModelError: a file is missing or damaged.
    """
    if described.others:
        _check_shares(described, quantize)
    elif described.loaded_bytes(quantize) > free_bytes(described.device):
        raise does_not_fit(described, quantize)
    unpacked, free = described.loaded_bytes("none"), available.host_free()
    if repacking.needs_full_dequantization(described, quantize) and unpacked > free:
        raise DoesNotFitError(
            f"{described.location.name} does not fit in this machine's memory while it is loaded.",
            f"Unpacked, its weights take {size(unpacked, 2)}, and {size(free, 2)} are free.",
            "Use the unquantized safetensors with --quantize, or free memory. --force loads it anyway.",
        )


def does_not_fit(described: ModelDescription, quantize: str) -> DoesNotFitError:
    """Return the error for weights that do not fit their device, with a quantization that would."""
    device, free, needed = described.device, free_bytes(described.device), described.loaded_bytes(quantize)
    where, total = "this machine's memory", ""
    if device.type == "cuda":
        where, total = torch.cuda.get_device_name(device), f" of {size(torch.cuda.mem_get_info(device)[1], 2)}"
    return DoesNotFitError(
        f"{described.location.name} does not fit {where}.",
        f"Its weights take {size(needed, 2)}, and {size(free, 2)}{total} are free.",
        f"Choose a smaller model{_packed(described, min(free, needed - 1))}, or free memory there. "
        "--force loads it anyway.",
    )


def _check_shares(described: ModelDescription, quantize: str) -> None:
    """Refuse weights if the first GPU cannot hold what does not fit the others."""
    shares, free = split.shares(described, quantize), free_bytes(described.device)
    if shares.first <= free:
        return
    taken = zip(described.others, shares.others, strict=True)
    parts = ", ".join(f"{size(nbytes, 2)} of it fit {device}" for device, nbytes in taken)
    room = free + sum(shares.others)
    raise DoesNotFitError(
        f"{described.location.name} does not fit {1 + len(described.others)} GPUs.",
        f"Its weights take {size(described.loaded_bytes(quantize), 2)}: {parts}, {size(shares.first, 2)} are left for "
        f"{described.device}, where {size(free, 2)} are free.",
        f"Choose a smaller model{_packed(described, room)}, more GPUs, or free memory there. --force loads it anyway.",
    )


def _packed(described: ModelDescription, room: int) -> str:
    """Return `` or --quantize int8 (5.1 GiB)`` for the first quantization that fits into ``room`` bytes; else ""."""
    fitting = ((name, nbytes) for name, nbytes in described.by_quantization().items() if nbytes <= room)
    return next((f" or --quantize {name} ({size(nbytes)})" for name, nbytes in fitting), "")
