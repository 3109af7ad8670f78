import json
import shutil
import time
from dataclasses import replace

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from support import tiny_models, tiny_multimodal
from support.memory_faults import HostMemoryError
from support.model_folders import edit_json
from support.progress import silent
from tokenizers import Tokenizer
from transformers import GenerationConfig

from kvchat import paths
from kvchat.engine.prompt import PromptEncoder
from kvchat.errors import DoesNotFitError, KvchatError, ModelError, UsageError
from kvchat.models import attention_hook, checkpoint, compile_ahead, hub, load
from kvchat.models.fuse import modules
from kvchat.models.hub import ByteProgress
from kvchat.models.load import load_model
from kvchat.models.quantize import int8_rows
from kvchat.models.quantize.rows import ThreadBudget
from kvchat.paths import INDEX
from kvchat.protocol.messages import TEMPERATURE, Load, Sampling, Turn

# ---- loaded models ---------------------------------------------------------------------------------


def test_the_bundled_model_loads_silently_without_a_network(no_network, capfd):
    stages = []
    loaded = load_model(Load("bundled", "cpu"), stages.append)
    assert (loaded.layers, loaded.q_heads, loaded.kv_heads, loaded.d_k, loaded.d_v) == (8, 8, 4, 64, 64)
    assert (loaded.context, loaded.vocab, loaded.eos_ids) == (16384, 8192, frozenset({4}))
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    assert loaded.weight_bytes == sum(p.nbytes for p in loaded.model.parameters()) + 2 * 32 * 4
    assert loaded.notes == ()
    assert not loaded.model.training
    # Compiling is shown only the first time on a machine, and the bytes read at most once a second.
    occasional = "Compiling", "Loading the weights ▰", "Loading the weights ▱"
    shown = [stage for stage in stages if not stage.startswith(occasional)]
    assert shown == ["Loading the tokenizer", "Loading the weights", "Preparing the model"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_local_folder_loads_in_the_requested_dtype(folder, no_network, dtype, expected):
    loaded = load_model(Load(str(folder), "auto" if not torch.cuda.is_available() else "cpu", dtype), silent)
    assert loaded.dtype == loaded.model.dtype == expected
    assert loaded.context == tiny_models.CONTEXT
    assert loaded.vocab == tiny_models.VOCAB


@pytest.mark.usefixtures("untested")
def test_a_model_is_tested_once_per_machine(folder, monkeypatch, tmp_path):
    """Tested again if weights, config, kvchat's code or the processor change, or the saved result is damaged."""
    tested, layers = [], []

    def recording_selftest(model, chunked):
        tested.append(model)
        return selftest(model, chunked=chunked)

    def recording_install(model, known=None):
        layers.append(install(model, known))
        return layers[-1]

    selftest, install = load.selftest, attention_hook.install
    monkeypatch.setattr(load, "selftest", recording_selftest)
    monkeypatch.setattr(attention_hook, "install", recording_install)
    monkeypatch.setattr(compile_ahead, "begin", lambda dtype, first=(): None)  # not again for the other processor
    request = Load(str(folder), "cpu", "float32")
    first, second = load_model(request, silent), load_model(request, silent)
    assert len(tested) == 1
    assert layers[0] == layers[1]
    assert (first.fused, first.notes, first.reads_chunks) == (second.fused, second.notes, second.reads_chunks)
    assert torch.equal(*(modules.sample_logits(loaded.model) for loaded in (first, second)))
    paths.tested_file().write_text('{"damaged')
    load_model(request, silent)
    other = shutil.copytree(folder, tmp_path / "other")
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    load_model(replace(request, model=str(other)), silent)
    assert len(tested) == 3
    monkeypatch.setattr(load, "LIBRARIES", ())
    load_model(request, silent)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9")
    load_model(request, silent)
    assert len(tested) == 5


def test_weights_are_installed_on_free_cores(folder, monkeypatch):
    class OneCore(ThreadBudget):
        def sample(self):
            self.threads = 1

    threads, before = {}, torch.get_num_threads()

    def record_threads(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args: (threads.__setitem__(name, torch.get_num_threads()), original(*args))[1]
        )

    torch.set_num_threads(2)
    monkeypatch.setattr(load, "ThreadBudget", OneCore)
    record_threads(int8_rows, "install")
    try:
        load_model(Load(str(folder), "cpu", "float32", quantize="int8"), silent)
        assert (threads, torch.get_num_threads()) == ({"install": 1}, 2)
    finally:
        torch.set_num_threads(before)


def test_generation_config_sets_end_tokens_and_temperature(folder):
    edit_json(folder / "generation_config.json", eos_token_id=[7, 8], temperature=0.3, do_sample=True)
    loaded = load_model(Load(str(folder), "cpu"), silent)
    assert (loaded.eos_ids, loaded.advised.temperature) == ({7, 8, 2, 4}, 0.3)


def test_yarn_in_the_config_extends_the_context(folder):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attn_factor": 0.5}
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=yarn)
    loaded = load_model(Load(str(folder), "cpu", "float32"), silent)
    assert loaded.context == 2048
    assert loaded.model.model.rotary_emb.attention_scaling == pytest.approx(0.5 * 1.1386294)


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "GemmaTokenizer"])
def test_tokenizer_json_overrides_the_named_class(folder, named):
    """Repositories name classes of transformers whose steps are not those of their tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text())
    letters = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["pretokenizers"].insert(0, letters)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    edit_json(folder / "tokenizer_config.json", tokenizer_class=named)
    tokenizer = load_model(Load(str(folder), "cpu"), silent).tokenizer
    assert tokenizer.decode(tokenizer.encode("a whale")) == "a whale"
    assert len(tokenizer.encode("a whale", add_special_tokens=False)) == len("a whale")


def test_special_tokens_of_the_tokenizer_class_are_kept(folder):
    """As in GPT-2's repository, whose tokenizer_config.json contains only a length."""
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.add_special_tokens(["<|endoftext|>"])
    stored.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_model(Load(str(folder), "cpu"), silent).tokenizer
    assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("missing", ["is_sentencepiece_available", "is_protobuf_available"])
def test_packages_that_read_a_sentencepiece_file_are_named(folder, monkeypatch, missing):
    (folder / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr(transformers.utils, missing, lambda: False)
    load_model(Load(str(folder), "cpu"), silent)  # tokenizer.json needs neither
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="pip install sentencepiece protobuf"):
        load_model(Load(str(folder), "cpu"), silent)


def test_the_first_of_several_templates_is_used_if_none_is_the_default(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    named = [{"name": "rag", "template": "{{ messages[0].content }} rag"}, {"name": "tool_use", "template": "tools"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = load_model(Load(str(folder), "cpu"), silent).tokenizer
    assert PromptEncoder(tokenizer).render([Turn("user", "Hello")]) == "Hello rag"
    edit_json(folder / "tokenizer_config.json", chat_template=[])
    assert not load_model(Load(str(folder), "cpu"), silent).tokenizer.chat_template


def test_the_revision_changes_with_the_files(folder):
    def revision(folder):
        return checkpoint.complete(checkpoint.locate(str(folder), silent), silent).revision

    before = revision(folder)
    assert revision(folder) == before
    weights = sorted(folder.glob("*.safetensors"))[-1]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert revision(folder) != before


def test_notes_name_extra_memory_and_a_missing_template(tmp_path):
    tiny_multimodal.save(tiny_models.model("deepseek_v3"), tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=None)
    loaded = load_model(Load(str(tmp_path), "cpu"), silent)
    assert (loaded.d_k, loaded.d_v) == (24, 16)
    assert "7 times the memory" in loaded.notes[0]
    assert "no chat template" in loaded.notes[1]


def test_absolute_positions_and_missing_tokens_are_noted(tmp_path):
    tiny_multimodal.save(tiny_models.model("gpt2"), tmp_path)
    loaded = load_model(Load(str(tmp_path), "cpu"), silent)
    streaming, tokenizer = loaded.notes
    assert "streaming" in streaming
    assert ("8,192" in tokenizer, "199" in tokenizer) == (True, True), "embedding rows without a token"


def test_loading_restores_the_verbosity_of_transformers(folder):
    verbosity = transformers.logging.get_verbosity()
    load_model(Load(str(folder), "cpu"), silent)
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.utils.logging.is_progress_bar_enabled()


# ---- folders that are not models -------------------------------------------------------------------


def gguf_only(folder):
    (folder / "config.json").unlink()
    (folder / "model.gguf").touch()


def recurrent(folder):
    tiny_models.config("mamba2").save_pretrained(folder)


def no_weights(folder):
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()


def adapter_only(folder):
    no_weights(folder)
    (folder / "adapter_config.json").write_text("{}")


def truncated_weights(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def unlisted_tensor(folder):
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop("model.norm.weight", None) is not None:
            save_file(tensors, file, {"format": "pt"})


DAMAGES = {
    "is not a model. It has no config.json": lambda it: (it / "config.json").unlink(),
    "GGUF file": gguf_only,
    "config.json cannot be read": lambda it: (it / "config.json").write_text('{"model_type": '),
    "does not contain a JSON object": lambda it: (it / "config.json").write_text("[1]"),
    "llamma": lambda it: edit_json(it / "config.json", model_type="llamma", architectures=None),
    '"clip" is not a chat model': lambda it: transformers.CLIPConfig().save_pretrained(it),
    "kvchat cannot run Mamba2ForCausalLM. None of its layers attends": recurrent,
    "has no weights. There is no model.safetensors.": no_weights,
    "There is no model.safetensors.index.json": lambda it: (it / INDEX).unlink(),
    "It is an adapter (LoRA) for another model": adapter_only,
    "lacks 1 of its 2 weight files, such as model-00002-of-00002.safetensors": lambda it: (
        it / "model-00002-of-00002.safetensors"
    ).unlink(),
    "model.safetensors.index.json cannot be read": lambda it: (it / INDEX).write_text("{"),
    "model-00001-of-00002.safetensors is damaged": truncated_weights,
    "lack 1 tensor that the model needs, such as model.norm.weight": unlisted_tensor,
    "do not belong to its config.json": lambda it: edit_json(it / "config.json", num_hidden_layers=3),
    "in the files, and 64x128 in LlamaForCausalLM": lambda it: edit_json(it / "config.json", intermediate_size=128),
    "has no tokenizer": lambda it: (it / "tokenizer.json").unlink(),
    "transformers refuses its tokenizer": lambda it: (it / "tokenizer.json").write_text('{"version": "1.0"}'),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_folder_that_cannot_be_loaded_is_refused(folder, no_network, message):
    DAMAGES[message](folder)
    with pytest.raises(ModelError) as caught:
        load_model(Load(str(folder), "cpu"), silent)
    assert message in str(caught.value)


# ---- damaged and hostile models: refused within seconds, with the reason and no other error --------

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def edit_tensor(folder, name: str, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def sparse(folder, name: str, size: int) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(size)


def index_leading_outside(folder) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {"a": "../x"}}')


HOSTILE = {
    "weights of zeros": lambda it: sparse(it, WEIGHTS, 10**11),
    "an index leading outside": index_leading_outside,
    "a number of layers in letters": lambda it: edit_json(it / CONFIG, num_hidden_layers="four"),
    "no heads": lambda it: edit_json(it / CONFIG, num_attention_heads=0),
    "unknown rope": lambda it: edit_json(it / CONFIG, rope_parameters={"rope_type": "no such"}),
    "unknown activation": lambda it: edit_json(it / CONFIG, hidden_act="no such"),
    "empty tokenizer": lambda it: (it / "tokenizer.json").write_text(""),
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_model_is_refused_quickly(llama_folder, damage):
    damage(llama_folder)
    began = time.process_time()
    with pytest.raises(KvchatError) as caught:
        load_model(Load(str(llama_folder), "cpu"), silent)
    assert time.process_time() - began < 10
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_damaged(llama_folder, name):
    edit_tensor(llama_folder, name, lambda weight: weight.index_fill(0, torch.tensor(len(weight) - 1), torch.nan))
    with pytest.raises(ModelError, match="damaged"):
        load_model(Load(str(llama_folder), "cpu"), silent)


@pytest.mark.parametrize("name", ["x" * 5000, "/dev/zero"])
def test_an_impossible_name_is_refused(name):
    with pytest.raises(ModelError) as caught:
        load_model(Load(name, "cpu"), silent)
    assert len(str(caught.value)) < 12_000


def test_a_file_is_not_a_model(folder):
    with pytest.raises(ModelError, match="is a file"):
        load_model(Load(str(folder / "config.json"), "cpu"), silent)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        *(('folder "{}"', name) for name in ("/nowhere/model", "./model", "~/models/x", "a/b/c", "")),
        *(('file "{}"', name) for name in ("./model.gguf", "model.gguf", "models/q4.gguf")),
        *(("a server as http://", name) for name in ("127.0.0.1:8080", "host:8000/v1")),
    ],
)
def test_a_path_is_never_looked_up_on_the_hub(no_network, message, name):
    with pytest.raises(ModelError, match=message.format(name)):
        load_model(Load(name, "cpu"), silent)


# ---- the hub ---------------------------------------------------------------------------------------


def answering(monkeypatch, answer):
    def snapshot_download(name, **kwargs):
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError, "org/model cannot be downloaded"),
        (errors.HFValidationError, '"org/model" is not a model'),
        (OSError, "org/model cannot be downloaded"),
    ],
)
def test_errors_of_the_hub_are_distinguished(monkeypatch, error, message):
    answering(monkeypatch, error.__new__(error))
    with pytest.raises(ModelError, match=message):
        load_model(Load("org/model", "cpu"), silent)


def test_an_uncached_model_is_refused_offline(no_network, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="cannot be reached"):
        load_model(Load("org/model", "cpu"), silent)


def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(monkeypatch, folder):
    recurrent(folder)
    fetched = []

    def snapshot_download(name, *, allow_patterns, **kwargs):
        fetched.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match="attends"):
        load_model(Load("org/model", "cpu"), silent)
    assert fetched == [["config.json"]]


def test_the_revision_of_a_downloaded_model_is_its_commit(monkeypatch, folder):
    commit = folder.rename(folder.parent / "0123abc")
    answering(monkeypatch, commit)
    loaded = load_model(Load("org/model", "cpu"), silent)
    assert (loaded.name, loaded.revision) == ("org/model", "0123abc")


def test_a_download_prints_no_progress_bar(capfd):
    shown = []
    progress = ByteProgress(shown.append, "Downloading")
    bar = hub._reporter(progress.report)(total=3_000_000_000, unit="B", name="x", mininterval=0)
    bar.update(3_000_000_000)
    bar.close()
    assert "Downloading ▰▰▰▰▰▰▰▰ 2.8 GiB of 2.8 GiB" in shown
    assert capfd.readouterr() == ("", "")


# ---- dtypes and memory ------------------------------------------------------------------------------


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UsageError, match='"float16"'):
        load_model(Load("bundled", "cpu", "floaty16"), silent)


def test_gpu_memory_that_runs_out_while_loading_is_reported(small_gpu, folder, monkeypatch):
    def run_out(model, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.PreTrainedModel, "to", run_out)
    with pytest.raises(DoesNotFitError, match="GPU X"):
        load_model(Load(str(folder), "cuda", "float32"), silent)


@pytest.mark.parametrize("error", [HostMemoryError(2**40), MemoryError()])
@pytest.mark.parametrize("where", ["from_pretrained", "to"])
def test_host_memory_that_runs_out_while_loading_is_reported(folder, monkeypatch, where, error):
    def run_out(*args, **kwargs):
        raise error

    monkeypatch.setattr(transformers.PreTrainedModel, where, run_out)
    with pytest.raises(DoesNotFitError, match=f"{folder.name}.*582 KiB"):
        load_model(Load(str(folder), "cpu", "float32"), silent)


# ---- The sampling that a model's files recommend


@pytest.mark.parametrize(
    ("values", "expected", "noted"),
    [
        ({}, Sampling(temperature=TEMPERATURE), []),
        ({"temperature": 0.3}, Sampling(temperature=0.3), []),
        ({"temperature": None}, Sampling(temperature=TEMPERATURE), []),
        ({"temperature": 1.9, "top_k": 1}, Sampling(temperature=1.9, top_k=1), ["temperature 1.9", "top_k 1"]),
        ({"top_p": 0.95, "min_p": 0.0}, Sampling(temperature=TEMPERATURE, top_p=0.95), ["top_p 0.95"]),
        ({"repetition_penalty": 1.1}, Sampling(temperature=TEMPERATURE, repetition_penalty=1.1), ["1.1"]),
        ({"temperature": 70, "top_k": 20}, Sampling(temperature=TEMPERATURE), ["temperature 70", "out of range"]),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, Sampling(temperature=0), ["likeliest"]),
        ({"do_sample": True, "temperature": 0.6}, Sampling(temperature=0.6), []),
        ({"temperature": 0.0}, Sampling(temperature=TEMPERATURE), ["out of range"]),
        ({"stop_strings": ["###", "", 5]}, Sampling(temperature=TEMPERATURE, stop=("###",)), []),
        ({"stop_strings": "###"}, Sampling(temperature=TEMPERATURE, stop=("###",)), []),
        ({"typical_p": 0.9, "num_beams": 4}, Sampling(temperature=TEMPERATURE), ["typical_p, num_beams are ignored"]),
        ({"typical_p": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0}, Sampling(temperature=TEMPERATURE), []),
        ({"top_k": 20, "suppress_tokens": [7]}, Sampling(temperature=TEMPERATURE, top_k=20), ["suppress_tokens is"]),
        ({"temperature": 0.6, "top_k": "all"}, Sampling(temperature=TEMPERATURE), ["top_k all"]),
    ],
)
def test_recommended_sampling_is_used_and_noted(values, expected, noted):
    config = GenerationConfig()
    for name, value in values.items():
        setattr(config, name, value)
    assert checkpoint.sampling(config) == expected
    assert bool(checkpoint.note(config)) == bool(noted)
    assert all(words in checkpoint.note(config) for words in noted)


def test_a_gguf_file_can_recommend_sampling():
    config = GenerationConfig()
    checkpoint.take_from_gguf({"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "other": 1}, config)
    assert checkpoint.sampling(config) == Sampling(temperature=0.5, top_k=40)
    checkpoint.take_from_gguf({"general.sampling.temp": 0.0}, config)
    assert checkpoint.sampling(config) == Sampling(temperature=0)


# ---- Code and pickles that come with a model: never run, never read


@pytest.fixture
def own_code(folder, tmp_path, monkeypatch):
    """The folder has Python files that create ``mark`` when they run; a question on stdin fails the test."""
    mark = tmp_path / "it ran"
    for name in ("configuration_mine", "modeling_mine", "tokenization_mine"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("a question on stdin"))
    return mark


AUTO_MAP = {
    "AutoConfig": "configuration_mine.MineConfig",
    "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    "AutoTokenizer": ["tokenization_mine.MineTokenizer", None],
}


def test_a_model_that_needs_its_own_code_is_refused(folder, own_code):
    edit_json(folder / "config.json", model_type="mine", auto_map=AUTO_MAP)
    with pytest.raises(ModelError, match="code") as caught:
        load_model(Load(str(folder), "cpu"), lambda stage: None)
    assert caught.value.hint
    assert not own_code.exists()


def test_own_code_of_a_known_architecture_is_not_run(folder, own_code):
    edit_json(folder / "config.json", auto_map=AUTO_MAP)
    edit_json(folder / "tokenizer_config.json", auto_map=AUTO_MAP)
    assert load_model(Load(str(folder), "cpu"), lambda stage: None).layers == 4
    assert not own_code.exists()


def pickled(folder, monkeypatch):
    """The folder also has the same weights as a pickle, which torch must not read."""
    torch.save(tiny_models.model("llama").state_dict(), folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("a pickle was read"))


def test_a_pickle_next_to_the_weights_is_not_read(folder, monkeypatch):
    pickled(folder, monkeypatch)
    assert load_model(Load(str(folder), "cpu"), lambda stage: None).layers == 4


def test_a_pickle_is_not_read_if_the_index_is_missing(folder, monkeypatch):
    pickled(folder, monkeypatch)
    (folder / INDEX).unlink()  # without it transformers does not find the safetensors
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(Load(str(folder), "cpu"), lambda stage: None)


def test_a_pickle_alone_is_refused(folder, monkeypatch):
    pickled(folder, monkeypatch)
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    with pytest.raises(ModelError, match=r"safetensors and GGUF.*\.bin"):
        load_model(Load(str(folder), "cpu"), lambda stage: None)
