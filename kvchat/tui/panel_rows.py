"""The rows of the panels: labels and values of a snapshot, and what each label means. Unknown values have no row."""

from __future__ import annotations

from kvchat.config.modes import REFERENCE, next_mode, registered
from kvchat.protocol.figures import RIBBON, Gpu, Params, ServerFigures, Snapshot
from kvchat.tui.state import describe_price, percentiles
from kvchat.units import count, figure, percent, size

Rows = list[tuple[str, str]]
READ_BY_HEAD, HELD_BY_HEAD = "read by layer and head", "on the device by layer and head"
FETCH_TIMES, GPU_HISTORY, READ_OF_STORED = "fetch times", "GPU history", "tokens read and stored"
EVENTS = "events"

FIGURES = {
    "at a glance": {
        "memory used": "by the model and the conversation: GPU memory in use, or without a GPU the engine's RAM",
        "context used": "stored tokens, as a share of what the model can attend to",
    },
    "this answer": {
        "reads": "stored tokens that the last token read, on average over layers and KV heads: more than the"
        " budget where some layers read everything; less than everything in full mode where some have a sliding"
        " window; a prompt reads everything in every mode",
        "attention covered": "share of the model's attention to everything stored that falls on the tokens"
        " read: sampled in one layer from time to time, averaged over all layers",
        "over the budget": "tokens read beyond it: some modes read everything in their first layer or allow slack",
        "on the device": "K/V in the GPU's memory, of all stored; the rest is fetched when chosen",
        "copied to read": "K/V that this mode copies into one place to read; full mode reads the stored K/V directly",
        "less than full": "what full mode would hold on the device beyond what this mode holds now",
        "fetched per token": "copied from RAM to the GPU for one token, and the median time",
        "reduced context": "tokens computed while reading less than everything; /rebuild recomputes them exactly",
    },
    "mode": {
        READ_OF_STORED: "over time, from the first token at the left to the newest: solid is what a token read,"
        " shaded what was stored then; ▾ where the mode changed",
        "budget": "tokens a token may read in a KV head that the mode chooses for; in their first layers, or"
        " in some heads, some modes read everything",
        "parameters": "/settings lists and changes the parameters of all modes",
        "next mode": "the mode that the next-mode key switches to",
        "to switch": "what switching copies from RAM to the GPU, and about how long it takes",
        "pinned": "tokens every mode reads: pinned messages and system prompt; how many exceed the budget",
        "recurrent state": "memory of layers that keep a fixed-size state instead of K/V, and of its copies",
        "recovery": "what was done when the text's entropy went wrong: SR and WR bring tokens back, FR reads"
        " more for a while, RR undoes the last words; calm: nothing",
    },
    "fetching": {
        "total": "fetched since the model was loaded, comparisons not counted",
        "hit rate": "share of the choice that was already on the device",
        "corrections": "choices replaced before attention because the query had turned, since the model was loaded",
        "time p50 / p95": "time to fetch for one token: the median and the 95th percentile",
        "fetch rate": "bytes fetched per second, and the share of the link's rate where that was"
        " measured (kvchat bench decode --save-profile)",
        "waited for": "the part of that time the model waited (exposed); the rest was hidden behind its work",
    },
    "memory": {
        "no GPU": "the engine computes on the CPU",
        "GPU": "its name",
        "used": "memory in use on the GPU, by all programs; read by NVML",
        "this process": "memory of the engine: on a GPU by NVML, else from the system",
        "load": "use of the GPU, its temperature and power; read by NVML",
        "torch": "GPU memory allocated by torch, of what it has reserved",
        "weights": "memory of the model's weights",
        "parked": "the K/V of other conversations, kept in RAM until they are reopened",
        "K/V in RAM": "the K/V of all tokens, always complete: leaving the device loses nothing",
    },
    "of a server": {
        "decided by": "the server's program: it does not report what K/V it keeps and reads, and no mode changes that",
        "at": "the server's host and port",
        "not read again": "tokens of the last prompt that the server already had, out of the whole prompt",
        "prompt read at": "new prompt tokens per second on the server",
        "server's K/V": "K/V memory in use on the server, for all its users, as are the rows below",
        "server's hits": "prompt tokens already stored, as a share and a number, since its start",
        "K/V in its RAM": "K/V memory in use in the server's RAM",
        "RAM hits": "prompt tokens whose K/V came back from RAM",
        "loaded from RAM": "K/V copied from RAM since its start",
        "copied to RAM": "K/V copied to RAM since its start",
        "server writes": "tokens per second, for all its users",
        "server's queue": "requests being answered, and waiting",
        "drafts accepted": "share of the server's drafted tokens that were accepted",
        "others": "why the server reports no other figures",
    },
    "details": {
        READ_BY_HEAD: "a column per layer, a row per KV head: a full block reads everything stored, each"
        " step down half as much",
        HELD_BY_HEAD: "the same for tokens whose K/V are in slots; on a CPU, those the mode copied to read",
        FETCH_TIMES: "the last 256 tokens that needed fetching, by the time it took: hidden behind the"
        " model's work, or waited for; a CPU hides nothing",
        GPU_HISTORY: "memory in use, load, power and PCIe traffic both ways, a bar per second, by NVML; a full bar is"
        " all the memory, 100 %, and the most power or traffic shown",
        EVENTS: "the latest, newest first: what was loaded, read, answered, switched, and what went wrong",
    },
}
"""What each label means, by its panel; modes explain their own figures."""
EXPLANATIONS = {label: text for rows in FIGURES.values() for label, text in rows.items()}

# On a CPU there is no device: a mode reads K/V where they are stored, or copies them first.
WITHOUT_GPU = {"D": "ready to read", "R": "copied just now", "H": "stored only"}


def state_words(on_gpu: bool) -> dict[str, str]:
    return RIBBON if on_gpu else RIBBON | WITHOUT_GPU


def blocks(s: Snapshot, link_bytes_per_s: float | None = None) -> dict[str, tuple[str, Rows]]:
    """Return title and rows of each panel, by its name; a server has others, and uses no memory on this machine."""
    if s.server is not None:
        return {
            "context": ("this answer", answer_rows(s, s.server)),
            "mode": ("server", [("decided by", s.server.kind), ("at", s.server.place)]),
            "recall": ("the server, for all its users", server_rows(s.server)),
            "memory": ("memory", []),
        }
    return {
        "context": ("this answer", context_rows(s)),
        "mode": (s.mode, mode_rows(s)),
        "recall": ("fetching", recall_rows(s, link_bytes_per_s)),
        "memory": ("memory", memory_rows(s)),
    }


def answer_rows(s: Snapshot, server: ServerFigures) -> Rows:
    """Return rows for the context and the tokens that a server reused in the conversation's last answer."""
    rows = [_used(s)]
    if not s.total:
        return rows
    if server.reused_tokens is not None and server.prompt_tokens:
        share = percent(server.reused_tokens / server.prompt_tokens)
        rows.append(("not read again", f"{count(server.reused_tokens)} of {count(server.prompt_tokens)} · {share}"))
    if server.prompt_tokens_per_s is not None:
        rows.append(("prompt read at", figure(server.prompt_tokens_per_s, "tok/s")))
    return rows


def server_rows(f: ServerFigures) -> Rows:
    """Return rows for the figures that a server reports."""
    rows = [("server's K/V", _of_room(f.used_share, f.capacity))] if (f.used_share, f.capacity) != (None, None) else []
    if f.prefix_share is not None or f.prefix_tokens is not None:
        known = (percent(f.prefix_share) if f.prefix_share is not None else "", _tokens(f.prefix_tokens))
        rows.append(("server's hits", " · ".join(filter(None, known))))
    rows += [("K/V in its RAM", _of_room(f.host_share, f.host_capacity))] if f.host_share is not None else []
    rows += [("RAM hits", _tokens(f.host_tokens))] if f.host_tokens is not None else []
    rows += [("loaded from RAM", size(f.host_loaded_bytes))] if f.host_loaded_bytes is not None else []
    rows += [("copied to RAM", size(f.host_stored_bytes))] if f.host_stored_bytes is not None else []
    rows += [("server writes", figure(f.tokens_per_s, "tok/s", 1))] if f.tokens_per_s is not None else []
    if f.running is not None:
        rows.append(("server's queue", f"{count(f.running)} now, {count(f.waiting or 0)} waiting"))
    rows += [("drafts accepted", percent(f.drafts_share))] if f.drafts_share is not None else []
    return [*rows, ("others", f.missing)] if f.missing else rows


def _of_room(share: float | None, room: int | None) -> str:
    """Return a share of a capacity, such as ``12 % of 65,536 tok``."""
    if share is None:
        return f"room for {_tokens(room)}"
    return " of ".join(filter(None, (percent(share), _tokens(room))))


def _tokens(number: int | None) -> str:
    return f"{count(number)} tok" if number is not None else ""


def plain_rows(s: Snapshot) -> Rows:
    """Return rows for the four figures that are shown at first."""
    if s.server is not None:
        return [*answer_rows(s, s.server)[:2], *server_rows(s.server)[:2]]
    read = _read(s) if s.total else "nothing yet"
    unmeasured = "all" if s.active >= s.total > 0 else "not measured"
    used = s.gpu.used if s.gpu else s.process_bytes
    return [
        ("reads", read),
        ("attention covered", unmeasured if s.coverage is None else percent(s.coverage)),
        ("memory used", size(used)),
        _used(s),
    ]


def _used(s: Snapshot) -> tuple[str, str]:
    used = f"{percent(s.total / s.context)} of {count(s.context)}" if s.context else _tokens(s.total)
    return "context used", used


def _read(s: Snapshot) -> str:
    share = "prompt" if s.is_prompt else percent(s.active / s.total)
    return f"{count(s.active)} of {count(s.total)} · {share}"


def mode_rows(s: Snapshot) -> Rows:
    """Return rows for the mode's budget, its parameters, and the cost of switching to the next mode."""
    budget = s.params.get("budget")
    limit = [("budget", f"{count(budget)} tokens a head")] if isinstance(budget, int) else []
    rows, after = [*limit, ("parameters", "in /settings")], next_mode(s.mode)
    if (price := next((price for price in s.prices if price.mode == after), None)) is None:
        return rows
    moving = describe_price(price) if price.moved_bytes or price.refusal else "nothing"
    return [*rows, ("next mode", after), ("to switch", moving if price.refusal else f"moves {moving}")]


def context_rows(s: Snapshot) -> Rows:
    """Return rows for the tokens that the last step read, the K/V on the device and the bytes fetched."""
    if not s.total:
        return [("reads", "nothing stored yet")]
    rows = [("reads", _read(s))]
    rows += [("attention covered", percent(s.coverage))] if s.coverage is not None else []
    budget = s.params.get("budget")
    if isinstance(budget, int) and s.active > budget + 0.5:
        rows.append(("over the budget", f"{count(s.active - budget)} tok"))
    if has_gpu(s):
        rows.append(("on the device", f"{size(s.kv_device_bytes)} of {size(s.kv_host_bytes)}"))
        rows += [("less than full", size(saved))] if (saved := saved_bytes(s)) > 0 else []
    else:
        rows.append(("copied to read", size(s.kv_device_bytes) if s.kv_device_bytes else "nothing"))
    took = f" · {figure(s.recall_ms_p50, 'ms', 1)}" if s.recall_ms_p50 is not None else ""
    rows.append(("fetched per token", f"{size(s.step_bytes)}{took}" if s.step_bytes else "nothing"))
    rows.append(_used(s))
    return [*rows, ("reduced context", f"{count(s.reduced_tokens)} tok")] if s.reduced_tokens else rows


def saved_bytes(s: Snapshot) -> int:
    """Return the bytes that full mode would hold on the device beyond those held now; 0 if unknown."""
    of_full = (price for price in s.prices if price.mode == REFERENCE)
    full = next((price.device_bytes for price in of_full if not price.refusal), 0)
    return max(full - s.kv_device_bytes, 0)


def recall_rows(s: Snapshot, link_bytes_per_s: float | None = None) -> Rows:
    """Return rows for recall from RAM to the GPU; its rate also as a share of the link's measured rate."""
    rows = [("total", size(s.recalled_bytes) if s.recalled_bytes else "nothing yet")]
    rows += [("hit rate", percent(s.recall_hit_rate))] if s.recall_hit_rate is not None else []
    if s.corrections:  # only one mode corrects
        rows.append(("corrections", count(s.corrections)))
    return rows + recall_times(s, link_bytes_per_s)


def recall_times(s: Snapshot, link_bytes_per_s: float | None = None) -> Rows:
    """Return rows for the time per token that recall took and that the model waited (p50, p95), and for its rate."""
    times = percentiles(s.recall_ms_p50, s.recall_ms_p95)
    rows = [("time p50 / p95", times)] if s.recall_ms_p95 is not None else []
    if s.recall_bytes_per_s is not None:
        share = f" · {percent(s.recall_bytes_per_s / link_bytes_per_s)}" if link_bytes_per_s else ""
        rows.append(("fetch rate", figure(s.recall_bytes_per_s / 1e9, "GB/s", 1) + share))
    if s.exposed_ms_p95 not in (None, s.recall_ms_p95):  # without a GPU nothing is hidden
        rows.append(("waited for", percentiles(s.exposed_ms_p50, s.exposed_ms_p95)))
    return rows


def memory_rows(s: Snapshot) -> Rows:
    """Return rows for the memory of the GPU (by NVML), of torch and of kvchat."""
    own = [("weights", size(s.weight_bytes)), ("K/V in RAM", size(s.kv_host_bytes))]
    if s.kv_parked_bytes:
        own.append(("parked", size(s.kv_parked_bytes)))
    for device, nbytes in s.elsewhere.items():
        gpu = s.other_gpus.get(device)
        used = f"{size(gpu.used)} / {size(gpu.total)}, " if gpu and gpu.used is not None else ""
        own.append((device, f"{used}weights {size(nbytes)}"))
    if not has_gpu(s):
        process = [("this process", size(s.process_bytes))] if s.process_bytes is not None else []
        return [("no GPU", "all K/V are in RAM"), *process, *own]
    if s.torch_allocated is not None:
        own.insert(0, ("torch", f"{size(s.torch_allocated)} of {size(s.torch_reserved)}"))
    return [*(gpu_rows(s.gpu) if s.gpu else [("GPU", "not read: no NVML")]), *own]


def has_gpu(s: Snapshot) -> bool:
    """Return whether the engine runs on a GPU."""
    return s.gpu is not None or s.torch_allocated is not None


def gpu_rows(gpu: Gpu) -> Rows:
    """Return rows for what NVML reports; some drivers do not report everything."""
    vitals = ((gpu.utilization, "%"), (gpu.temperature, "°C"), (gpu.power, "W"))
    load = " · ".join(figure(value, unit) for value, unit in vitals if value is not None)
    rows = [
        ("GPU", gpu.name),
        ("used", "" if gpu.used is None else f"{size(gpu.used)} / {size(gpu.total)}"),
        ("this process", "" if gpu.process is None else size(gpu.process)),
        ("load", load),
    ]
    return [(label, value) for label, value in rows if value]


def explain(label: str, mode: str) -> str:
    """Return the meaning of a row in ``mode``; empty if unknown, as for some modes of other packages."""
    own = registered()[mode].figures if mode in registered() else {}
    return own.get(label) or EXPLANATIONS.get(label, "")


def extra_rows(extras: Params) -> Rows:
    """Return rows for the current mode's own figures."""
    return [(name, _value(value)) for name, value in extras.items() if value is not None]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return str(value)
