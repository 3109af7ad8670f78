"""Cut a model's weights for one rank: some heads and some MLP units of every layer.

transformers' plan for tensor parallelism classifies a model's Linears. Of a ``colwise`` one, each rank computes some
outputs (queries, keys, values, gate and up). A ``rowwise`` one takes these as inputs and is summed over the ranks
(attention's output, down). So a layer has two sums. In between, each rank has its own heads, in the model's order, with
their own K/V, host pool, slots and index, so a mode that chooses for each KV head chooses the same as in one process.
Every rank has all norms, the embeddings and the head.

transformers itself would load such a model as DTensors, which kvchat's kernels and fusion do not support; these are
plain Linears with fewer rows or columns. Files are mapped, so that a rank holds only its part. The plan is verified by
comparing the first layer before and after the cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.errors import DoesNotFitError, ModelError
from kvchat.kv.memory.available import free_bytes
from kvchat.models import attention_hook
from kvchat.models.attention_hook import DenseManager
from kvchat.models.description import ModelDescription
from kvchat.models.probe import logits_tolerance, relative_error
from kvchat.models.ranks.group import PIECE, Rank, Sums
from kvchat.models.recurrent import RecurrentState
from kvchat.models.split import decoder_layers, layer_bytes
from kvchat.units import size as size_of

COLUMNS, ROWS = "colwise", "rowwise"
TOKENS = 5  # for the comparison


class SummedLinear(nn.Linear):
    """A Linear whose input columns are divided among the ranks; the result is the sum over all of them."""

    def __init__(self, whole: nn.Linear, sums: Sums) -> None:
        super().__init__(whole.in_features // sums.rank.count, whole.out_features, device="meta")
        self.weight = nn.Parameter(sums.rank.part(whole.weight, 1), requires_grad=False)
        self.bias = whole.bias
        self._sums = sums

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's ``x [..., K / ranks]``: ``[..., N]``, the same on all ranks."""
        summed = self._sums.add(F.linear(x, self.weight))
        return summed if self.bias is None else summed + self.bias


def check(described: ModelDescription, quantize: str, ranks: int, force: bool) -> None:
    """Refuse a model whose heads cannot be split over ``ranks``, or whose part does not fit, unless ``force`` is set.

    Raises:
        ModelError: it cannot be split. DoesNotFitError: its part does not fit.
    """
    name, text = described.location.name, described.shapes.config.get_text_config(decoder=True)
    if RecurrentState(text).exists:
        raise _refused(name, "Its recurrent layers keep one state for all heads", "--gpus 1")
    if described.location.gguf or quantize != "none" or getattr(described.config, "quantization_config", None):
        raise _refused(name, "Packed weights are not split by heads", "--split layers, or weights that are not packed")
    queries = text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or queries
    if heads % ranks or queries % ranks:
        counts = [str(count) for count in range(2, heads + 1) if heads % count == queries % count == 0]
        why = f"It has {heads} KV heads and {queries} query heads, which {ranks} GPUs cannot share equally"
        raise _refused(name, why, " or ".join([*(f"--gpus {count}" for count in counts[:3]), "--split layers"]))
    linears = list(_planned(described.shapes))
    if {style for _, _, style in linears} != {COLUMNS, ROWS}:
        raise _refused(name, "transformers has no plan for it that names columns and rows alone")
    for path, linear, style in linears:
        size = linear.out_features if style == COLUMNS else linear.in_features
        if size % ranks:
            raise _refused(name, f"{path} has {size:,} units, which {ranks} GPUs cannot share equally")
    layers, outside = layer_bytes(described, quantize)
    part, free = outside + sum(layers) // ranks, free_bytes(described.device)
    if part > free and not force:
        raise DoesNotFitError(
            f"{name} does not fit {ranks} GPUs.",
            f"A part of its weights takes {size_of(part, 2)}, and {size_of(free, 2)} are free on {described.device}.",
            "Choose a smaller model or more GPUs, or free memory there. --force loads it anyway.",
        )


def cut(model: Any, rank: Rank, name: str, device: torch.device) -> Sums:
    """Cut ``model``, which is on the CPU, down to this rank's part; return the sums of its forwards on ``device``.

    Raises:
        ModelError: the first layer's results changed.
    """
    before, planned = _first_layer(model), list(_planned(model))
    widths = [whole.out_features for _, whole, style in planned if style == ROWS]
    sums = Sums(rank, widths, torch.zeros(PIECE, dtype=model.dtype, device=device))
    for path, whole, style in planned:
        if style == ROWS:
            model.set_submodule(path, SummedLinear(whole, sums))
            continue
        whole.weight = nn.Parameter(rank.part(whole.weight, 0), requires_grad=False)
        whole.out_features //= rank.count
        if whole.bias is not None:
            whole.bias = nn.Parameter(rank.part(whole.bias, 0), requires_grad=False)
    error = relative_error(_first_layer(model), before)
    if not error <= logits_tolerance(model):
        raise _refused(name, f"After the cut by transformers' plan, its first layer differs by {error:.2g} (relative)")
    return sums


def elements(model: Any, ranks: int) -> int:
    """Return the number of weights of the whole model that ``model`` is a part of; of cut biases only this part."""
    own: int = sum(weight.numel() for weight in model.parameters())
    return own + (ranks - 1) * sum(linear.weight.numel() for _, linear, _ in _planned(model))


def note(kv_heads: int, ranks: int) -> str:
    """Return a sentence for the user about a model that was split."""
    return (
        f"Its heads are split over {ranks} processes, {kv_heads} KV heads in each; memory, K/V and coverage "
        "are shown for one of them. K/V are neither saved nor parked: another conversation is processed again."
    )


def _planned(model: Any) -> Iterator[tuple[str, nn.Linear, str]]:
    """Yield the modules in the decoder's layers that transformers' plan splits: path, module, style.

    The style is ``COLUMNS`` or ``ROWS`` for the Linears that ``cut`` can handle; others are listed too, for ``check``.
    """
    plan, (layers, _) = model.tp_plan or {}, decoder_layers(model)
    for path, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", path), "")
        if path.startswith(f"{layers}.") and style and "replicated" not in style:
            yield path, module, style if type(module) is nn.Linear else f"{style} of {type(module).__name__}"


def _first_layer(model: Any) -> Tensor:
    """Return the hidden states ``[TOKENS, hidden]`` after the first layer and the last norm, in float32."""
    name, layers = decoder_layers(model)
    owner, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    ids = torch.arange(TOKENS)[None]
    setattr(owner, attribute, layers[:1])
    try:
        with torch.inference_mode(), attention_hook.bound(DenseManager()):
            hidden: Tensor = model.base_model(ids, position_ids=ids, use_cache=False).last_hidden_state
    finally:
        setattr(owner, attribute, layers)
    return hidden[0].float()


def _refused(name: str, why: str, instead: str = "--split layers") -> ModelError:
    return ModelError(f"The heads of {name} cannot be split over several GPUs.", f"{why}.", f"Use {instead}.")
