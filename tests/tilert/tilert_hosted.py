"""``pdhub`` with TileRT's stub engine replaced by the one that answers from its KV (tilert_server.py), at a pace."""

import os
import sys

from tilert.pd_vllm import engine_iface
from tilert_server import _kv_engine

from pdhub.cli import main

if __name__ == "__main__":
    engine = _kv_engine(float(os.environ.get("KV_ENGINE_PACE_S", "0")))
    engine_iface.StubEngine = lambda: engine
    sys.exit(main())
