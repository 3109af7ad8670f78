"""``kvchat doctor``: prints what it finds on this machine, problems, and how to fix them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

from kvchat.doctor import installation, machine, servers
from kvchat.doctor.installation import Check
from kvchat.foreign_text import visible

GLYPHS = {"ok": "✓", "warning": "!", "problem": "✗"}


def doctor(as_json: bool) -> int:
    """Check everything and print each line as soon as it is known; return 1 if a problem keeps kvchat from running."""
    found = []
    for check in checks():
        found.append(check)
        if not as_json:
            advice = f"\n{'':<25}→ {check.advice}" if check.advice else ""
            line = f"{GLYPHS[check.state]} {check.state:<8} {check.name:<13} {check.found}{advice}\n"
            sys.stdout.write(visible(line))
            sys.stdout.flush()
    usable = all(check.state != "problem" for check in found)
    if as_json:
        sys.stdout.write(json.dumps({"usable": usable, "checks": [dataclasses.asdict(c) for c in found]}) + "\n")
    else:
        count = {state: sum(check.state == state for check in found) for state in GLYPHS}
        more = f"; warnings: {count['warning']}" if count["warning"] else ""
        problems = f"kvchat cannot run. Problems to fix: {count['problem']}."
        sys.stdout.write(f"\n{f'kvchat can run{more}.' if usable else problems}\n")
    return 0 if usable else 1


def checks() -> Iterator[Check]:
    settings, device = installation.settings()
    yield from installation.library_checks(device)
    torch = installation.imported("torch")
    yield from machine.gpu_checks(device, torch, has_triton=installation.imported("triton") is not None)
    yield from machine.checks(torch.get_num_threads() if torch else None)
    yield settings
    yield from installation.checks(device)
    yield from servers.checks()
