"""Loading models from GGUF files."""

import json
import time
import urllib.request
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf import GGUFWriter
from support import tiny_models
from support.gguf_files import VALUES, gguf_header, text, write_model, write_norms, write_tiny
from support.progress import silent
from support.real_models import FILES

from kvchat.engine.plan import memory_plan
from kvchat.errors import DoesNotFitError, ModelError, UsageError
from kvchat.kv.memory import available
from kvchat.models import checkpoint, description, gguf
from kvchat.models import tokenizer as tokenizer_module
from kvchat.models.fuse.modules import sample_logits
from kvchat.models.gguf_file import GgufFile, Tensor, read
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error
from kvchat.protocol.messages import Load


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "bundled.gguf"
    write_model(path, model)
    return path


@pytest.mark.parametrize("of", [lambda path: path, lambda path: path.parent], ids=["file", "folder"])
def test_a_gguf_file_loads_as_the_original_model(file, model, of, capfd):
    loaded = load_model(Load(str(of(file)), "cpu", quantize="none"), silent)
    assert (loaded.context, loaded.vocab, loaded.dtype) == (model.context, model.vocab, torch.float32)
    assert loaded.weight_bytes == pytest.approx(model.weight_bytes, rel=0.01), "unpacked"
    assert relative_error(sample_logits(loaded.model), sample_logits(model.model)) < 0.1
    text = "Biscuit's third lighthouse."
    assert loaded.tokenizer(text)["input_ids"][-5:] == model.tokenizer(text)["input_ids"][-5:]
    assert (loaded.fused, loaded.weights) == (model.fused, "")
    assert any("unpacked to float32" in note for note in loaded.notes)
    assert capfd.readouterr() == ("", "")


def test_loading_needs_memory_only_for_packed_weights(file, monkeypatch):
    monkeypatch.setattr(available, "host_free", lambda: 40 * 2**20)  # 18 MiB in the file, 66 unpacked
    assert load_model(Load(str(file), "cpu"), silent).weights == "int8"
    with pytest.raises(DoesNotFitError):
        load_model(Load(str(file), "cpu", quantize="none"), silent)


def theta(base, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **more}}


BIASED = {"attention_bias": True, "mlp_bias": True}
GEMMA3 = {
    "num_hidden_layers": 6,
    "layer_types": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
# No file contains the last three, which all models of this architecture have.
GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("llama", "llama", {"rms_norm_eps": 0.1, **theta(5e4), **BIASED}),
        ("qwen3", "qwen3", theta(5e4)),
        ("qwen2_moe", "qwen2moe", {"tie_word_embeddings": True}),
        ("qwen3_moe", "qwen3moe", {"norm_topk_prob": True}),
        ("phi3", "phi3", {"vocab_size": 32064, **theta(5e4, partial_rotary_factor=0.5)}),
        ("gemma2", "gemma2", {"final_logit_softcapping": 5.0, "tie_word_embeddings": True}),
        ("gemma3", "gemma3", {"tie_word_embeddings": True, **GEMMA3}),
        ("starcoder2", "starcoder2", {"tie_word_embeddings": True, **theta(5e4)}),
        ("stablelm", "stablelm", theta(5e4, partial_rotary_factor=0.5)),
        ("gpt2", "gpt2", {"tie_word_embeddings": True}),
        ("mixtral", "llama", {"num_experts_per_tok": 3, "head_dim": 32, **theta(5e4)}),
        ("gpt_oss", "gpt-oss", {"rms_norm_eps": 0.1, "rope_parameters": GPT_OSS}),
    ],
)
def test_values_of_the_file_override_those_of_transformers(tmp_path, name, kind, changes):
    """With the defaults, most of these load and answer nonsense."""
    original = tiny_models.fresh(name, **{"vocab_size": 8192, **changes})
    write_tiny(tmp_path / "x.gguf", original, kind)
    loaded = load_model(Load(str(tmp_path), "cpu", quantize="none", fast=False), silent)
    assert relative_error(sample_logits(loaded.model), sample_logits(original)) < 1e-5
    assert loaded.context == tiny_models.CONTEXT


NO_WINDOW = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
COHERE = {"tie_word_embeddings": True, "logit_scale": 0.3}


@pytest.mark.slow("llama.cpp starts")
@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("arcee", "arcee", theta(5e4)),
        ("cohere", "command-r", COHERE),
        ("cohere2", "cohere2", COHERE),
        ("ernie4_5", "ernie4_5", theta(5e4)),
        ("exaone4", "exaone4", NO_WINDOW),
        ("glm4", "glm4", theta(5e4, partial_rotary_factor=0.5)),
        ("granite", "granite", {"logits_scaling": 0.5}),
        ("hunyuan_v1", "hunyuan-dense", theta(5e4)),
        ("lfm2_moe", "lfm2moe", {"tie_word_embeddings": True, **theta(5e4)}),
        ("ministral3", "mistral3", {}),
        ("mistral", "mistral3", {"sliding_window": None}),
        ("olmo2", "olmo2", theta(5e4)),
        ("olmo3", "olmo2", {}),
        ("olmoe", "olmoe", {"num_key_value_heads": 4}),
        ("qwen2", "qwen2vl", theta(5e4)),
        ("qwen3", "qwen3vl", {"head_dim": 16, "tie_word_embeddings": True}),
        ("qwen3_moe", "qwen3vlmoe", {"norm_topk_prob": True}),
        ("seed_oss", "seed_oss", theta(5e4)),
        ("smollm3", "smollm3", theta(5e4)),
    ],
)
def test_architectures_that_transformers_reads_from_no_gguf_file(tmp_path, name, kind, changes):
    original = tiny_models.fresh(name, **{"vocab_size": 8192, **changes})
    for name, buffer in original.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(0, 0.3)
    write_tiny(tmp_path / "x.gguf", original, kind)
    loaded = load_model(Load(str(tmp_path), "cpu", quantize="none", fast=False), silent)
    assert relative_error(sample_logits(loaded.model), sample_logits(original)) < 1e-5
    assert llama_cpp_error(tmp_path / "x.gguf", loaded.model) < 0.02  # its K/V have 16 bits


def test_missing_numbers_of_heads_and_positions_are_llama_cpps_not_transformers_defaults(tmp_path, monkeypatch):
    """GLM-4 has heads of 128 there, of which half rotates, and Ernie 4.5 another base."""
    monkeypatch.setattr(GGUFWriter, "add_rope_dimension_count", lambda *_: None)
    monkeypatch.setattr(GGUFWriter, "add_rope_freq_base", lambda *_: None)
    monkeypatch.delitem(VALUES, "head_dim")
    for name in ("ernie4_5", "glm4"):
        original = tiny_models.fresh(name, vocab_size=8192, **theta(1e4, partial_rotary_factor=1.0))
        write_tiny(tmp_path / "x.gguf", original, name)
        loaded = load_model(Load(str(tmp_path), "cpu", quantize="none", fast=False), silent)
        assert relative_error(sample_logits(loaded.model), sample_logits(original)) < 1e-5


def llama_cpp_error(path, model):
    """The largest difference between llama.cpp's log-probabilities after 300 tokens and those of ``model``."""
    xllamacpp = pytest.importorskip("xllamacpp")
    asked = xllamacpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.warmup, asked.verbosity, asked.n_parallel = str(path), 512, False, -1, 1
    server = xllamacpp.Server(asked)
    ids = torch.arange(300) * 37 % 8000 + 5
    body = {"prompt": ids.tolist(), "n_predict": 1, "n_probs": 8192, "temperature": -1}
    request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    answer = json.loads(urllib.request.urlopen(request).read())
    theirs = {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        ours = model(ids[None]).logits[0, -1].log_softmax(-1)
    return max(abs(theirs[id] - ours[id].item()) for id in theirs)


def test_a_shared_experts_gate_may_be_a_matrix(tmp_path):
    """llama.cpp's converter used to write the first, and now the second."""
    original = tiny_models.fresh("qwen2_moe", vocab_size=8192)
    write_tiny(tmp_path / "x.gguf", original, "qwen2moe", gates_are_rows=False)
    loaded = load_model(Load(str(tmp_path), "cpu", quantize="none", fast=False), silent)
    assert relative_error(sample_logits(loaded.model), sample_logits(original)) < 1e-5


def test_a_model_called_mistral_loads_as_llama(tmp_path):
    """transformers would read it as another architecture, which no file has."""
    original = tiny_models.fresh("llama", vocab_size=8192)
    write_tiny(tmp_path / "x.gguf", original, "llama", "mistral")
    loaded = load_model(Load(str(tmp_path), "cpu", quantize="none", fast=False), silent)
    assert relative_error(sample_logits(loaded.model), sample_logits(original)) < 1e-5


@pytest.mark.parametrize(("quantize", "error"), [("none", 1e-5), ("int8", 0.02)])
def test_mxfp4_experts_are_read_in_the_models_order(tmp_path, quantize, error):
    original = tiny_models.fresh("gpt_oss", vocab_size=8192, rope_parameters=GPT_OSS)
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if name.endswith(("_proj", "_proj.weight", "router.weight")):
                values = parameter.mT if "experts" in name else parameter
                values.copy_(rounded(values, "MXFP4"))
    write_tiny(tmp_path / "x.gguf", original, "gpt-oss", layers="MXFP4")
    loaded = load_model(Load(str(tmp_path), "cpu", quantize=quantize, fast=False), silent)
    assert relative_error(sample_logits(loaded.model), sample_logits(original)) < error


def rounded(values, kind):
    """The values of a tensor after a round trip through this type."""
    import gguf

    type_ = gguf.GGMLQuantizationType[kind]
    packed = gguf.quantize(values.detach().contiguous().numpy(), type_)
    return torch.from_numpy(gguf.dequantize(packed, type_)).view_as(values)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("mixtral", "qwen2moe", r"lack 28 tensors.*mlp\.shared_expert.*safetensors"),
        ("qwen2", "llama", r"no place for 12 tensors, such as blk\.0\.attn_k\.bias.*safetensors"),
    ],
)
@pytest.mark.parametrize("use", [lambda load: load_model(load, silent), lambda load: memory_plan(load, 1, silent)])
def test_unexpected_and_missing_tensors_are_refused_before_reading(tmp_path, name, kind, reason, use, monkeypatch):
    monkeypatch.setattr(gguf, "values", None)
    write_tiny(tmp_path / "x.gguf", tiny_models.fresh(name, vocab_size=8192), kind)
    with pytest.raises(ModelError, match=reason):
        use(Load(str(tmp_path), "cpu", quantize="none"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda it: b"not at all", "is damaged"),
        (lambda it: it[:5000], "is damaged"),
        (lambda it: it[:500_000], r"damaged.* bytes"),  # an incomplete download
        (lambda it: it.rstrip(b"\0")[:-1], r"damaged.* bytes"),
    ],
)
def test_a_damaged_file_is_refused(file, tmp_path, damage, message):
    (tmp_path / "cut.gguf").write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=message):
        load_model(Load(str(tmp_path / "cut.gguf"), "cpu"), silent)


def test_a_gguf_file_supports_only_int8_and_int4(file):
    with pytest.raises(ModelError, match=r"GGUF.*nf4.*--quantize none"):
        load_model(Load(str(file), "cpu", quantize="nf4"), silent)
    with pytest.raises(UsageError, match="no quantization"):
        load_model(Load(str(file), "cpu", quantize="nf5"), silent)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nothing"), Path.mkdir])
@pytest.mark.parametrize("of", [lambda path: path, lambda path: path.parent, lambda path: "x.gguf"])
def test_broken_links_and_folders_are_refused_quickly(tmp_path, monkeypatch, make, of):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x.gguf")
    began = time.process_time()
    with pytest.raises(ModelError):
        load_model(Load(str(of(tmp_path / "x.gguf")), "cpu"), silent)
    assert time.process_time() - began < 1


def test_a_folder_with_several_files_is_refused(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="several GGUF files"):
        load_model(Load(str(tmp_path), "cpu"), silent)
    assert checkpoint.locate(str(tmp_path / "b.gguf"), silent).gguf == "b.gguf"


def test_projectors_and_adapters_in_a_folder_are_ignored(tmp_path):
    tensor = ("output_norm", (64,), 0)
    others = {"mmproj-a.gguf": text("general.type", "mmproj"), "lora.gguf": text("adapter.type", "lora")}
    for name, value in others.items():
        (tmp_path / name).write_bytes(gguf_header(tensor, values=[value]) + bytes(800))
    (tmp_path / "model.gguf").write_bytes(gguf_header(tensor) + bytes(800))
    assert checkpoint.locate(str(tmp_path), silent).gguf == "model.gguf"


def test_a_file_of_a_repository_is_downloaded(tmp_path, monkeypatch):
    requested = []

    def snapshot_download(name, *, allow_patterns, **kwargs):
        requested.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=r"q4\.gguf"):
        checkpoint.locate("org/model:q4.gguf", silent)
    assert requested == [("org/model", ["q4.gguf"])]
    with pytest.raises(ModelError, match=r"org/model:FILE\.gguf"):
        checkpoint.locate("org/model", silent)
    (tmp_path / "q4.gguf").write_bytes(content := gguf_header(("a", (256, 4), 12)))
    found = checkpoint.complete(checkpoint.locate("org/model:q4.gguf", silent), silent)
    assert (found.gguf, found.revision, found.weight_bytes) == ("q4.gguf", tmp_path.name, len(content))


@pytest.mark.parametrize(("kind", "layers", "scale"), [("gemma3", 34, 32), ("gemma3", 62, 40), ("gemma2", 46, 40)])
def test_gemma_scores_are_scaled_as_in_llama_cpp(tmp_path, kind, layers, scale):
    """No key in the file says so: 27B divides by the root of 5376 / 32, the others by the root of the head size."""
    write_norms(tmp_path / "gemma.gguf", kind, layers, 160)
    described = description.describe(str(tmp_path), "cpu", "float32", silent)
    assert described.text_config.query_pre_attn_scalar == scale


# ---- The tokenizer of a GGUF file: the ids of llama.cpp, and one id for each special token


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
TEXTS = Path(__file__).parents[1] / "support" / "tokenizer_texts.txt"


def file_of(tokens, types, pre="smollm", kind="gpt2", rows=None, **values):
    """A file's header with this vocabulary."""
    metadata = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(token.encode() for token in tokens),
        "tokenizer.ggml.token_type": tuple(types),
        "tokenizer.ggml.merges": (),
        **{f"tokenizer.ggml.{key}": value for key, value in values.items()},
    }
    path = Path("x.gguf")
    table = Tensor("token_embd.weight", 0, (rows or len(tokens), 4), path, 0, 0)
    return GgufFile(path, metadata, (table,), (path,))


def bytes_and(*others):
    """The tokens of all bytes, followed by ``others``, and their types."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    return [*letters, *(token for token, _ in others)], [NORMAL] * 256 + [kind for _, kind in others]


def build(*args, **values):
    return tokenizer_module.build(file_of(*args, **values), "m")


def test_control_and_user_defined_tokens_are_one_id_each():
    others = [*((token, CONTROL) for token in DEEPSEEK), ("<think>", USER_DEFINED), ("    ", USER_DEFINED)]
    built = build(*bytes_and(*others), eos_token_id=259, bos_token_id=256)
    text = "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜><think>    b<｜end▁of▁sentence｜>"
    ids = built.tokenizer.encode(text, add_special_tokens=False)
    assert [id for id in ids if id >= 256] == [256, 257, 258, 260, 261, 259]
    assert len(ids) == 8
    assert built.tokenizer.decode(ids, skip_special_tokens=True) == "a<think>    b"
    assert (built.tokenizer.eos_token_id, built.tokenizer.bos_token, built.notes) == (259, DEEPSEEK[0], ())


def test_more_tokens_than_embeddings_are_refused():
    with pytest.raises(ModelError, match=r"256 tokens.* 255"):
        build(*bytes_and(), rows=255)


@pytest.mark.parametrize(("pre", "named"), [("of-next-year", '"of-next-year"'), ("", "no pre-tokenizer")])
def test_unknown_pre_tokenizers_are_noted(pre, named):
    (note,) = build(*bytes_and(), pre=pre).notes
    assert named in note


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "  ", "1", "2", " b"]),
        ("gpt-2", ["a", " ", " 12", " b"]),
        ("llama-bpe", ["a", " ", " ", "12", " b"]),
        ("qwen2", ["a", " ", " ", "1", "2", " b"]),
        ("deepseek-v3", ["a", "  ", "12", " b"]),
        ("minicpm5", ["a", "  ", "12", " b"]),
    ],
)
def test_texts_are_split_as_in_llama_cpp(pre, pieces):
    built = build(*bytes_and(), pre=pre).tokenizer.backend_tokenizer
    split = [text for text, _ in built.pre_tokenizer.pre_tokenize_str("a  12 b")]
    assert [piece.replace("Ġ", " ") for piece in split] == pieces


def test_every_pre_tokenizer_builds_without_notes():
    for pre in tokenizer_module.PRE_TOKENIZERS:
        assert not build(*bytes_and(), pre=pre).notes


@pytest.mark.parametrize("kind", ["bert", "rwkv", "none", ""])
def test_other_kinds_of_tokenizers_are_refused(kind):
    with pytest.raises(ModelError, match="tokenizer is"):
        build(*bytes_and(), kind=kind)


@pytest.mark.parametrize(("prefix", "ids"), [(True, [5, 4]), (False, [3, 4])])
def test_sentence_pieces_merge_in_order_of_their_scores(prefix, ids):
    tokens = ["<unk>", "<s>", "</s>", "a", "▁b", "▁a", "▁", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 5, *[BYTE] * 256]
    scores = (0.0, 0.0, 0.0, -3.0, -1.0, -2.0, -4.0, -5.0, *[0.0] * 256)
    built = build(tokens, types, pre="default", kind="llama", scores=scores, add_space_prefix=prefix).tokenizer
    assert built.encode("a b", add_special_tokens=False) == ids
    assert built("a b")["input_ids"] == [1, *ids], "it begins with bos unless the file says otherwise"
    assert built.decode(ids) == "a b"
    assert built.encode("é", add_special_tokens=False)[-2:] == [8 + 0xC3, 8 + 0xA9]


@pytest.mark.parametrize(("architecture", "ids"), [("phi3", [3, 4, 5, 4]), ("llama", [3, 6, 4, 5, 6, 4])])
def test_control_tokens_of_phi_3_absorb_the_space_after_them(architecture, ids):
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", "▁a", "<|end|>", "▁", "a"]
    types = [UNKNOWN, *[CONTROL] * 3, NORMAL, CONTROL, NORMAL, NORMAL]
    file = file_of(tokens, types, pre="default", kind="llama", scores=(0.0,) * len(tokens))
    file.values["general.architecture"] = architecture
    built = tokenizer_module.build(file, "m").tokenizer
    assert built.encode("<|user|> a<|end|> a", add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("template", "adds", "count"), [("", True, 1), ("{{ bos_token }}", True, 1), ("<bos>", True, 1), ("", False, 0)]
)
@pytest.mark.parametrize("is_own", [True, False])
def test_a_chat_begins_with_one_bos_if_texts_do(template, adds, count, is_own):
    """As in llama.cpp, even if the template, the file's or another, omits it."""
    file = file_of(
        *bytes_and(("<bos>", CONTROL), ("<eos>", CONTROL)), bos_token_id=256, eos_token_id=257, add_bos_token=adds
    )
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    file.values["tokenizer.chat_template"] = template if is_own else "x"
    built = tokenizer_module.build(file, "m", "" if is_own else template).tokenizer
    ids = built.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    assert built.decode(ids) == "<bos>" * count + "a"


def test_the_end_of_turn_token_is_one_id():
    built = build(*bytes_and(("<eos>", CONTROL), ("<end>", NORMAL)), eos_token_id=256, eot_token_id=257)
    assert built.tokenizer.encode("<end>", add_special_tokens=False) == [257]


@pytest.mark.slow("llama.cpp starts")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("smollm2", marks=pytest.mark.real_model("smollm2")),
        pytest.param("gemma3-270m", marks=pytest.mark.real_model("gemma3-270m")),
    ],
)
def test_ids_match_llama_cpp(name):
    xllamacpp = pytest.importorskip("xllamacpp")
    path = FILES[name]
    requested = xllamacpp.CommonParams()
    requested.model.path, requested.n_ctx, requested.warmup, requested.verbosity = str(path), 256, False, -1
    server = xllamacpp.Server(requested)
    tokenizer = tokenizer_module.build(read(path), name).tokenizer
    different = []
    for sample in TEXTS.read_bytes().decode().split("\n---\n"):
        body = json.dumps({"content": sample, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        theirs = json.loads(urllib.request.urlopen(request).read())["tokens"]
        if tokenizer.encode(sample, add_special_tokens=False) != theirs:
            different.append(sample)
    assert different == []
