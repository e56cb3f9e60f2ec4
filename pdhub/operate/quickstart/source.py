"""Where the quickstart's configuration is: in the wheel, or in the repository of an editable installation."""

from __future__ import annotations

from pathlib import Path

import pdhub
from pdhub.api import ConfigError


def config_file() -> Path:
    """``configs/quickstart.yaml``, the same file in both places. Raises ConfigError if the installation lost it."""
    package = Path(pdhub.__file__).parent
    for path in (package / "operate" / "quickstart.yaml", package.parent / "configs" / "quickstart.yaml"):
        if path.is_file():
            return path
    raise ConfigError("this installation has no quickstart.yaml", hint="pip install --force-reinstall pdhub")
