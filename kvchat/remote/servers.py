"""Model servers: their addresses and keys, the program that answers, its models, and what it can do with K/V.

Each HTTP request takes at most ``PROBE_S``. Responses may have any form.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jinja2
import jinja2.meta
import tomli

from kvchat import files, paths
from kvchat.errors import EngineError, KvchatError, ModelError, UsageError, did_you_mean
from kvchat.paths import is_server
from kvchat.protocol.messages import RESERVED

PROBE_S = 2.0
MAX_SAID = 300  # characters of an unexpected response to show
KEY = "KVCHAT_API_KEY"
USUAL = tuple(f"http://127.0.0.1:{port}" for port in (8080, 9931, 8000, 30000, 11434, 1234))
"""The default addresses of llama-server (old and new), vLLM, SGLang, Ollama and LM Studio."""
LLAMA, VLLM, SGLANG, OLLAMA, LM_STUDIO = "llama-server", "vLLM", "SGLang", "Ollama", "LM Studio"
TRANSFORMERS, KVCHAT, OTHER = "transformers serve", "kvchat serve", "an OpenAI-compatible server"
OWNERS = {"llamacpp": LLAMA, "vllm": VLLM, "sglang": SGLANG, "kvchat": KVCHAT, "koboldcpp": "KoboldCpp"}
"""Programs by ``owned_by`` in their list of models. KoboldCpp also answers Ollama's requests."""
OFFERS = {
    LLAMA: "Started with -ctk q8_0 -ctv q8_0 it keeps K/V in 8 bits, with -nkvo in RAM; --cache-ram MIB keeps"
    " whole prompts there.",
    VLLM: "Started with --kv-cache-dtype fp8 it keeps K/V in 8 bits; --kv-offloading-size GIB keeps more in RAM.",
    SGLANG: "Started with --kv-cache-dtype fp8_e5m2 it keeps K/V in 8 bits; --enable-hierarchical-cache with"
    " --hicache-ratio keeps more in RAM.",
    OLLAMA: "Started with OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 it keeps K/V in 8 bits;"
    " OLLAMA_CONTEXT_LENGTH=N sets the context.",
    LM_STUDIO: "Its model settings choose the bits of the K/V and whether they stay on the GPU.",
    KVCHAT: "Its mode is chosen when it is started, by --mode and --budget.",
}
"""What each program can do with K/V, and the options for it."""


@dataclass(frozen=True)
class Address:
    """A server's address: ``base`` ends with ``/v1``, ``root`` does not; ``model`` is "" if the address names none."""

    root: str
    base: str
    model: str = ""

    @property
    def place(self) -> str:
        """Host and port, to show."""
        return urlsplit(self.root).netloc

    def name(self, model: str) -> str:
        return f"{self.root}#{model}"


@dataclass(frozen=True)
class Served:
    """A model on a server. Unknown ``context`` (in tokens), ``parameters`` and ``nbytes`` are 0, ``weights`` is "".

    ``template_variables`` are names that its chat template uses, if known.
    """

    id: str
    context: int = 0
    parameters: int = 0
    nbytes: int = 0
    weights: str = ""
    is_loaded: bool = False
    template_variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Server:
    """The program ``kind`` at an address, and its models, if it has any."""

    kind: str
    address: Address
    models: tuple[Served, ...]

    @property
    def offers(self) -> str:
        """What it can do with K/V, in sentences; "" if unknown."""
        return OFFERS.get(self.kind, "")

    def choose(self) -> Served:
        """Return the model that the address names, else one that is loaded, else the first.

        Raises:
            ModelError: there is none.
        """
        wanted = self.address.model
        if not wanted and self.models:
            return next((model for model in self.models if model.is_loaded), self.models[0])
        found = next((model for model in self.models if wanted in (model.id, model.id.rpartition("/")[2])), None)
        if found is None and wanted and self.kind == TRANSFORMERS:
            return Served(wanted)  # it loads any model on request
        if found is None:
            known, named = [model.id for model in self.models], f' "{wanted}"' if wanted else ""
            title = f"{self.address.place} has no model{named}."
            raise ModelError(title, did_you_mean(wanted, known) if known else "", "Load one there first.")
        return found


class NotReadyError(EngineError):
    """The server is still loading its model."""


def parse(text: str) -> Address:
    """Parse an address ``http://host:port[/v1[/chat/completions]][#model]``.

    Raises:
        UsageError: it is invalid, or contains a password, which process lists and conversations would show.
    """
    url, _, model = text.strip().partition("#")
    url = re.sub(r"/(models|(chat/)?completions)/?$", "", url)  # some servers print the whole URL
    try:
        parts = urlsplit(url)
        is_address = is_server(url) and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address or parts.query:
        raise UsageError(f'"{text[:100]}" is not the address of a server.', hint="Write it as http://127.0.0.1:8080.")
    if "@" in parts.netloc:
        raise UsageError("Others could see a password in the address.", hint=f"Put the key in {KEY}.")
    base = url.rstrip("/") if re.search(r"/v\d+/?$", parts.path) else f"{url.rstrip('/')}/v1"
    return Address(re.sub(r"/v\d+$", "", base), base, model)


def key_of(address: Address, environ: Mapping[str, str] = os.environ) -> str:
    """Return the key for a server from the keys file, else from the environment; "" without one.

    Raises:
        UsageError: others may read the file, it is not a list of keys, or the key cannot be sent; no error shows a key.
    """
    file = paths.server_keys_file()
    try:
        mode, text = stat.S_IMODE(file.stat().st_mode), files.decoded(files.read(file), file.name)
    except (FileNotFoundError, NotADirectoryError):
        mode, text = 0, ""
    except OSError as error:
        raise files.unreadable(str(file), error) from None
    if mode & 0o077:
        raise UsageError(f"{file} can be read by others.", f"Its mode is {mode:04o}.", f"Run: chmod 600 {file}")
    try:
        keys = {parse(name).root: key for name, key in files.toml(text).items()}
    except tomli.TOMLDecodeError as error:
        raise UsageError(f"{file} is not a list of keys.", f"Line {error.lineno}: {error.msg}.", EXAMPLE) from None
    key = keys.get(address.root, environ.get(KEY, ""))
    if not isinstance(key, str):
        raise UsageError(f"The key of {address.root} in {file} is not text.", hint=EXAMPLE)
    key = key.strip()  # a newline may have been copied with it
    if not (key.isascii() and key.isprintable()):  # otherwise libraries would show the header in their error
        raise UsageError(
            f"The key of {address.root} cannot be sent.",
            "It has characters that are not printable ASCII.",
            f"Copy it again, into {KEY} or {file}.",
        )
    return key


OF_PROGRAMS = {"strftime_now", "raise_exception", "tools"}  # passed to every template by the programs that render it
EXAMPLE = 'Write a line "http://127.0.0.1:8080" = "KEY" for each server.'


def client(address: Address, key: str | None = None) -> httpx2.AsyncClient:
    """Return a client that sends ``key``, by default ``key_of``, and never to a redirected address.

    Raises:
        UsageError: the same as ``key_of``.
    """
    key = key_of(address) if key is None else key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.AsyncClient(headers=headers, timeout=PROBE_S)


async def recognize(address: Address, http: httpx2.AsyncClient) -> Server:
    """Find out which program answers at an address, and its models.

    Raises:
        NotReadyError: it is loading its model; EngineError: nothing answers; UsageError: it requires a key, or its list
            of models does not follow OpenAI's API.
    """
    listed = await _listed(address, http)
    kind = next((OWNERS[owner] for entry in listed if (owner := entry.get("owned_by")) in OWNERS), "")
    if kind == LLAMA:
        return Server(kind, address, _of_llama(listed, await _get(http, f"{address.root}/props")))
    if kind:
        return Server(kind, address, tuple(map(_model, listed)))
    info, version, running, studio, health = await asyncio.gather(
        *(_get(http, f"{address.root}/{path}") for path in ("model_info", "api/version", "api/ps", "api/v0/models")),
        _get(http, f"{address.root}/health"),
    )
    if info.get("model_path"):
        return Server(SGLANG, address, tuple(map(_model, listed)))
    if version.get("version"):
        return Server(OLLAMA, address, _of_ollama(listed, running))
    if studio.get("data") or (await _get(http, f"{address.root}/api/v1/models")).get("models"):
        return Server(LM_STUDIO, address, _of_lm_studio(listed, studio))
    names_owners = all("owned_by" in entry for entry in listed)  # mlx_lm.server, whose health is the same, does not
    kind = TRANSFORMERS if health == {"status": "ok"} and names_owners else OTHER
    return Server(kind, address, tuple(map(_model, listed)))


Found = Server | tuple[str, KvchatError]


async def find(addresses: Iterable[str]) -> list[Found]:
    """Return the server at each address, or the address and the error."""
    return list(await asyncio.gather(*map(_probe, addresses)))


async def find_usual(others: Iterable[str]) -> list[Found]:
    """Return the servers at ``USUAL`` addresses other than ``others``; the environment's key is not sent to them."""
    found = await asyncio.gather(*(_probe(text, is_named=False) for text in USUAL if text not in others))
    return [each for each in found if isinstance(each, Server) or not isinstance(each[1], EngineError)]


async def _probe(text: str, is_named: bool = True) -> Found:
    try:
        address = parse(text)
        async with client(address, None if is_named else key_of(address, {})) as http:
            return await recognize(address, http)
    except KvchatError as error:
        return text, error


async def _listed(address: Address, http: httpx2.AsyncClient) -> list[dict[str, Any]]:
    """Return the entries of the server's list of models that have an id."""
    try:
        reply = await http.get(f"{address.base}/models")
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        raise unreachable(address, error) from None
    if reply.status_code in (401, 403):
        raise key_refused(address, said(reply))
    if reply.status_code == 503:
        raise NotReadyError(f"{address.place} is not ready.", said(reply), "Wait until its model has loaded.")
    body = _json(reply) if reply.is_success else {}
    entries = body.get("data")
    if entries is None and body.get("object") == "list":
        entries = []  # Ollama without models
    if not isinstance(entries, list):
        raise UsageError(
            f"{address.root} is not a model server.",
            f"{address.base}/models returned {reply.status_code}: {said(reply) or 'nothing'}",
            "Use the address of an OpenAI-compatible server, such as http://127.0.0.1:8080.",
        )
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


async def _get(http: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    """Return the JSON object at a URL, or {}."""
    try:
        reply = await http.get(url)
    except httpx2.HTTPError:
        return {}
    return _json(reply) if reply.is_success else {}


def _json(reply: httpx2.Response) -> dict[str, Any]:
    try:
        body = reply.json()
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _model(entry: Mapping[str, Any]) -> Served:
    meta = entry.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    context = whole(entry.get("max_model_len")) or whole(meta.get("n_ctx"))
    own = entry.get("kvchat")
    names = own.get("template_variables") if isinstance(own, dict) else None
    return Served(
        entry["id"],
        context,
        whole(meta.get("n_params")),
        whole(meta.get("size")),
        str(meta.get("ftype") or ""),
        template_variables=tuple(map(str, names)) if isinstance(names, list) else (),
    )


def _of_llama(listed: list[dict[str, Any]], props: Mapping[str, Any]) -> tuple[Served, ...]:
    """Return the models with the context of one slot, because the slots share the context in the list."""
    settings = props.get("default_generation_settings")
    of_slot = whole(settings.get("n_ctx")) if isinstance(settings, dict) and len(listed) == 1 else 0
    names = variables(props.get("chat_template")) if of_slot else ()
    return tuple(
        replace(model, context=of_slot or model.context, is_loaded=bool(of_slot), template_variables=names)
        for model in map(_model, listed)
    )


def variables(template: Any) -> tuple[str, ...]:
    """Return the variables that a chat template uses, without those that every template gets; it is not rendered."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(template if isinstance(template, str) else "")
    except (jinja2.TemplateError, RecursionError):
        return ()
    known = jinja2.meta.find_undeclared_variables(parsed) - RESERVED - OF_PROGRAMS - environment.globals.keys()
    return tuple(sorted(name for name in known if not name.endswith("_token")))


def _of_ollama(listed: list[dict[str, Any]], running: Mapping[str, Any]) -> tuple[Served, ...]:
    loaded = _by_id(running.get("models"), "name")
    facts = [(entry["id"], loaded.get(entry["id"], {})) for entry in listed]
    return tuple(
        Served(id, whole(fact.get("context_length")), nbytes=whole(fact.get("size")), is_loaded=id in loaded)
        for id, fact in facts
    )


def _of_lm_studio(listed: list[dict[str, Any]], studio: Mapping[str, Any]) -> tuple[Served, ...]:
    known = _by_id(studio.get("data"), "id")
    facts = [(entry["id"], known.get(entry["id"], {})) for entry in listed]
    return tuple(
        Served(
            id,
            whole(fact.get("loaded_context_length")) or whole(fact.get("max_context_length")),
            weights=str(fact.get("quantization") or ""),
            is_loaded=fact.get("state") == "loaded",
        )
        for id, fact in facts
        if fact.get("type") != "embeddings"
    )


def _by_id(entries: Any, name: str) -> dict[str, dict[str, Any]]:
    listed = entries if isinstance(entries, list) else []
    return {entry[name]: entry for entry in listed if isinstance(entry, dict) and isinstance(entry.get(name), str)}


def whole(value: Any) -> int:
    """Return a server's number as a count, or 0 for anything else."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**63 else 0


def said(reply: httpx2.Response) -> str:
    """Return the message of an error response, in any server's form."""
    return words_of(_json(reply)) or " ".join(reply.text.split())[:MAX_SAID]


def words_of(body: Any) -> str:
    """Return the message in the body of an error response, or ""."""
    while isinstance(body, dict):
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), "")
    return str(body)[:MAX_SAID] if body else ""


def unreachable(address: Address, error: Exception) -> EngineError:
    return EngineError(
        f"No server answers at {address.root}.",
        f"{str(error)[:MAX_SAID] or type(error).__name__}.",
        "Start it, or use another address.",
    )


def key_refused(address: Address, words: str) -> UsageError:
    """Return the error for a missing or wrong key."""
    file = paths.server_keys_file()
    return UsageError(
        f"{address.root} needs a valid key.",
        words,
        f'Put it in {KEY}, or as "{address.root}" = "KEY" in {file} with mode 0600, and restart kvchat.',
    )
