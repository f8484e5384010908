"""Where Palestra keeps what it made once and needs again: converted models, the backends' environments."""

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("PALESTRA_CACHE") or Path.home() / ".cache" / "palestra")
