"""The application's process never loads the model libraries."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_application_loads_no_torch():
    check = "import sys, kvchat.tui.app; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
