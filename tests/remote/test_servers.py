"""Which program runs at an address, its models, and the keys that are sent to it."""

import asyncio
import json
import os
import socket
from functools import partial
from pathlib import Path

import pytest
from support.fake_server import KINDS, models

from kvchat import paths
from kvchat.errors import EngineError, ModelError, UsageError
from kvchat.remote import servers
from kvchat.remote.servers import Server, find, key_of, parse


def inspect(url: str) -> Server:
    (found,) = asyncio.run(find([url]))
    if isinstance(found, tuple):
        raise found[1]
    return found


@pytest.mark.parametrize(
    ("text", "root", "base", "model"),
    [
        ("http://h:8080", "http://h:8080", "http://h:8080/v1", ""),
        ("http://h:8080/", "http://h:8080", "http://h:8080/v1", ""),
        ("http://h:8080/v1#org/m", "http://h:8080", "http://h:8080/v1", "org/m"),
        ("HTTPS://h/proxy/v1/", "HTTPS://h/proxy", "HTTPS://h/proxy/v1", ""),
        ("http://h:8080/llama", "http://h:8080/llama", "http://h:8080/llama/v1", ""),
        ("https://h/paas/v4", "https://h/paas", "https://h/paas/v4", ""),
        ("http://h:8080/v1/chat/completions#m", "http://h:8080", "http://h:8080/v1", "m"),
        ("http://h:1234/v1/models", "http://h:1234", "http://h:1234/v1", ""),
    ],
)
def test_an_address_gives_root_base_and_model(text, root, base, model):
    address = parse(text)
    assert (address.root, address.base, address.model) == (root, base, model)


@pytest.mark.parametrize("text", ["http://", "http://h:x", "http://h:99999", "ftp://h", "h:8080", "http://h?key=1"])
def test_invalid_addresses_are_refused_without_showing_passwords(text):
    for refused in (text, "http://me:geheim@h:8080"):
        with pytest.raises(UsageError) as error:
            parse(refused)
        assert "geheim" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_each_program_is_recognized(serve, kind):
    assert inspect(serve(kind).url).kind == kind


def test_koboldcpp_is_not_mistaken_for_ollama(serve):
    """It answers Ollama's requests too, but has none of its options."""
    server = serve("Ollama")
    server.routes["/v1/models"] = models({"id": "koboldcpp/m", "owned_by": "koboldcpp"})
    found = inspect(server.url)
    assert (found.kind, found.offers, found.choose().id) == ("KoboldCpp", "", "koboldcpp/m")


def test_mlx_lms_server_is_not_mistaken_for_transformers(serve):
    server = serve("transformers serve")
    server.routes["/v1/models"] = models({"id": "mlx-community/m"})
    assert inspect(server.url).kind == "an OpenAI-compatible server"


def test_facts_about_models_are_read_from_each_program(serve):
    def facts(kind):
        model = inspect(serve(kind).url).choose()
        return model.id, model.context, model.weights

    assert facts("vLLM") == ("Qwen/Qwen3-4B", 2048, "")
    assert facts("Ollama") == ("b:2b", 4096, "")  # the loaded one, not the first
    assert facts("LM Studio") == ("gemma", 4096, "Q4_K_M")  # and not the embedding model


def test_llama_server_gives_context_per_slot_and_template_variables(serve):
    server = serve()
    meta = {"n_ctx": 8192, "n_params": 7, "size": 9, "ftype": "Q4_1"}
    server.routes = {
        "/v1/models": models({"id": "/m/a.gguf", "owned_by": "llamacpp", "meta": meta}),
        "/props": {
            "default_generation_settings": {"n_ctx": 4096},
            "chat_template": "{% if enable_thinking %}{{ bos_token }}{% endif %}{% for m in messages %}{% endfor %}",
        },
    }
    model = inspect(server.url).choose()
    assert (model.context, model.parameters, model.weights, model.is_loaded) == (4096, 7, "Q4_1", True)
    assert model.template_variables == ("enable_thinking",)
    server.routes["/props"] = {"chat_template": "{% if %}"}  # without --props, or with a template in another language
    assert inspect(server.url).choose().context == 8192


def test_kvchat_serve_gives_its_template_variables(serve):
    server = serve()
    own = {"mode": "full", "template_variables": ["enable_thinking"]}
    server.routes = {"/v1/models": models({"id": "m", "owned_by": "kvchat", "meta": {"n_ctx": 16384}, "kvchat": own})}
    found = inspect(server.url)
    assert found.kind == "kvchat serve"
    assert (found.choose().context, found.choose().template_variables) == (16384, ("enable_thinking",))


def test_a_named_model_is_chosen_or_refused(serve):
    url = serve("Ollama").url
    assert inspect(f"{url}#a:1b").choose().id == "a:1b"
    assert inspect(f"{serve('vLLM').url}#Qwen3-4B").choose().id == "Qwen/Qwen3-4B"
    assert inspect(f"{serve('transformers serve').url}#other/m").choose().id == "other/m", "it lists some models only"
    with pytest.raises(ModelError, match="a:1b"):
        inspect(f"{url}#a:7b").choose()


def test_a_port_without_a_server_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(EngineError, match=str(free.getsockname()[1])):
            inspect(f"http://127.0.0.1:{free.getsockname()[1]}")


@pytest.mark.parametrize(
    "body",
    ["<html>hello</html>", "[1, 2]", {"data": 3}, (500, "broken"), (404, {"detail": "Not Found"}), "[" * 100_000],
)
def test_other_servers_are_refused(serve, body):
    server = serve()
    server.routes = {"/v1/models": body}
    with pytest.raises(UsageError, match="not a model server"):
        inspect(server.url)


def test_malformed_facts_are_left_out(serve):
    server = serve("Ollama")
    server.routes["/v1/models"] = models({"id": "a", "max_model_len": "many", "meta": [1]}, {"id": 7}, {})
    server.routes["/api/ps"] = {"models": [3, {"name": "a", "context_length": -1}]}
    (model,) = inspect(server.url).models
    assert (model.id, model.context) == ("a", 0)


# ---- keys


def write_keys(text: str, mode: int = 0o600) -> Path:
    file = paths.server_keys_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.chmod(file, mode)
    return file


def test_a_key_comes_from_the_file_or_the_environment(serve, monkeypatch):
    server = serve()
    server.key = "k1"
    with pytest.raises(UsageError, match=r"Invalid API Key.*KVCHAT_API_KEY"):
        inspect(server.url)
    for ending in ("", " ", "\n", "\r\n", "\t"):  # of the line that it was copied from
        monkeypatch.setenv("KVCHAT_API_KEY", f"k1{ending}")
        assert inspect(server.url).kind == "vLLM"
    monkeypatch.setenv("KVCHAT_API_KEY", "wrong")
    write_keys(f'"http://other:1" = "k2"\n"{server.url}/v1" = "k1"\n')
    assert inspect(server.url).kind == "vLLM"
    assert key_of(parse("http://third:1"), {"KVCHAT_API_KEY": "k3"}) == "k3"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_file_that_others_can_read_is_refused(mode):
    file = write_keys('"http://h:1" = "geheim"', mode)
    with pytest.raises(UsageError) as refused:
        key_of(parse("http://h:1"), {})
    assert f"chmod 600 {file}" in refused.value.hint
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize("text", ['"http://h:1" = geheim', '"http://h:1" = 3', '"h" = "geheim"'])
def test_a_malformed_key_file_is_refused_without_showing_it(text):
    write_keys(text)
    with pytest.raises(UsageError) as refused:
        key_of(parse("http://h:1"), {})
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize("key", ["geheim\u2013", "ge\nheim", "ge\x00heim", "gehe\u200bim"])
@pytest.mark.parametrize("is_in_file", [True, False])
def test_an_unsendable_key_is_refused_without_showing_it(serve, monkeypatch, key, is_in_file):
    server = serve()
    if is_in_file:
        write_keys(f'"{server.url}" = {json.dumps(key)}')
    else:
        monkeypatch.setattr(servers, "key_of", partial(key_of, environ={"KVCHAT_API_KEY": key}))
    ((_, refused),) = asyncio.run(find([server.url]))
    assert isinstance(refused, UsageError)
    assert "cannot be sent" in refused.title
    assert not [part for part in ("geheim", "heim", "gehe", key) if part in str(refused)]
    assert not server.seen


def test_a_redirect_does_not_get_the_key(serve, monkeypatch):
    other, server = serve(), serve()
    monkeypatch.setenv("KVCHAT_API_KEY", "geheim")
    server.location = f"{other.url}/v1/models"
    server.routes["/v1/models"] = (307, "")
    with pytest.raises(UsageError, match="307"):
        inspect(server.url)
    assert other.seen == []


def test_usual_ports_are_searched_without_the_general_key(serve, monkeypatch):
    named, found, locked = serve(), serve(), serve()
    locked.key = "geheim"
    usual = (named.url, found.url, locked.url, "http://127.0.0.1:1")
    monkeypatch.setattr(servers, "USUAL", usual)
    monkeypatch.setenv("KVCHAT_API_KEY", "geheim")
    one, (address, refused) = asyncio.run(servers.find_usual([named.url]))
    assert (one.kind, one.address.root) == ("vLLM", found.url)
    assert (address, isinstance(refused, UsageError)) == (locked.url, True)
    assert not named.seen


def test_a_bad_server_does_not_hide_another(serve):
    good, bad = serve(), serve()
    bad.routes = {}
    found = asyncio.run(find([bad.url, "nonsense", good.url]))
    assert [isinstance(one, tuple) for one in found] == [True, True, False]
