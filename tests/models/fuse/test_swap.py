"""The fast path: which modules are fused, that they compute the same, and that they are restored if they do not."""

import os
from types import SimpleNamespace

import pytest
import torch
from support import tiny_models
from support.grids import sampled
from torch import nn

from kvchat.models import attention_hook
from kvchat.models.fuse import modules
from kvchat.models.fuse.modules import Norm, Operations, fuse, sample_logits
from kvchat.models.load import load_model, wrap
from kvchat.models.probe import probe, relative_error, selftest
from kvchat.models.quantize import rows
from kvchat.protocol.messages import Load

ALL = "norms, merged projections, rope, fused layers"
PARTS = "norms, merged projections, rope"
FUSED = {
    **dict.fromkeys(("llama", "llama-mha", "llama-head32", "llama-yarn", "qwen2", "qwen3", "mistral", "smollm3"), ALL),
    "qwen3_moe": PARTS,  # no gated MLP
    "olmo2": PARTS,  # norms after attention and MLP
    "granite": PARTS,  # a factor on each branch
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), ALL),  # GELU; norms of 1 + weight, in later ones before each sum too
    "ernie4_5": "norms, merged projections, fused layers",  # interleaved rotation
    "cohere": "merged projections",  # LayerNorm, interleaved rotation, one norm
    **dict.fromkeys(("granite_hybrid", "bamba"), PARTS),  # with gated norms of one group
    "nemotron_h": "norms, merged projections",  # no rotation
    "gpt2": "",
}


@pytest.fixture(autouse=True)
def no_row_blocks(monkeypatch):
    """Make the swapped modules independent of the processor's vendor."""
    monkeypatch.setattr(rows, "in_blocks", lambda: False)


class TorchKernels:
    """The kernels in plain torch, with a record of the calls."""

    def __init__(self):
        plain = Operations(None)
        self.called = set()

        def norm(weight, eps):
            return None if weight is None else Norm(weight, eps)

        def project(x, weight, bias, scale, eps, residual, scales, turns=None):
            self.called.add("project")
            product = plain.project(x, weight, bias, norm(scale, eps), residual)
            if turns is not None:
                turned, cos, sin = turns
                heads = product[..., :turned].view(1, -1, 1, cos.shape[-1])
                product[..., :turned] = self.rotate(heads, heads[:, :0], cos, sin)[0].view(1, 1, -1)
            return product

        def gated(x, weight, scale, eps, scales):
            self.called.add("gated")
            return plain.gated(x, weight, norm(scale, eps))

        def rotate(query, key, cos, sin, norms=()):
            self.called.add("rotate")
            return plain.rotate_together(torch.cat((query, key), 1), query.shape[1], cos, sin, norms)

        self.project, self.gated, self.rotate = project, gated, rotate


def forwards(model):
    """Modules that compute something other than their class."""
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def weight_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


# ---- fused models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fused"), FUSED.items())
def test_fused_models_compute_the_same(name, fused):
    model = tiny_models.fresh(name)
    plain = sample_logits(model)
    done = fuse(model, None)
    assert done.fused == fused
    assert relative_error(sample_logits(model), plain) < 1e-6
    assert selftest(model) < 2e-6
    assert bool(forwards(model)) == bool(fused)


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(["llama", "olmo2", "gpt_oss", "mixtral"], [torch.bfloat16, torch.float16]),
    ids=str,
)
def test_half_precision_fuses_the_same_modules(name, dtype):
    """OLMo's angles are float32 in any dtype, as are the norms of gpt-oss; a mixture's tokens change experts."""
    in_float32 = fuse(tiny_models.fresh(name), None)
    assert in_float32.fused
    assert fuse(tiny_models.fresh(name, dtype), None) == in_float32


@pytest.mark.parametrize("name", ["gemma", "cohere", "qwen3_moe"])
def test_every_linear_multiplies_rows_in_blocks_if_faster(monkeypatch, name):
    monkeypatch.setattr(rows, "in_blocks", lambda: True)
    model = tiny_models.fresh(name)
    plain = sample_logits(model)
    assert fuse(model, None).fused == FUSED[name]
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert linears <= set(forwards(model))
    assert relative_error(sample_logits(model), plain) < 1e-6


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_single_tokens_use_the_kernels(name):
    model, kernels = tiny_models.fresh(name), TorchKernels()
    plain = sample_logits(model)
    assert fuse(model, kernels).fused == ALL
    assert kernels.called == {"project", "gated", "rotate"}
    assert relative_error(sample_logits(model), plain) < 1e-6


@pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="no Triton interpreter"
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_triton_kernels_compute_the_same(name):
    pytest.importorskip("triton")
    from kvchat.models.fuse import kernels

    model = tiny_models.fresh(name).to("cuda" if torch.cuda.is_available() else "cpu")
    plain = sample_logits(model)
    assert fuse(model, kernels) == modules.FusionReport(ALL, "")
    assert relative_error(sample_logits(model), plain) < (1e-4 if torch.cuda.is_available() else 1e-6)


def test_the_bundled_model_is_fused():
    loaded = load_model(Load("bundled", "cpu"), lambda stage: None)
    assert loaded.fused == ALL
    plain = load_model(Load("bundled", "cpu", fast=False), lambda stage: None)
    assert (plain.fused, forwards(plain.model)) == ("", [])
    assert loaded.weight_bytes == plain.weight_bytes
    assert relative_error(sample_logits(loaded.model), sample_logits(plain.model)) < 1e-5


# ---- side effects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_merged_weights_take_no_extra_memory(name):
    model = tiny_models.fresh(name)
    before = weight_bytes(model), {key: value.clone() for key, value in model.state_dict().items()}
    fuse(model, None)
    assert weight_bytes(model) == before[0] == sum(storages(model).values())
    after = model.state_dict()
    assert after.keys() == before[1].keys()
    assert all(torch.equal(after[key], before[1][key]) for key in after)


def test_probing_a_fused_model_gives_the_same():
    model = tiny_models.fresh("qwen3")
    plain = probe(model)
    fuse(model, None)
    seen = probe(model)
    assert (seen.specs, seen.refusal) == (plain.specs, None)
    assert all(torch.equal(a.inv_freq, b.inv_freq) for a, b in zip(seen.rotations, plain.rotations, strict=True))


def test_other_models_in_the_process_are_not_changed():
    other, model = tiny_models.fresh("llama"), tiny_models.fresh("llama")
    before = sample_logits(other)
    fuse(model, None)
    assert forwards(other) == []
    assert torch.equal(sample_logits(other), before)


def test_merged_projections_can_be_called_in_any_order():
    model = tiny_models.fresh("qwen2")
    attention = model.model.layers[0].self_attn
    plain = {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")}
    inputs = torch.randn(3, 1, 2, 64)
    with torch.inference_mode():
        right = {name: [linear(x) for x in inputs] for name, linear in plain.items()}
        fuse(model, None)
        for order in (("k_proj", 0), ("q_proj", 1), ("q_proj", 1), ("v_proj", 0), ("v_proj", 1), ("k_proj", 2)):
            name, index = order
            torch.testing.assert_close(getattr(attention, name)(inputs[index]), right[name][index])


def test_a_failed_forward_leaves_no_state():
    model = tiny_models.fresh("llama")
    fuse(model, None)
    before = sample_logits(model)

    class Failing:
        def attention(self, layer, query, key, value, spec):
            raise RuntimeError

    ids = torch.arange(1)
    with pytest.raises(RuntimeError):
        attention_hook.forward(model, ids, ids, Failing(), logits=True)
    assert torch.equal(sample_logits(model), before)


# ---- undone fusions --------------------------------------------------------------------------------


class WrongKernels(TorchKernels):
    def __init__(self):
        super().__init__()
        right = self.rotate
        self.rotate = lambda query, key, cos, sin, *norms: right(query, key, cos, -sin, *norms)


class FailingKernels(TorchKernels):
    def __init__(self):
        super().__init__()

        def gated(*args):
            raise RuntimeError("no C compiler\nfound")

        self.gated = gated


@pytest.mark.parametrize(
    ("kernels", "why"), [(WrongKernels, "differ"), (FailingKernels, "RuntimeError: no C compiler")]
)
def test_failing_kernels_are_not_used(kernels, why):
    model = tiny_models.fresh("llama")
    plain = sample_logits(model)
    done = fuse(model, kernels())
    assert done.fused == ALL
    assert why in done.note
    assert relative_error(sample_logits(model), plain) < 1e-6


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("wrong", ["normed", "project", "gated"])
def test_a_wrong_fusion_is_undone(monkeypatch, wrong):
    model = tiny_models.fresh("llama")
    plain, right = sample_logits(model), getattr(Operations, wrong)

    def wrongly(self, *args, **kwargs):
        return right(self, *args, **kwargs) * 1.01

    monkeypatch.setattr(Operations, wrong, wrongly)
    loaded = wrap(model, SimpleNamespace(chat_template="", eos_token_id=2), "wrong")
    assert loaded.fused == ""
    assert "failed its check" in loaded.notes[-1]
    assert forwards(model) == []
    assert torch.equal(sample_logits(model), plain)


@pytest.mark.cuda
def test_kernels_are_used_only_on_a_gpu():
    assert modules.kernels_for(torch.device("cpu")) is None
    assert modules.kernels_for(torch.device("cuda")) is not None


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cuda_graph_can_capture_a_fused_step(dtype):
    """There is no read-back and no allocation that a CUDA graph cannot record."""
    model = tiny_models.fresh("llama", dtype).cuda()
    fuse(model, modules.kernels_for(model.device))

    class OwnValue:
        def attention(self, layer, query, key, value, spec):
            return value.repeat_interleave(query.shape[0] // key.shape[0], 0)

    ids, position = torch.zeros(1, dtype=torch.long, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attention_hook.forward(model, ids, position, OwnValue(), logits=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = attention_hook.forward(model, ids, position, OwnValue(), logits=True)
    ids.fill_(7)
    graph.replay()
    assert torch.equal(captured, attention_hook.forward(model, ids, position, OwnValue(), logits=True))
