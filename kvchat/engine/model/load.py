"""A model and its tokenizer, ready to be driven: found, refused or loaded, probed and tested.

Nothing falls back in silence: what kvchat cannot run correctly is refused before the weights are read where the
configuration tells, by the probe or by the numerical self-test where it does not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from logging import CRITICAL, getLogger
from typing import Any

import torch

from kvchat.engine.model import attention_hook, checkpoint, quantization
from kvchat.engine.model.fusion import swap
from kvchat.engine.model.probe import Probe, pin_frequencies, probe
from kvchat.engine.model.quantization import Quantization
from kvchat.engine.model.self_test import selftest
from kvchat.errors import DoesNotFitError, ModelError, UsageError, did_you_mean
from kvchat.units import size

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INSTALL_GGUF = "pip install 'kvchat[gguf]'"
ATTENDED_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on its device with all that is known about it.

    ``context`` is in tokens; ``weights`` names how they are quantized, ``fast`` what the fast path swapped.
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
    fast: str = ""


def load_model(
    name: str,
    device: str,
    dtype: str,
    progress: checkpoint.Progress,
    *,
    quantize: str = "none",
    accelerate: bool = True,
) -> LoadedModel:
    """Load the model ``name`` ("bundled", a folder or a hub repository); ``progress`` is told each stage.

    ``device`` "auto" is CUDA where there is one; ``dtype`` "auto" is the checkpoint's on CUDA and float32 on a CPU.
    ``name`` may be a GGUF file, too, whose weights are unpacked to the dtype.
    ``quantize`` "4bit" keeps the weights in 4 bits (nf4); a model that is quantized already stays as it is with "none".
    ``accelerate`` swaps in what the fast path knows.

    Raises:
        ModelError: the model cannot be found, read or run correctly, or a package it needs is not installed.
        UsageError: no such device, dtype or quantization.
        DoesNotFitError: the weights do not fit the device's free memory.
    """
    on = resolve_device(device)
    place = checkpoint.locate(name, progress)
    with _quiet():
        config = _config(place)
        model_class = _model_class(config)
        precision = _resolve_dtype(dtype, config, on)
        quantized = quantization.resolve(quantize, config, precision)
        found = checkpoint.complete(place, progress)
        _check_fits(found, on, quantized.share)
        progress("Loading the tokenizer")
        tokenizer = _tokenizer(found)
        progress("Loading the weights")
        try:
            model = _model(model_class, found, precision, on, quantized)
            progress("Testing the model")
            return wrap(model, tokenizer, found.name, found.revision, accelerate)
        except torch.OutOfMemoryError as error:
            raise _does_not_fit(found, on) from error


def wrap(model: Any, tokenizer: Any, name: str, revision: str = "", accelerate: bool = True) -> LoadedModel:
    """A transformers ``model`` that is on its device, with the seam's attention: probed, tested and accelerated.

    Raises:
        ModelError: kvchat cannot run it correctly.
    """
    pinned = pin_frequencies(model)
    seen = probe(model)
    selftest(model)
    swapped = swap.accelerate(model, swap.kernels_for(model.device)) if accelerate else swap.FusionReport()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # merging left as much as was merged in pieces too small for the next
    loaded = _loaded(name, revision, model, tokenizer, seen, pinned)
    return replace(loaded, notes=(*loaded.notes, *filter(None, [swapped.note])), fast=swapped.swapped)


def resolve_device(device: str) -> torch.device:
    """The device a person named.

    Raises:
        UsageError: there is no such device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        resolved = torch.device(name)
    except RuntimeError:
        raise UsageError(f'There is no device "{device}".', "", "Give auto, cpu, cuda or cuda:0.") from None
    if resolved.type not in ("cpu", "cuda"):
        raise UsageError(f'kvchat does not run on "{device}".', "", "Give auto, cpu, cuda or cuda:0.")
    if resolved.type == "cpu":
        return torch.device("cpu")
    return _cuda_device(device, resolved.index or 0)


def refusal(config: Any, model_class: Any) -> str | None:
    """Why kvchat cannot run such a model, as far as its configuration and class tell; None if nothing speaks against.

    ``config`` and ``model_class`` are transformers'.
    """
    text = config.get_text_config(decoder=True)
    others = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENDED_LAYERS)
    if config.is_encoder_decoder:
        return "It is an encoder-decoder; kvchat drives decoders only"
    if not model_class._can_set_attn_implementation():
        return "transformers does not let its attention be replaced"
    if model_class._is_stateful:
        return "It keeps a recurrent state, which cannot be rolled back to an earlier token"
    if not getattr(text, "max_position_embeddings", None):
        return "Its configuration does not tell how many tokens it can read"
    if others:
        return f"It has layers of the kind {', '.join(others)}; kvchat knows full and sliding attention"
    return None


# ---- stages ----------------------------------------------------------------------------------------


def _config(place: checkpoint.ModelLocation) -> Any:
    from transformers import AutoConfig

    if place.gguf:
        return _gguf_config(place)
    checkpoint.read_json(place.folder / "config.json")  # with a better message than transformers' for a damaged file
    try:
        return AutoConfig.from_pretrained(place.folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise _unreadable(place.name, "its config.json", error) from error


def _gguf_config(place: checkpoint.ModelLocation) -> Any:
    from transformers import AutoConfig

    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise ModelError(
            f"{place.name} is a GGUF file.", f"What reads it is not installed: {', '.join(absent)}.", INSTALL_GGUF
        )
    try:
        config = AutoConfig.from_pretrained(place.folder, gguf_file=place.gguf, local_files_only=True)
    except Exception as error:  # the gguf package raises whatever a damaged file leads it to
        raise _unreadable(place.name, "the GGUF file", error) from error
    config.dtype = config.dtype or torch.bfloat16  # the file's blocks have no such type; they are unpacked to it
    return config


def _gguf(found: checkpoint.Checkpoint) -> dict[str, str]:
    return {"gguf_file": found.gguf} if found.gguf else {}


def _model_class(config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(f'"{config.model_type}" is no model for chatting.', "It is not a causal language model.")
    reason = refusal(config, model_class)
    if reason:
        raise ModelError(f"kvchat cannot run {model_class.__name__}.", f"{reason}.", "Choose another model.")
    return model_class


def _resolve_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise UsageError(f'There is no dtype "{dtype}".', did_you_mean(dtype, ["auto", *DTYPES]))
    own = config.get_text_config(decoder=True).dtype or config.dtype
    return own if device.type == "cuda" and own in DTYPES.values() else torch.float32


def _tokenizer(found: checkpoint.Checkpoint) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(found.folder, local_files_only=True, **_gguf(found))
    except Exception as error:  # tokenizers raises a bare Exception for a damaged file
        raise _unreadable(found.name, "its tokenizer", error) from error


def _model(
    model_class: Any, found: checkpoint.Checkpoint, dtype: torch.dtype, device: torch.device, quantized: Quantization
) -> Any:
    """Read to the CPU and then moved: transformers reads to a GPU only with accelerate, which kvchat needs for nothing
    else. Quantized weights are read to their device: most cannot be moved, and what cannot be needs accelerate anyway.
    """
    attention_hook.register()
    in_place = bool(quantized.method) and importlib.util.find_spec("accelerate") is not None
    place = {"device_map": {"": device}} if in_place else {}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a bar over a GGUF file's tensors that knows no switch
            model, info = model_class.from_pretrained(
                found.folder,
                dtype=dtype,
                attn_implementation=attention_hook.NAME,
                local_files_only=True,
                output_loading_info=True,
                **place,
                **quantized.options,
                **_gguf(found),
            )
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise quantization.missing(found.name, quantized, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
        raise _unreadable(found.name, "its weights", error) from error
    _check_complete(found, info)
    return model.eval() if in_place else model.eval().to(device)


def _loaded(name: str, revision: str, model: Any, tokenizer: Any, seen: Probe, pinned: bool) -> LoadedModel:
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
    )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All of them end an answer: generation_config often knows the chat's end and config only the text's."""
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
    if shared:
        notes.append(f"{shared} layers share K/V with others; kvchat stores them for each layer.")
    if pinned:
        notes.append("The rotary frequencies are those for the whole context, for short texts too.")
    if not tokenizer.chat_template:
        notes.append("The model has no chat template: turns are written as User: and Assistant:.")
    if seen.refusal:
        notes.append(f"Mode streaming is not available: {seen.refusal}.")
    return tuple(notes)


# ---- refusals --------------------------------------------------------------------------------------


def _cuda_device(given: str, index: int) -> torch.device:
    if index < torch.cuda.device_count():
        return torch.device("cuda", index)
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA GPU"
        raise UsageError(f'There is no device "{given}".', f"{why}.", "Give auto or cpu.")
    raise UsageError(f'There is no device "{given}".', f"This machine has {torch.cuda.device_count()} GPU(s).")


def _check_fits(found: checkpoint.Checkpoint, device: torch.device, share: float) -> None:
    """By at least ``share`` of the files' size, before minutes of reading; the true size is only known afterwards."""
    if device.type == "cuda" and found.weight_bytes * share > torch.cuda.mem_get_info(device)[0]:
        raise _does_not_fit(found, device)


def _does_not_fit(found: checkpoint.Checkpoint, device: torch.device) -> DoesNotFitError:
    free, total = torch.cuda.mem_get_info(device)
    return DoesNotFitError(
        f"{found.name} does not fit {torch.cuda.get_device_name(device)}.",
        f"Its weights take {size(found.weight_bytes, 2)}, and {size(free, 2)} of {size(total, 2)} are free.",
        "Choose a smaller model, or free memory on the GPU.",
    )


def _check_complete(found: checkpoint.Checkpoint, info: dict[str, Any]) -> None:
    """transformers fills in random numbers for weights that are not in the files."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights in {found.folder} are incomplete.",
            f"{len(missing)} tensors are missing, the first is {missing[0]}.",
            "Download the model again.",
        )


def _unreadable(name: str, what: str, error: Exception) -> ModelError:
    first = str(error).strip().split("\n", 1)[0][:300]
    return ModelError(f"{name} cannot be loaded.", f"transformers refuses {what}: {first}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers neither logs nor draws bars inside this block: the screen belongs to the application."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    quantizer = getLogger("bitsandbytes")  # says on a CPU which kernels it could load from the hub
    quantizer_level = quantizer.level
    quantizer.setLevel(CRITICAL)
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        quantizer.setLevel(quantizer_level)
        if bars:
            logging.enable_progress_bar()
