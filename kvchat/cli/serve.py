"""``kvchat serve``: the engine for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvchat import libraries, paths
from kvchat.cli.chat import is_asked_for, keeping, load_of
from kvchat.cli.output import note, progress
from kvchat.config.sources import Resolved
from kvchat.kv.memory import available
from kvchat.models import checkpoint

FREE_SHARE = 4  # a quarter of free RAM is for conversations other than the current one


def serve(resolved: Resolved, host: str, port: int, key: str, origins: Sequence[str], queue: int) -> None:
    """Serve the model of the settings until Ctrl+C.

    Raises:
        UsageError: a package is missing, or the address or the model cannot be used.
        EngineError: the engine ended while it loaded the model.
    """
    libraries.require("serve", "kvchat serve")
    from kvchat.serve import server
    from kvchat.serve.requests import Defaults

    chosen = resolved.settings
    checkpoint.locate(chosen.model.name, progress)  # refuses a wrong name before an address is printed
    is_kept = chosen.ui.conversations and is_asked_for(resolved, ("ui", "conversations"))
    kept = keeping(chosen, is_kept, paths.served_kv_dir())
    if ("kv", "parked_gib") not in resolved.origins:  # clients request titles between the turns of a long chat
        kept = replace(kept, parked_bytes=max(kept.parked_bytes, available.host_free() // FREE_SHARE))
    load = replace(load_of(chosen), keeping=kept)
    is_limited = ("sampling", "max_new_tokens") in resolved.origins
    defaults = Defaults(chosen.sampling.sampling(), is_limited, chosen.model.system)
    server.serve(load, defaults, (host, port), queue, key.strip(), origins, paths.log_file(), progress, note)
