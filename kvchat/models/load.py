"""Load a model and its tokenizer: locate it, refuse or read it, then probe, test and fuse it.

kvchat refuses models that it cannot run correctly: before reading the weights if the configuration shows it, else after
the probe or the numerical self-test. A model that passed is not tested again on this machine until its weights, kvchat
or a library change. Only safetensors and GGUF are read, and a model's own code is never run. Digests of weights and
tokenizer identify the model that computed saved K/V. A checkpoint's revision would not do: it depends on the sizes and
ends of the files, and tuning a model in place may change neither.
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

from kvchat import files, libraries, paths
from kvchat.errors import KvchatError, ModelError, UsageError
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
from kvchat.protocol.messages import TEMPERATURE, Load, Sampling
from kvchat.units import size

UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
MOST_TESTED = 100  # models whose test results are saved
LIBRARIES = ("kvchat", "torch", "transformers", "numba", "triton")
NAMED_SHARE = 0.05
ONE_BY_ONE = (
    "Later turns are processed token by token: transformers' code for this model can prefill only from the start."
)
KEPT_DAMAGED = "Its weights were packed again: their cached copy was damaged."
DIGEST_BYTES = 16
SENTENCEPIECE = ("tokenizer.model", "spiece.model")  # names of its files


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on its device, its tokenizer and its observed properties.

    If the heads are split over several ``ranks``, ``model`` is this rank's part.

    Attributes:
        context: in tokens.
        layers: number of attending layers.
        weights: name of the quantization.
        fingerprint: digest of the weights.
        fused: kinds of fused modules.
        reads_chunks: as ``probe.reads_chunks``.
        advised: sampling to use if the user sets no temperature.
        gguf: GGUF file with the weights, if there is one.
        sums: adds up what the ranks computed.
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
        """The number of processes that run the model together."""
        return self.sums.rank.count if self.sums else 1

    @property
    def together(self) -> Callable[[int], contextlib.AbstractContextManager[Any]]:
        """``Sums.together`` if several ranks run the model, else a context that does nothing."""
        return self.sums.together if self.sums else contextlib.nullcontext

    @cached_property
    def elsewhere(self) -> dict[str, int]:
        """Bytes of weights on devices other than ``device``, by the device's name."""
        held = Counter[str]()
        for _, tensor in weights(self.model) if len(self.devices) > 1 else ():
            held[str(tensor.device)] += tensor.nbytes
        return {name: held[name] for name in map(str, self.devices[1:])}

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that hold weights, starting with ``device``, which holds the embeddings."""
        return tuple(dict.fromkeys(weight.device for weight in self.model.parameters()))


def load_model(load: Load, progress: Progress, meet: Callable[[ModelDescription], Rank] | None = None) -> LoadedModel:
    """Load the model that ``load`` names; ``progress`` is called with each stage.

    - ``model`` is "bundled", a folder, a GGUF file or a hub repository.
    - ``device`` "auto" is CUDA if available.
    - ``dtype`` "auto" is the checkpoint's on CUDA, and on a CPU the faster of that and float32.
    - ``quantize`` keeps the weights in 8 bits ("int8") or 4 ("int4", "nf4"). With "auto" and "none", a quantized
      checkpoint stays packed if it can be multiplied that way. Other formats, including GGUF, are unpacked; "auto"
      packs those of up to 8 bits again.
    - With several ``gpus``, the others hold decoder layers too. To split the heads instead, pass ``meet``, which
      returns once all ranks have started; each loads its part.
    - ``fast`` fuses modules that the fast path recognizes; ``force`` also loads weights that do not fit.

    Raises:
        ModelError: the model cannot be found, read or run correctly, or a package it needs is not installed.
        UsageError: no such device, dtype or quantization.
        DoesNotFitError: the weights do not fit the device's free memory.
    """
    kept.stop()
    cores = ThreadBudget(torch.device("cpu"), pause=math.inf)  # for a GPU too: the CPU reads and packs the weights
    cores.sample()
    template = _own_template(load.chat_template)
    with quiet():
        described = describe(load.model, load.device, load.dtype, progress, 1 if meet else load.gpus)
        chosen = repacking.choose(load.quantize, described)
        quantized = quantization.resolve(chosen.quantize, described.config, described.dtype, described.weakest)
        has_blocks = bool(quantized.method or described.location.gguf)  # weights to pack or unpack
        checkpoint = complete(described.location, progress)
        with _explained(described, chosen.quantize):
            if meet:
                heads.check(described, chosen.quantize, load.gpus, load.force)
            elif not load.force:
                reading.check(described, chosen.quantize)
            rank = meet(described) if meet else None
            if described.device.type == "cpu":  # after the check, because compiling takes memory that it counts as free
                compile_ahead.begin(described.dtype, OF_PACKED if has_blocks else ())
            progress("Loading the tokenizer")
            tokenizer, reading_notes = _tokenizer(described, checkpoint, template)
            if has_blocks:
                compile_ahead.wait(progress, [BLOCKS_OF_WEIGHTS])
            places = split.shares(described, chosen.quantize).places if described.others else ()
            progress(_loading_weights(chosen.quantize, described, checkpoint))
            file, packed, damaged = _cached_packed(described, checkpoint, quantized)
            reading_notes += damaged
            packing = mmap_large_allocations() if quantized.method else contextlib.nullcontext()
            sizes = _sizes(described, checkpoint)
            with reading.reported(sizes, progress, cores), packing, reading.current(described.device):
                model = reading.read(described, checkpoint, quantized, places, packed)
                with cores:
                    sums = heads.cut(model, rank, checkpoint.name, described.device) if rank else None
                    model = reading.finished(model, described, quantized, places, packed)
            if quantized.method:
                compile_ahead.wait(progress, [PRODUCTS])  # needed by the tests
            progress("Preparing the model")
            with cores:
                rows = model.get_input_embeddings().weight.shape[0]
                reading_notes = (*reading_notes, *tokenizers.check(tokenizer, rows, checkpoint.name))
                loaded = wrap(model, tokenizer, checkpoint.name, checkpoint.revision, load.fast, sums)
    malloc_trim()
    if file and not packed:
        kept.begin(loaded.model, file)
    on_gpus = heads.note(loaded.kv_heads, rank.count) if rank else split.note(described.device, places)
    notes = (*loaded.notes, *filter(None, [on_gpus]), *reading_notes, *_notes_on(described, load.dtype, chosen))
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

    A model that passed the tests before is not tested again. One rank's part of a model, which comes with ``sums``, is
    always tested, because all ranks have to take part.

    Raises:
        ModelError: kvchat cannot run it correctly.
    """
    pinned = pin_frequencies(model)
    seen = probe(model)
    digest = digest_of_weights(model)  # before weights are merged
    before = find_tested(key := tests_key(digest, model, fuse)) if sums is None else None
    if before:
        chunked, plain = before.chunked, None
    else:
        chunked, plain = _test(model, name)
    if model.device.type == "cpu":
        defragment(model)
    kernels = modules.kernels_for(model.device)
    fusion = modules.fuse(model, kernels, plain, before is not None) if fuse else modules.FusionReport()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # each merge frees blocks that are too small for the next one
    ahead: Collection[int] = ()
    if not RecurrentState(model.config).exists:  # running a layer early would change its state
        ahead = attention_hook.install(model, before.ahead if before else None)
    if not (before or fusion.note or sums):
        keep_tested(key, Tested(chunked, sorted(ahead)))
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
        notes=(*_notes(model, tokenizer, seen, pinned), *filter(None, [fusion.note, "" if chunked else ONE_BY_ONE])),
        weight_bytes=quantization.weight_bytes(model),
        weights=quantization.describe(model),
        fingerprint=digest,
        fused=fusion.fused,
        reads_chunks=chunked,
        advised=checkpoints.sampling(model.generation_config),
        sums=sums,
    )


def _test(model: Any, name: str) -> tuple[bool, Tensor]:
    """Compare the model with transformers' own forward; return its ``reads_chunks`` and ``sample_logits``."""
    chunked = reads_chunks(model)
    try:
        selftest(model, chunked=chunked)
    except ModelError:
        if model.dtype != torch.float16 and not modules.sample_logits(model).isfinite().all():
            raise support.damaged(name) from None
        raise
    plain = modules.sample_logits(model)
    if model.dtype == torch.float16 and not plain.isfinite().all():
        raise overflows(name)
    return chunked, plain


# ---- test results
@dataclass(frozen=True)
class Tested:
    """Results of a model's tests: ``LoadedModel.reads_chunks``, and the layers whose query is estimated ``ahead``."""

    chunked: bool
    ahead: list[int]


def tests_key(digest: str, model: Any, fuse: bool) -> str:
    """Return a digest of everything the tests of ``model`` depend on: weights, config, device, code and libraries."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else torch.get_num_threads()
    devices = sorted({str(weight.device) for weight in model.parameters()})
    processor = torch.backends.cpu.get_cpu_capability()
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    parts = digest, config, str(model.dtype), device, devices, processor, fuse, *_code()
    return digest_of_text(repr(parts)).hex()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def find_tested(key: str) -> Tested | None:
    """Return the results of a model that passed its tests; None if it was not tested with this ``key``."""
    with contextlib.suppress(*UNREADABLE):
        found = _all_tested()[key]
        return Tested(bool(found["chunked"]), [int(layer) for layer in found["ahead"]])
    return None


def keep_tested(key: str, tested: Tested) -> None:
    """Save the results of a model that passed its tests; if saving fails, the model is tested again next time."""
    with contextlib.suppress(*UNREADABLE):
        latest = dict([*_all_tested().items(), (key, asdict(tested))][-MOST_TESTED:])
        files.write(paths.tested_file(), json.dumps(latest, indent=1).encode())


def _all_tested() -> dict[str, dict[str, Any]]:
    with contextlib.suppress(*UNREADABLE):  # the next save replaces a damaged file
        return dict(json.loads(files.read(paths.tested_file())))
    return {}


def _code() -> tuple[list[tuple[str, int]], list[str]]:
    """Return what weights and their products depend on: kvchat's files with their times, and library versions."""
    files_of = (paths.PACKAGE / part for part in ("kv", "models"))
    ours = sorted((str(file), file.stat().st_mtime_ns) for folder in files_of for file in folder.rglob("*.py"))
    return ours, [_version(name) for name in LIBRARIES]


# ---- stages
def _sizes(described: ModelDescription, checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of the weights in the files, by transformers' names."""
    if checkpoint.gguf:
        return {name: weight.nbytes for name, weight in described.gguf_weights.items()}
    return {tensor.name: tensor.nbytes for tensor in described.stored}


def _cached_packed(
    described: ModelDescription, checkpoint: Checkpoint, quantized: Quantization
) -> tuple[Path | None, Kept, tuple[str, ...]]:
    """Return the file that caches a GGUF file's packed weights, its content, and a note if it was damaged; CPU only."""
    if not (checkpoint.gguf and quantized.options and described.device.type == "cpu"):
        return None, {}, ()
    how = described.dtype, checkpoint.revision, *_code()
    file = kept.place(checkpoint.weights, quantized.method, *how)
    was_there, packed = file.exists(), kept.read(file)
    return file, packed, (KEPT_DAMAGED,) if was_there and not packed else ()


def _loading_weights(quantize: str, described: ModelDescription, found: Checkpoint) -> str:
    """Name the stage, with the sizes in the files and once loaded if the weights are unpacked."""
    stage = "Loading the weights"
    if not repacking.is_unpacked(described):
        return stage
    files = f"{size(found.weight_bytes)} in the {'file' if len(found.weights) == 1 else 'files'}"
    unpacked = f"{size(described.loaded_bytes('none'))} unpacked"
    packed = "" if quantize == "none" else f", {size(described.loaded_bytes(quantize))} in {quantize}"
    return f"{stage}: {files}, {unpacked}{packed}"


def _notes_on(described: ModelDescription, dtype: str, chosen: repacking.Choice) -> list[str]:
    """Return notes for the user: the part of the model that runs, its quantization, and the dtype that "auto" chose."""
    packs, on_cpu = chosen.quantize != "none", described.device.type == "cpu"
    taken = description.note(dtype, described.dtype, described.config, packs) if on_cpu else ""
    plain = _stays_plain(described, chosen.quantize) if packs else ""
    loops = compile_ahead.NOTE if compile_ahead.is_running() else ""
    return [*filter(None, [support.note(described.config), chosen.note, plain, taken, loops])]


def _stays_plain(described: ModelDescription, quantize: str) -> str:
    """Describe the weights that cannot be packed, if there are many; else return ""."""
    share = described.weights.unpackable_share(quantize, described.place)
    if share < NAMED_SHARE:
        return ""
    return (
        f"{share:.0%} of its layers' weights stay in {described.dtype_name}: {quantize} packs no convolutions, no "
        f"matrices of odd sizes{'' if described.device.type == 'cpu' and quantize != 'nf4' else ' and no experts'}."
    )


@contextlib.contextmanager
def _explained(described: ModelDescription, quantize: str) -> Iterator[None]:
    """Turn whatever reading and testing the model raises into kvchat's own error."""
    with support.refuse_unreadable(described.location.name, "the model"):
        try:
            yield
        except Exception as error:
            if isinstance(error, KvchatError) or not is_out_of_memory(error):
                raise
            raise reading.does_not_fit(described, quantize) from error


def _tokenizer(described: ModelDescription, checkpoint: Checkpoint, template: str) -> tuple[Any, tuple[str, ...]]:
    """Load the tokenizer, with ``template`` in place of its own unless empty; also return notes for the user."""
    with support.refuse_unreadable(checkpoint.name, "its tokenizer"):
        if checkpoint.gguf:
            built = tokenizers.build(described.gguf, checkpoint.name, template)
            return built.tokenizer, built.notes
        _check_packages(checkpoint)
        tokenizer = _of_folder(checkpoint.folder)
    processors = checkpoint.folder / "chat_template.json"  # in older multimodal repositories
    if not tokenizer.chat_template and processors.is_file():
        tokenizer.chat_template = read_json(processors).get("chat_template")
    if (named := tokenizer.chat_template) and isinstance(named, dict):
        named.setdefault("default", next(iter(named.values())))  # as for a GGUF file
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer, ()


def _check_packages(checkpoint: Checkpoint) -> None:
    """Refuse a tokenizer of which there is only SentencePiece's file, if a package that reads it is missing.

    transformers would take the file for another library's, and name that.

    Raises:
        ModelError: with the command that installs the packages.
    """
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    only = any((checkpoint.folder / file).is_file() for file in SENTENCEPIECE)
    if not only or (checkpoint.folder / "tokenizer.json").is_file():
        return
    if not (is_sentencepiece_available() and is_protobuf_available()):
        raise ModelError(
            f"{checkpoint.name} needs packages that are not installed.",
            "Without a tokenizer.json, transformers reads its tokenizer with sentencepiece and protobuf.",
            f"Run: {libraries.command('sentencepiece', 'protobuf')}",
        )


def _of_folder(folder: Path) -> Any:
    """Load the tokenizer from a folder's ``tokenizer.json``, or else with the class that the folder names.

    A class may build its own steps instead of the file's: SmolLM2's is GPT2Tokenizer, which splits spaces before digits
    differently (transformers 5.24).
    """
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    options = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = kind.from_pretrained(folder, **options)
    if kind is AutoTokenizer or tokenizer.eos_token is not None:
        return tokenizer
    # Some, such as GPT-2's, leave the names of special tokens to the class.
    named = AutoTokenizer.from_pretrained(folder, **options).special_tokens_map
    vocabulary = tokenizer.get_vocab()
    known = {name: token for name, token in named.items() if token in vocabulary}
    return kind.from_pretrained(folder, **options, **known)


def _own_template(file: str) -> str:
    """Read the chat template in ``file``; return "" if no file is named."""
    source = read_text(Path(file).expanduser()) if file else ""
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError as error:
        detail = f"Line {error.lineno}: {error.message}."
        raise UsageError(f"{file} is not a chat template.", detail, "Use a Jinja template.") from None
    return source


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer; generation_config often has the end of turn, config the end of text."""
    ids: set[Any] = set()
    for holder in (model.generation_config, model.config, model.config.get_text_config(decoder=True), tokenizer):
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
    if advice := checkpoints.note(model.generation_config):
        notes.append(advice)
    if not tokenizer.chat_template:
        notes.append("The model has no chat template: turns are written as User: and Assistant:.")
    if seen.refusal:
        notes.append(f"Mode streaming is not available: {seen.refusal}.")
    return tuple(notes)


# ---- digests
def digest_of_weights(model: Any) -> str:
    """Return a digest of names, shapes and bit patterns of all weights, as fast as memory can be read.

    The bit patterns of a tensor are added up: changing a bit changes the sum, swapping two values does not.
    """
    found = blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in weights(model):
        found.update(f"{name} {tuple(tensor.shape)} {kept.sum_of_bits(tensor)}\n".encode())
    return found.hexdigest()


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Return a digest of everything that turns text into ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return digest_of_text(backend.to_str()).hex()
    vocabulary = sorted(getattr(tokenizer, "get_vocab", dict)().items())
    return digest_of_text(f"{type(tokenizer).__name__} {vocabulary}").hex()


def digest_of_text(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "replace"), digest_size=DIGEST_BYTES).digest()
