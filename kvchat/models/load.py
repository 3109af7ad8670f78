"""Loads a model and its tokenizer: locates, refuses or reads it, then probes, tests and fuses it.

A model that kvchat cannot run correctly is refused: before the weights are read if the configuration tells, else by the
probe or the numerical self-test. What passed is noted, and not tested again on this machine as long as weights, kvchat
and the libraries are the same. Only safetensors and GGUF are read, and no code of a model is run. Digests of weights
and tokenizer are kept, so that what was computed by others is not taken for theirs: a checkpoint's revision tells
trainings apart by the sizes and ends of their files, and a model that was tuned in place may have both alike.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, TemplateSyntaxError
from torch import Tensor

from kvchat import files, paths
from kvchat.errors import KvchatError, UsageError
from kvchat.files import read_text
from kvchat.kv.manager import is_out_of_memory
from kvchat.models import attention_hook, compile_ahead, description, reading, repacking, split, support
from kvchat.models import checkpoint as checkpoints
from kvchat.models import tokenizer as tokenizers
from kvchat.models.checkpoint import Checkpoint, complete
from kvchat.models.compile_ahead import OF_PACKED
from kvchat.models.description import ModelDescription, describe, overflows, quiet
from kvchat.models.fuse import modules
from kvchat.models.hub import Progress
from kvchat.models.probe import Probe, pin_frequencies, probe, reads_chunks, selftest
from kvchat.models.quantize import kept, quantization
from kvchat.models.quantize.kept import Kept
from kvchat.models.quantize.quantization import Quantization, weights
from kvchat.models.quantize.rows import BLOCKS_OF_WEIGHTS, PRODUCTS, ThreadBudget
from kvchat.models.ranks import heads
from kvchat.models.ranks.group import Rank, Sums
from kvchat.models.reading import defragment, malloc_trim, mmap_large_allocations
from kvchat.models.recurrent import RecurrentState
from kvchat.models.stored_tensors import read_json
from kvchat.models.tokenizer import explained_panics, guarded
from kvchat.protocol.messages import TEMPERATURE, Load, Sampling
from kvchat.units import size

UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
MOST_TESTED = 100  # models that are noted to have passed their tests
LIBRARIES = ("kvchat", "torch", "transformers", "numba", "triton")
NAMED_SHARE = 0.05
ONE_BY_ONE = (
    "Later turns are processed token by token: transformers' code for this model can prefill only from the start."
)
KEPT_DAMAGED = "Its weights were packed again: their cached copy was damaged."
DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on its device, its tokenizer and its observed properties.

    ``context`` is in tokens; ``layers`` are those that attend; ``weights`` names their quantization,
    ``fingerprint`` is a digest of them, ``fused`` the kinds of modules that are fused. ``reads_chunks`` is that of
    ``RecurrentState``. Answers are drawn as ``advised`` where no temperature is given. ``gguf`` is the file with the
    weights, where they are in one. Of a model whose heads are split over several ``ranks`` it is this one's part, and
    they make its ``sums``.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str
    device: torch.device
    dtype: torch.dtype
    context: int
    vocab: int
    eos_ids: frozenset[int]
    layers: int
    q_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    probe: Probe
    notes: tuple[str, ...]
    weight_bytes: int
    weights: str = ""
    fingerprint: str = ""
    fused: str = ""
    reads_chunks: bool = True
    advised: Sampling = Sampling(temperature=TEMPERATURE)
    gguf: Path | None = None
    sums: Sums | None = None

    @property
    def ranks(self) -> int:
        """The number of processes that run it together."""
        return self.sums.rank.count if self.sums else 1

    @property
    def together(self) -> Callable[[int], contextlib.AbstractContextManager[Any]]:
        """``Sums.together``, where several ranks run the model."""
        return self.sums.together if self.sums else contextlib.nullcontext

    @cached_property
    def elsewhere(self) -> dict[str, int]:
        """Bytes of its weights on devices beside ``device``, by their names."""
        held = Counter[str]()
        for _, tensor in weights(self.model) if len(self.devices) > 1 else ():
            held[str(tensor.device)] += tensor.nbytes
        return {name: held[name] for name in map(str, self.devices[1:])}

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """All that its weights lie on, that of its embeddings, which is ``device``, first."""
        return tuple(dict.fromkeys(weight.device for weight in self.model.parameters()))


def load_model(asked: Load, progress: Progress, meet: Callable[[ModelDescription], Rank] | None = None) -> LoadedModel:
    """Load the model ``asked`` for ("bundled", a folder or a hub repository); ``progress`` is called with each stage.

    ``device`` "auto" is CUDA where there is one; ``dtype`` "auto" is the checkpoint's on CUDA, and on a CPU that or
    float32, the faster one.
    ``model`` may also be a GGUF file. Its weights, and those of a checkpoint that is quantized as nothing here
    multiplies, are unpacked to the dtype; with "auto" those of 8 bits or fewer are packed again.
    With several ``gpus`` decoder layers lie on those beside the device too. Where the heads are split instead ``meet``
    returns once all ranks are there, and each loads its part.
    ``quantize`` keeps the weights in 8 bits ("int8") or 4 ("int4", "nf4"); of a model that is quantized already what
    can be multiplied stays as it is with "auto" and "none".
    ``fast`` replaces the modules that the fast path recognizes; ``force`` tries also what does not fit.

    Raises:
        ModelError: the model cannot be found, read or run correctly, or a package it needs is not installed.
        UsageError: no such device, dtype or quantization.
        DoesNotFitError: the weights do not fit the device's free memory.
    """
    kept.stop()
    cores = ThreadBudget(torch.device("cpu"), pause=math.inf)  # for a GPU too weights are taken in here
    cores.sample()
    template = _own_template(asked.chat_template)
    with quiet():
        described = describe(asked.model, asked.device, asked.dtype, progress, 1 if meet else asked.gpus)
        chosen = repacking.choose(asked.quantize, described)
        quantized = quantization.resolve(chosen.quantize, described.config, described.dtype, described.weakest)
        has_blocks = bool(quantized.method or described.location.gguf)  # of weights, to be packed or unpacked
        checkpoint = complete(described.location, progress)
        with _explained(described, chosen.quantize):
            if meet:
                heads.check(described, chosen.quantize, asked.gpus, asked.force)
            elif not asked.force:
                reading.check(described, chosen.quantize)
            rank = meet(described) if meet else None
            if described.device.type == "cpu":  # after the check, which counts the memory that is free
                compile_ahead.begin(described.dtype, OF_PACKED if has_blocks else ())
            progress("Loading the tokenizer")
            tokenizer, reading_notes = _tokenizer(described, checkpoint)
            tokenizer.chat_template = template or tokenizer.chat_template
            if has_blocks:
                compile_ahead.wait(progress, [BLOCKS_OF_WEIGHTS])
            places = split.shares(described, chosen.quantize).places if described.others else ()
            progress(_loading_weights(chosen.quantize, described, checkpoint))
            file, packed, damaged = _kept(described, checkpoint, quantized)
            reading_notes += damaged
            packing = mmap_large_allocations() if quantized.method else contextlib.nullcontext()
            sizes = _sizes(described, checkpoint)
            with reading.reported(sizes, progress, cores), packing, reading.current(described.device):
                model = reading.read(described, checkpoint, quantized, places, packed)
                with cores:
                    sums = heads.cut(model, rank, checkpoint.name, described.device) if rank else None
                    model = reading.finished(model, described, quantized, places, packed)
            if quantized.method:
                compile_ahead.wait(progress, [PRODUCTS])  # with which the model is tested
            progress("Preparing the model")
            with cores:
                support.check_values(model, checkpoint.folder / checkpoint.gguf)
                rows = model.get_input_embeddings().weight.shape[0]
                reading_notes = (*reading_notes, *tokenizers.check(tokenizer, rows, checkpoint.name))
                loaded = wrap(model, tokenizer, checkpoint.name, checkpoint.revision, asked.fast, sums)
    malloc_trim()
    if file and not packed:
        kept.begin(loaded.model, file)
    on_gpus = heads.note(loaded.kv_heads, rank.count) if rank else split.note(described.device, places)
    notes = (*loaded.notes, *filter(None, [on_gpus]), *reading_notes, *_notes_on(described, asked.dtype, chosen))
    return replace(loaded, notes=notes, gguf=checkpoint.weights[0] if checkpoint.gguf else None)


def wrap(
    model: Any,
    tokenizer: Any,
    name: str,
    revision: str = "",
    fuse: bool = True,
    sums: Sums | None = None,
) -> LoadedModel:
    """Probe, test and fuse a transformers ``model`` that is on its device, with kvchat's attention.

    The tests are not done again of what passed before, but for a part of a model: all ranks have to run it together,
    and make its ``sums``.

    Raises:
        ModelError: kvchat cannot run it correctly.
    """
    pinned = pin_frequencies(model)
    seen = probe(model)
    digest = digest_of_weights(model)  # before any of them is merged
    before = find_tested(key := tested_by(digest, model, fuse)) if sums is None else None
    if before:
        chunked, plain = before.chunked, None
    else:
        chunked, plain = _test(model, name)
    if model.device.type == "cpu":
        defragment(model)
    kernels = modules.kernels_for(model.device)
    fusion = modules.fuse(model, kernels, plain, before is not None) if fuse else modules.FusionReport()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # merging frees as much as it merged, in blocks too small for the next
    ahead: Collection[int] = ()
    if not RecurrentState(model.config).exists:  # whose state a layer that is run early would change
        ahead = attention_hook.install(model, before.ahead if before else None)
    if not (before or fusion.note or sums):
        keep_tested(key, Tested(chunked, sorted(ahead)))
    loaded = _loaded(name, revision, model, tokenizer, seen, pinned, sums)
    notes = (*loaded.notes, *filter(None, [fusion.note, "" if chunked else ONE_BY_ONE]))
    return replace(loaded, notes=notes, fingerprint=digest, fused=fusion.fused, reads_chunks=chunked)


def _test(model: Any, name: str) -> tuple[bool, Tensor]:
    """Compare the model with transformers' own forward; whether it reads chunks, and its ``sample_logits``."""
    chunked = reads_chunks(model)
    selftest(model, chunked=chunked)
    plain = modules.sample_logits(model)
    if model.dtype == torch.float16 and not plain.isfinite().all():
        raise overflows(name)
    return chunked, plain


# ---- what passed its tests -------------------------------------------------------------------------
@dataclass(frozen=True)
class Tested:
    """What a model's tests found: ``LoadedModel.reads_chunks``, and the layers whose query is estimated ``ahead``."""

    chunked: bool
    ahead: list[int]


def tested_by(digest: str, model: Any, fuse: bool) -> str:
    """A digest of all that the tests of ``model`` depend on: weights, config, device, kvchat's code, libraries."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else torch.get_num_threads()
    devices = sorted({str(weight.device) for weight in model.parameters()})
    processor = torch.backends.cpu.get_cpu_capability()
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    told = digest, config, str(model.dtype), device, devices, processor, fuse, *_code()
    return digest_of_text(repr(told)).hex()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def find_tested(key: str) -> Tested | None:
    """What the tests of a model found that passed; None if it was not tested so."""
    with contextlib.suppress(*UNREADABLE):  # as if nothing was tested
        kept = _all_tested()[key]
        return Tested(bool(kept["chunked"]), [int(layer) for layer in kept["ahead"]])
    return None


def keep_tested(key: str, tested: Tested) -> None:
    """Keep that a model passed its tests; where it cannot be kept it is tested again."""
    with contextlib.suppress(*UNREADABLE):
        kept = dict([*_all_tested().items(), (key, asdict(tested))][-MOST_TESTED:])
        files.write(paths.tested_file(), json.dumps(kept, indent=1).encode())


def _all_tested() -> dict[str, dict[str, Any]]:
    with contextlib.suppress(*UNREADABLE):  # a damaged note is replaced by the next one
        return dict(json.loads(files.read(paths.tested_file())))
    return {}


def _code() -> tuple[list[tuple[str, int]], list[str]]:
    """What weights and their products depend on: kvchat's files with their last changes, versions of libraries."""
    files_of = (paths.PACKAGE / part for part in ("kv", "models"))
    ours = sorted((str(file), file.stat().st_mtime_ns) for folder in files_of for file in folder.rglob("*.py"))
    return ours, [_version(name) for name in LIBRARIES]


# ---- stages ----------------------------------------------------------------------------------------
def _sizes(described: ModelDescription, checkpoint: Checkpoint) -> dict[str, int]:
    """The bytes of the weights in the files, by the names that transformers reads them by."""
    if checkpoint.gguf:
        return {name: weight.nbytes for name, weight in described.gguf_weights.items()}
    return {tensor.name: tensor.nbytes for tensor in described.stored}


def _kept(
    described: ModelDescription, checkpoint: Checkpoint, quantized: Quantization
) -> tuple[Path | None, Kept, tuple[str, ...]]:
    """Of a GGUF file that is packed on a CPU: the file that keeps its packed weights, those, and a note where it was
    damaged."""
    if not (checkpoint.gguf and quantized.options and described.device.type == "cpu"):
        return None, {}, ()
    how = described.dtype, checkpoint.revision, *_code()
    file = kept.place(checkpoint.weights, quantized.method, *how)
    was_there, packed = file.exists(), kept.read(file)
    return file, packed, (KEPT_DAMAGED,) if was_there and not packed else ()


def _loading_weights(quantize: str, described: ModelDescription, found: Checkpoint) -> str:
    """The name of the stage; of what is unpacked with the sizes of its files and of its weights once loaded."""
    stage = "Loading the weights"
    if not repacking.is_unpacked(described):
        return stage
    files = f"{size(found.weight_bytes)} in the {'file' if len(found.weights) == 1 else 'files'}"
    unpacked = f"{size(described.loaded_bytes('none'))} unpacked"
    packed = "" if quantize == "none" else f", {size(described.loaded_bytes(quantize))} in {quantize}"
    return f"{stage}: {files}, {unpacked}{packed}"


def _notes_on(described: ModelDescription, dtype: str, chosen: repacking.Choice) -> list[str]:
    """Notes for people: the part of the model that is run, how it is quantized, and the dtype that "auto" took."""
    packs, on_cpu = chosen.quantize != "none", described.device.type == "cpu"
    taken = description.note(dtype, described.dtype, described.config, packs) if on_cpu else ""
    plain = _stays_plain(described, chosen.quantize) if packs else ""
    loops = compile_ahead.NOTE if compile_ahead.is_running() else ""
    return [*filter(None, [support.note(described.config), chosen.note, plain, taken, loops])]


def _stays_plain(described: ModelDescription, quantize: str) -> str:
    """A sentence about the weights that cannot be packed, where they are many."""
    share = described.weights.unpackable_share(quantize, described.place)
    if share < NAMED_SHARE:
        return ""
    return (
        f"{share:.0%} of its layers' weights stay in {described.dtype_name}: {quantize} packs no convolutions, no "
        f"matrices of odd sizes{'' if described.device.type == 'cpu' and quantize != 'nf4' else ' and no experts'}."
    )


@contextlib.contextmanager
def _explained(described: ModelDescription, quantize: str) -> Iterator[None]:
    """Whatever reading the weights and trying the model raises is raised as kvchat's own error."""
    try:
        yield
    except KvchatError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise reading.does_not_fit(described, quantize) from error
        raise support.unreadable(described.location.name, "the model", error) from error


def _tokenizer(described: ModelDescription, checkpoint: Checkpoint) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer, and notes for people."""
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        with explained_panics():
            if checkpoint.gguf:
                built = tokenizers.build(described.gguf, checkpoint.name)
                return guarded(built.tokenizer), built.notes
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except KvchatError:
        raise
    except Exception as error:  # tokenizers raises a bare Exception for a damaged file
        raise support.unreadable(checkpoint.name, "its tokenizer", error) from error
    processors = checkpoint.folder / "chat_template.json"  # where older multimodal repositories keep it
    if not tokenizer.chat_template and processors.is_file():
        tokenizer.chat_template = read_json(processors).get("chat_template")
    return guarded(tokenizer), ()


def _own_template(file: str) -> str:
    """The chat template in ``file``; "" where none is named."""
    source = read_text(Path(file).expanduser()) if file else ""
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError as error:
        detail = f"Line {error.lineno}: {error.message}."
        raise UsageError(f"{file} is not a chat template.", detail, "Use a Jinja template.") from None
    return source


def _loaded(
    name: str, revision: str, model: Any, tokenizer: Any, seen: Probe, pinned: bool, sums: Sums | None
) -> LoadedModel:
    text = model.config.get_text_config(decoder=True)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        revision=revision,
        device=model.device,
        dtype=model.dtype,
        context=text.max_position_embeddings,
        vocab=model.get_output_embeddings().weight.shape[0],
        eos_ids=_eos_ids(model, tokenizer),
        layers=len(seen.specs),
        q_heads=seen.q_heads,
        kv_heads=seen.kv_heads,
        d_k=seen.d_k,
        d_v=seen.d_v,
        probe=seen,
        notes=_notes(model, tokenizer, seen, pinned),
        weight_bytes=quantization.weight_bytes(model),
        weights=quantization.describe(model),
        advised=checkpoints.sampling(model.generation_config),
        sums=sums,
    )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: often generation_config has the chat's end and config only the text's."""
    named = [model.generation_config, model.config, model.config.get_text_config(decoder=True), tokenizer]
    ids: set[Any] = set()
    for holder in named:
        eos = getattr(holder, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(ids - {None})


def _notes(model: Any, tokenizer: Any, seen: Probe, pinned: bool) -> tuple[str, ...]:
    text = model.config.get_text_config(decoder=True)
    latent = getattr(text, "kv_lora_rank", None)
    shared = getattr(text, "num_kv_shared_layers", None)
    notes = quantization.notes(model)
    if latent:
        expanded = seen.kv_heads * (seen.d_k + seen.d_v) / (latent + text.qk_rope_head_dim)
        notes.append(f"K/V are stored expanded and take {expanded:.0f} times the memory of this model's latent form.")
    if seen.unlike:
        notes.append("Its layers have different heads: the K/V of every layer take as much memory as the largest.")
    if shared:
        notes.append(f"{shared} layers share K/V with others; kvchat stores them for each layer.")
    if pinned:
        notes.append("The rotary frequencies are those of the full context, even for short texts.")
    if told := checkpoints.note(model.generation_config):
        notes.append(told)
    if not tokenizer.chat_template:
        notes.append("The model has no chat template: turns are written as User: and Assistant:.")
    if seen.refusal:
        notes.append(f"Mode streaming is not available: {seen.refusal}.")
    return tuple(notes)


# ---- digests ---------------------------------------------------------------------------------------
def digest_of_weights(model: Any) -> str:
    """A digest of names, shapes and bit patterns of all weights, at the memory's speed.

    The patterns of one tensor are added up: a change of any bit changes the sum, an exchange of values does not.
    """
    found = blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in weights(model):
        found.update(f"{name} {tuple(tensor.shape)} {kept.sum_of_bits(tensor)}\n".encode())
    return found.hexdigest()


def digest_of_tokenizer(tokenizer: Any) -> str:
    """A digest of all that turns text into ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return digest_of_text(backend.to_str()).hex()
    vocabulary = sorted(getattr(tokenizer, "get_vocab", dict)().items())
    return digest_of_text(f"{type(tokenizer).__name__} {vocabulary}").hex()


def digest_of_text(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()
