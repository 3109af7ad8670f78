"""Changes to a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
