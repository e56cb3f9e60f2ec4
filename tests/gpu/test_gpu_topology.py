"""One endpoint over TileRT and native vLLM decode: bench/gpu/topology.py, and that its configuration stays valid."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdhub import registry
from pdhub.config.build import load_plan
from pdhub.operate.tree import stages

BENCH = Path(__file__).parents[2] / "bench" / "gpu"

DUMP = """
import json, random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import mixed, shapes, topology, yaml
out = Path(sys.argv[2])
model = shapes.narrow(out / "model")
(out / "topology.yaml").write_text(yaml.safe_dump(topology.document(model, (0, 1))))
python = topology.seeing(1, sys.executable, out / "python-on-gpu-1")
(out / "hosted.yaml").write_text(yaml.safe_dump(topology.hosted(topology.document(model, (0, 1)), python)))
print(json.dumps([[a.pool, a.path, a.stream, a.length, a.headers] for a in mixed.asks(100, random.Random(3))]))
"""


@pytest.fixture
def dumped(tmp_path):
    """The directory with the configuration, and the requests."""
    if not {"tilert", "vllm"} <= set(registry.load().names("engine")):
        pytest.skip("pdhub-vllm and pdhub-tilert are not installed")
    done = subprocess.run(
        [sys.executable, "-c", DUMP, str(BENCH), str(tmp_path)], capture_output=True, text=True, check=True
    )
    return tmp_path, json.loads(done.stdout)


def started(path):
    """Processes of prefill, TileRT and native decode, and prefill's connectors."""
    nodes, _ = stages(load_plan(path))
    prefill, tilert, native = (member.process for member in nodes)
    transfer = json.loads(prefill.argv[prefill.argv.index("--kv-transfer-config") + 1])
    return prefill, tilert, native, transfer["kv_connector_extra_config"]["connectors"]


def test_its_configuration_starts_the_stock_servers(dumped):
    directory, _ = dumped
    prefill, tilert, native, children = started(directory / "topology.yaml")
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "TileRTConnector"]
    assert prefill.env["TILERT_PD_SENDERS"] == tilert.env["TILERT_PD_SENDERS"] == "1"
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in (prefill, tilert, native)] == ["0", "1", "1"]
    assert "tilert.pd_vllm.decode_server" in tilert.argv
    assert '"kv_consumer"' in " ".join(native.argv)


def test_its_configuration_starts_a_hosted_node(dumped):
    directory, _ = dumped
    _, tilert, native, children = started(directory / "hosted.yaml")
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "PDHubConnector"]
    written = children[1]["kv_connector_extra_config"]
    assert (written["form"], written["shards"], written["verify"]) == ("planes", 1, True)
    done = subprocess.run(
        [tilert.argv[0], "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"], capture_output=True, text=True
    )
    assert done.stdout == "1\n"
    assert "node" in tilert.argv
    assert '"kv_consumer"' in " ".join(native.argv)


def test_its_requests_are_mixed(dumped):
    _, asks = dumped
    for pool in ("tilert", "vllm"):
        mine = [ask for ask in asks if ask[0] == pool]
        assert len(mine) == 100
        assert len({(path, stream) for _, path, stream, _, _ in mine}) == 4
        assert all(("10" in headers.values()) == (pool == "tilert") for *_, headers in mine)
    assert len({ask[0] for ask in asks[:20]}) == 2


@pytest.mark.gpu
@pytest.mark.timeout(700)
@pytest.mark.parametrize("more", [[], ["--hosted"]], ids=["stock", "hosted"])
def test_a_hundred_of_each_are_right(tmp_path, more):
    torch = pytest.importorskip("torch")
    site = os.environ.get("PDHUB_GPU_SITE")
    if site is None or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and PDHUB_GPU_SITE: where bench/gpu/unpack.sh has put the bundle")
    argv = [sys.executable, str(BENCH / "topology.py"), "--site", site, "--out", str(tmp_path), *more]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
