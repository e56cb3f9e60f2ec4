"""``pdhub quickstart``: a small real model behind two decode pools, and a table of where each request went and why."""

from pdhub.operate.quickstart.main import run
from pdhub.operate.quickstart.options import Options

__all__ = ["Options", "run"]
