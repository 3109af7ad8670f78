"""``kvchat`` as a program whose server uses the fake engine."""

import sys
from pathlib import Path

from kvchat.cli.main import main
from kvchat.serve import app, server

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")

if __name__ == "__main__":
    server.ENGINE = (sys.executable, str(FAKE_ENGINE))
    app.PING_S = 0.3
    main()
