"""What `pdhub doctor` finds at vLLM servers: scripted ones that speak vLLM's HTTP, and made-up /proc and /sys."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pdhub_vllm import operate_devices
from pdhub_vllm.config import VLLMConfig
from pdhub_vllm.operate import VLLMOperate

from pdhub.api import Finding, NodeSpec, Severity, Topology

METRICS = """\
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",gpu_memory_utilization="0.9"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 0.0
"""


class Server:
    """A vLLM server as far as doctor looks."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [{"id": "m", "root": "/models/m"}]
        self.version = "0.33.0"
        self.metrics = METRICS
        self.tokens: Callable[[dict[str, Any]], list[int] | None] = lambda body: list(json.dumps(body).encode())
        self.scale_out = True
        self.server_info: dict[str, Any] | None = None
        self.params: dict[str, Any] | None = None
        self.query: dict[str, Any] | None = None
        self.key: str | None = None
        self.moved = ""
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(*outer.answer(self, {}))

            def do_POST(self) -> None:
                size = int(self.headers.get("content-length", 0))
                self._say(*outer.answer(self, json.loads(self.rfile.read(size) or b"{}")))

            def _say(self, status: int, body: str) -> None:
                self.send_response(302 if outer.moved else status)
                if outer.moved:
                    self.send_header("location", outer.moved)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> tuple[int, str]:
        path = request.path
        self.asked.append(path)
        if self.key and path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {self.key}":
            return 401, json.dumps({"error": "Unauthorized"})
        documents: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": self.models},
            "/version": {"version": self.version},
            "/v1/completions": {"choices": [], "kv_transfer_params": self.params},
            "/query": self.query,
            "/server_info?config_format=json": self.server_info,
        }
        if path == "/metrics":
            return 200, self.metrics
        if path == "/inference/v1/generate":
            return (422 if self.scale_out else 403), "{}"
        if path == "/tokenize":
            body.pop("model")
            tokens = self.tokens(body)
            return (200, json.dumps({"tokens": tokens})) if tokens is not None else (400, "{}")
        document = documents.get(path)
        return (404, "{}") if document is None else (200, json.dumps(document))


@pytest.fixture
def servers() -> Iterator[Callable[[], Server]]:
    made: list[Server] = []

    def make() -> Server:
        made.append(Server())
        return made[-1]

    yield make
    for server in made:
        server.close()


class Pair:
    """A prefill instance and a node that are well, until a test spoils them."""

    def __init__(self, prefill: Server, decode: Server, **options: Any) -> None:
        self.prefill, self.decode = prefill, decode
        self.options = options
        prefill.params = {
            "do_remote_prefill": True, "remote_engine_id": "e", "remote_host": "127.0.0.1",
            "remote_port": prefill.port, "tp_size": 1, "transfer_mode": "pull",
        }  # fmt: skip

    def nodes(self) -> tuple[NodeSpec, NodeSpec]:
        config = VLLMConfig.model_validate(self.options).model_dump()
        prefill = NodeSpec(
            "p", "prefill", None, f"http://127.0.0.1:{self.prefill.port}", "vllm", config, port=self.prefill.port,
            serves=("x",),
        )  # fmt: skip
        url, config = f"http://127.0.0.1:{self.decode.port}", {**config, "slots": 3}
        decode = NodeSpec("d", "decode", "x", url, "vllm", config, port=self.decode.port)
        return prefill, decode

    def findings(self, *nodes: NodeSpec) -> list[Finding]:
        """Of both sides, as doctor asks: each set of options by itself."""
        nodes = nodes or self.nodes()
        whole = Topology("m", None, nodes, "shm")
        return [f for n in nodes for f in VLLMOperate(VLLMConfig.model_validate(dict(n.config))).checks(whole)]

    def worst(self, *nodes: NodeSpec) -> list[str]:
        return [f"{f.where}: {f.message}" for f in self.findings(*nodes) if f.severity is not Severity.INFO]


@pytest.fixture
def pair(servers: Callable[[], Server]) -> Pair:
    return Pair(servers(), servers())


def test_nothing_is_wrong(pair: Pair) -> None:
    assert pair.worst() == []
    told = [f.message for f in pair.findings()]
    assert any("expected to wait 30 s" in message for message in told)
    assert pair.prefill.asked.count("/v1/completions") == 2  # of the two runs above: one block held each time
    assert "/v1/completions" not in pair.decode.asked


def test_a_server_that_is_not_there(pair: Pair) -> None:
    prefill, decode = pair.nodes()
    gone = replace(decode, url="http://127.0.0.1:1")
    (message,) = pair.worst(prefill, gone)
    assert message.startswith("d: does not answer")


def test_keys(pair: Pair) -> None:
    pair.prefill.key = "k"
    prefill, decode = pair.nodes()
    assert pair.worst(prefill, decode) == ["p: refuses the API key: see `api_key_env`"]
    assert pair.worst(replace(prefill, api_key="k"), decode) == []


def test_another_model(pair: Pair) -> None:
    pair.decode.models = [{"id": "other"}]
    assert any("d: does not serve 'm' (it serves: other)" in m for m in pair.worst())


def test_an_unknown_version(pair: Pair) -> None:
    pair.prefill.version = pair.decode.version = "0.99.1"
    assert [m.split(":")[0] for m in pair.worst()] == ["p", "d"]
    assert all("known are 0.26 to 0.33" in m for m in pair.worst())


def other_tokens(member: str, tokens: list[int] | None) -> dict[str, Any]:
    """A tokenizer that differs for bodies with this member."""
    return {"tokens": lambda body: tokens if member in body else list(json.dumps(body).encode())}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.32.0"}, "vLLM 0.33.0 and 0.32.0"),
        ({"metrics": METRICS.replace('"auto"', '"fp8"')}, "cache dtype is auto at prefill and fp8 at decode"),
        ({"metrics": METRICS.replace('"16"', '"64"')}, "block size is 16 at prefill and 64 at decode"),
        ({"metrics": METRICS + "vllm:spec_decode_num_drafts_total 4\n"}, "only at decode"),
        (other_tokens("prompt", [1]), "the tokenizer differs"),
        (other_tokens("messages", [1]), "the chat template differs"),
        (other_tokens("messages", None), "only one side has a chat template"),
        ({"models": [{"id": "m", "root": "/n"}]}, "prefill serves '/models/m', decode '/n'"),
    ],
)
def test_sides_that_differ(pair: Pair, changes: dict[str, Any], message: str) -> None:
    for name, value in changes.items():
        setattr(pair.decode, name, value)
    (found,) = pair.worst()
    assert found.startswith("p → d: ")
    assert message in found


def test_the_hash_of_compatibility_where_a_server_tells(pair: Pair) -> None:
    for server, dtype in ((pair.prefill, "bfloat16"), (pair.decode, "float16")):
        server.server_info = {"vllm_config": {"model_config": {"dtype": dtype, "model": "m"}}}
    (found,) = pair.worst()
    assert "dtype is 'bfloat16' at prefill and 'float16' at decode" in found


def test_troubles_that_were_counted(pair: Pair) -> None:
    pair.prefill.metrics = METRICS.replace(
        'expired_reqs_total{engine="0",model_name="m"} 0.0', "expired_reqs_total 7.0"
    )
    (found,) = pair.worst()
    assert found == "p: 7 prompts whose KV expired before decode fetched it since it started"


def test_scale_out_is_told_and_not_wrong(pair: Pair) -> None:
    pair.decode.scale_out = False
    assert pair.worst() == []
    assert any(f.where == "d" and "--enable-scale-out" in f.fix for f in pair.findings())


def test_no_connector(pair: Pair) -> None:
    pair.prefill.params = None
    (found,) = pair.worst()
    assert "hands nothing over (status 200)" in found


def test_push_instead_of_pull(pair: Pair) -> None:
    assert pair.prefill.params is not None
    pair.prefill.params["transfer_mode"] = "push"
    assert pair.worst() == ["p: its connector is push, its `handoff` is nixl"]


def test_a_side_channel_that_others_cannot_reach(pair: Pair) -> None:
    assert pair.prefill.params is not None
    pair.prefill.params["remote_port"] = 1
    (found,) = pair.worst()
    assert "side channel 127.0.0.1:1 cannot be reached" in found
    prefill, decode = pair.nodes()
    (found,) = pair.worst(replace(prefill, host="10.0.0.9"), decode)
    assert "none on another machine can reach its side channel" in found


def test_coordinates_that_a_push_relies_on(servers: Callable[[], Server]) -> None:
    prefill = servers()
    options = {"handoff": "nixl_push", "engine_id": "e", "side_channel_port": prefill.port, "tensor_parallel": 2}
    pair = Pair(prefill, servers(), **options)
    assert prefill.params is not None
    prefill.params["transfer_mode"] = "push"
    assert pair.worst() == ["p: `tensor_parallel` is 2 in the configuration and 1 there"]
    prefill.params |= {"tp_size": 2, "remote_engine_id": "f"}
    assert pair.worst() == ["p: `engine_id` is 'e' in the configuration and 'f' there"]


def test_the_bootstrap_server(servers: Callable[[], Server]) -> None:
    boot = servers()
    options = {"handoff": "mooncake", "bootstrap_port": boot.port, "data_parallel": 2}
    pair = Pair(servers(), servers(), **options)
    assert "does not answer (status 404)" in pair.worst()[0]
    boot.query = {"0": {"engine_id": "a", "worker_addr": {}}}
    assert pair.worst() == ["p: its bootstrap server knows no engine for rank 1"]
    boot.query["1"] = {"engine_id": "b", "worker_addr": {}}
    assert pair.worst() == []


def test_a_redirect_is_not_followed(servers: Callable[[], Server]) -> None:
    from pdhub_vllm.operate_facts import ask

    server, other = servers(), servers()
    server.moved = f"http://127.0.0.1:{other.port}/version"
    node = NodeSpec("p", "prefill", None, f"http://127.0.0.1:{server.port}", "vllm", api_key="k")
    assert ask(node, "/version").status == 302
    assert other.asked == []


class Machine:
    """/proc and /sys of a machine."""

    def __init__(self, root: Path, port: int) -> None:
        self.root = root
        (root / "proc/net").mkdir(parents=True)
        head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        line = f"   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0 0 4242 1 0\n"
        (root / "proc/net/tcp").write_text(head + line)

    def process(self, pid: int, parent: int, *links: str, maps: str = "") -> None:
        folder = self.root / f"proc/{pid}"
        (folder / "fd").mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
        (folder / "maps").write_text(maps)
        for i, link in enumerate(links):
            os.symlink(link, folder / f"fd/{i}")

    def rdma(self, name: str, driver: str, state: str = "4: ACTIVE") -> None:
        device = self.root / "sys/class/infiniband" / name
        (device / "ports/1").mkdir(parents=True)
        (device / "ports/1/state").write_text(state)
        target = self.root / "sys/bus/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        (device / "device").mkdir()
        os.symlink(target, device / "device/driver")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, 8100)


def looked(machine: Machine, host: str = "127.0.0.1", **options: Any) -> list[tuple[str, str]]:
    config = VLLMConfig.model_validate(options)
    node = NodeSpec("p", "prefill", None, f"http://{host}:8100", "vllm", config.model_dump(), host=host, port=8100)
    return [(f.severity.value, f.message) for f in operate_devices.examine(node, config, machine.root)]


def test_rdma_that_an_engine_process_has_opened(machine: Machine) -> None:
    machine.rdma("mlx5_0", "mlx5_core")
    machine.process(10, 1, "socket:[4242]", "/dev/null")
    machine.process(11, 10)
    machine.process(12, 11, "/dev/infiniband/uverbs0", maps="7f00 r-xp /x/libuct_ib.so.0\n")
    machine.process(99, 1, "/dev/infiniband/uverbs7")
    ((severity, message),) = looked(machine)
    assert severity == "info"
    assert "uverbs0 (UCX verbs)" in message


def test_rdma_that_nobody_opened(machine: Machine) -> None:
    machine.rdma("mlx5_0", "mlx5_core")
    machine.process(10, 1, "socket:[4242]")
    ((severity, message),) = looked(machine)
    assert severity == "warning"
    assert "mlx5_0 (mlx5_core)" in message


def test_no_rdma(machine: Machine) -> None:
    machine.rdma("mlx5_1", "mlx5_core", "1: DOWN")
    machine.process(10, 1, "socket:[4242]")
    assert [severity for severity, _ in looked(machine)] == ["info"]


def test_efa_that_is_missing(machine: Machine) -> None:
    machine.process(10, 1, "socket:[4242]")
    found = looked(machine, serve={"env": {"FI_PROVIDER": "efa"}})
    assert found[0][0] == "error"
    machine.rdma("rdmap0s6", "efa")
    assert looked(machine, serve={"env": {"FI_PROVIDER": "efa"}})[0][0] == "warning"  # up, and not opened


def test_gpudirect(machine: Machine) -> None:
    machine.rdma("mlx5_0", "mlx5_core")
    machine.process(10, 1, "socket:[4242]", "/dev/infiniband/uverbs0")
    (machine.root / "proc/driver/nvidia").mkdir(parents=True)
    assert [severity for severity, _ in looked(machine)] == ["warning", "info"]
    (machine.root / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert [severity for severity, _ in looked(machine)] == ["info"]


def test_what_cannot_be_seen_is_said(machine: Machine) -> None:
    assert "cannot be looked at" in looked(machine)[0][1]
    assert "another machine" in looked(machine, host="192.0.2.1")[0][1]
