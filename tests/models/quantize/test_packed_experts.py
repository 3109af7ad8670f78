"""8-bit and 4-bit experts: their outputs match transformers' own loop over the unpacked weights."""

import pytest
import torch
from support import tiny_models
from torch import Tensor, nn

from kvchat.models.probe import relative_error
from kvchat.models.quantize import int4_rows, int8_rows, packing
from kvchat.models.quantize.rows import STACKS, PackedRows, all_rows
from kvchat.models.reading import defragment

CPU = torch.device("cpu")
UNGATED = {"layers_block_type": ["moe", "attention"], "n_routed_experts": 4, "moe_intermediate_size": 32}
ARCHITECTURES = {  # gated; transposed with biases and a gate of its own; without a gate
    "mixtral": {},
    "gpt_oss": {},
    "nemotron_h": UNGATED | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}
CLOSE = {"int8": 0.01, "int4": 0.15}


def unpacked(rows: PackedRows) -> Tensor:
    """The unpacked matrices ``[E, N, K]`` of a packed stack, found by multiplying the identity."""
    columns = rows.data.shape[-1] * (2 if isinstance(rows, int4_rows.Int4Rows) else 1)
    return torch.stack([rows.matrix(expert).multiply(torch.eye(columns)).T for expert in range(len(rows.data))])


def packed(name: str, method: str) -> nn.Module:
    """A tiny model whose experts are packed."""
    model = tiny_models.fresh(name, **ARCHITECTURES[name])
    for _, stack in packing.chosen_stacks(model, method):
        packing.pack_stack(stack.module, stack.name, stack.weight.detach(), method)
    return model


@pytest.mark.parametrize("tokens", [1, 2, 70])
@pytest.mark.parametrize("method", CLOSE)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_expert_outputs_match_the_unpacked_weights(name, method, tokens):
    model, reference = packed(name, method), tiny_models.fresh(name, **ARCHITECTURES[name])
    reference.set_experts_implementation("eager")
    stacks = [stack for _, stack in packing.stacks(reference)]
    held = [rows for _, rows in all_rows(model)]
    for stack, rows in zip(stacks, held, strict=True):
        matrices = unpacked(rows).transpose(1, 2) if stack.module.is_transposed else unpacked(rows)
        assert relative_error(matrices, stack.weight.detach()) < CLOSE[method]
        setattr(stack.module, stack.name, nn.Parameter(matrices.contiguous()))
    generator = torch.Generator().manual_seed(tokens)
    experts, _, inputs = stacks[0].shape
    states, weights = torch.randn(tokens, inputs, generator=generator), torch.rand(tokens, 2, generator=generator)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    with torch.inference_mode():
        expected = stacks[0].module(states, chosen, weights)
        found = next(packing.stacks(model))[1].module(states, chosen, weights)
    assert relative_error(found, expected) < 0.02  # the kernels multiply in bfloat16


@pytest.mark.parametrize("method", CLOSE)
def test_defragmented_experts_are_not_kept_twice(method):
    model = packed("gpt_oss", method)
    module = next(packing.stacks(model))[1].module
    states, chosen, weights = torch.randn(3, 64), torch.tensor([[0, 1], [1, 3], [2, 0]]), torch.ones(3, 2)
    before = module(states, chosen, weights)
    defragment(model)
    assert torch.equal(module(states, chosen, weights), before)
    assert module.__dict__[STACKS]["down_proj"].matrix(1).data.data_ptr() == module.down_proj[1].data_ptr()


def test_experts_of_unsupported_sizes_stay_unpacked():
    assert not int4_rows.fits(24, 64)
    assert not int8_rows.fits_stack(1, 63)
    odd = tiny_models.fresh("mixtral", intermediate_size=40)  # no multiple of 16 outputs, nor of 32 inputs
    assert [name.rpartition(".")[2] for name, _ in packing.chosen_stacks(odd, "int4")] == ["gate_up_proj"] * 4
