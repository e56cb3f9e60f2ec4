"""The hosted node's tests need torch, which TileRT brings along; the others do without."""

from importlib import util

collect_ignore = [] if util.find_spec("torch") else ["test_tilert_runtime.py"]
