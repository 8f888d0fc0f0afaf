"""`tests/support/pretrained_folder.py` for scripts outside of pytest: they import this path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from pretrained_folder import *  # noqa: F403
