"""What `pdhub doctor` asks of live decode servers and of the vLLM servers that fill them."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pdhub.api import Finding, NodeSpec, Severity, Topology
from pdhub_tilert import operate_node
from pdhub_tilert.client import control_of
from pdhub_tilert.config import ModelConfig, TileRTConfig, TileRTNodeConfig
from pdhub_tilert.operate_refusals import refusals
from pdhub_tilert.operate_serve import ours, senders
from pdhub_tilert.profiles import PAGE, Profile, layout_version

PROTOCOL: Final = 2
WITHIN_S: Final = 5.0
_LIMIT: Final = 16 << 20
_CACHE: Final = re.compile(r"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-zA-Z0-9_]+)="((?:[^"\\]|\\.)*)"')

_PROBE: Final = """
import json, sys
out = {"python": list(sys.version_info[:2])}
try:
    import torch
    out["torch"], out["cuda"] = torch.__version__, torch.version.cuda
    out["devices"] = [list(torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())]
except Exception as error:
    out["torch_error"] = repr(error)
import importlib.util
out["tilert"] = importlib.util.find_spec("tilert") is not None
print(json.dumps(out))
"""


def checks(config: TileRTConfig, topology: Topology) -> Iterator[Finding]:
    """Findings about the nodes with these options, and about each prefill instance that writes to one of them."""
    yield from refusals(topology)
    mine = [node for node, options in ours(topology) if options == config]
    if any(node.launch for node in mine):
        yield from _interpreter(mine[0], config.serve.python, config.serve.engine)
    for node in mine:
        yield from _node(node, config)
    pools = {node.pool for node in mine if node.pool}
    for prefill in topology.nodes:
        if prefill.role == "prefill" and pools & set(prefill.serves):
            yield from _prefill(prefill, config)


def hosted(config: TileRTNodeConfig, topology: Topology) -> Iterator[Finding]:
    """As :func:`checks`, of nodes that `pdhub node` hosts: those tell routers themselves what they are."""
    yield from operate_node.refusals(topology)
    mine = [node for node, options in operate_node.ours(topology) if options == config]
    if any(node.launch for node in mine):
        yield from _interpreter(mine[0], config.python or sys.executable, config.engine)
    pools = {node.pool for node in mine if node.pool}
    for prefill in topology.nodes:
        if prefill.role == "prefill" and prefill.engine == "vllm" and pools & set(prefill.serves):
            yield from _prefill(prefill, config)


def examine_hello(where: str, hello: Mapping[str, Any], config: TileRTConfig) -> Iterator[Finding]:
    """The node's own words about itself against the configuration. Prefill compares the same, but after it computed."""
    wanted = {
        "magic": "tilert-pd",
        "protocol_version": PROTOCOL,
        "layout_version": layout_version(config.profile, config.kv_cache_dtype, config.mtp),
        "transport": config.transport,
        "max_seq_len": config.max_seq_len,
        "senders": senders(config),
    }
    for name, value in wanted.items():
        if hello.get(name) != value:
            message = f"its control port says {name} {hello.get(name)!r}, the configuration means {value!r}"
            yield _error(where, message, "start it as `pdhub tilert command CONFIG` says")


def _node(node: NodeSpec, config: TileRTConfig) -> Iterator[Finding]:
    told = _json(node, "/capabilities")
    if told is None:
        yield _error(node.name, "does not answer at /capabilities", "`pdhub tilert command CONFIG` says how it starts")
        return
    if told.get("profile") != config.profile:
        yield _error(node.name, f"serves the profile {told.get('profile')!r}, not {config.profile.value!r}", "")
    if told.get("engine") == "StubEngine":
        yield Finding(Severity.WARNING, node.name, "answers fixed tokens: it runs TileRT's stub engine")
    host, port = control_of(config, node.url)
    try:
        hello = _hello(host, port)
    except (OSError, ValueError, struct.error) as error:
        yield _error(node.name, f"its control port {host}:{port} says no hello: {error}", "set ctrl_port, ctrl_host")
        return
    yield from examine_hello(node.name, hello, config)
    message = "how often it looks for new tokens cannot be read from outside"
    yield Finding(
        Severity.INFO, node.name, message, f"TILERT_DECODE_POLL_MS={config.serve.poll_ms}; its default is 200"
    )


def _prefill(prefill: NodeSpec, config: ModelConfig) -> Iterator[Finding]:
    metrics = _text(prefill, "/metrics")
    found = _CACHE.search(metrics or "")
    if metrics is None or found is None:
        yield Finding(Severity.INFO, prefill.name, "does not tell its cache configuration, so it was not compared")
        return
    labels = dict(_LABEL.findall(found[1]))
    if (block := labels.get("block_size")) not in (None, str(PAGE)):
        yield _error(
            prefill.name, f"its block size is {block}", f"TileRT's pages have {PAGE} tokens: --block-size {PAGE}"
        )
    dtype, wanted = labels.get("cache_dtype"), config.kv_cache_dtype.value
    fits = dtype in (None, wanted) or (wanted == "bf16" and dtype in ("auto", "bfloat16"))
    if not fits:
        yield _error(prefill.name, f"its cache dtype is {dtype}, its TileRT nodes expect {wanted}", "--kv-cache-dtype")
    drafts = "vllm:spec_decode_num_drafts" in metrics
    if config.mtp and config.profile is not Profile.DSV32 and not drafts:
        message = "speculative decoding is off: the draft layer has no KV, and the node's drafts come from nothing"
        yield _error(prefill.name, message, """--speculative-config '{"method":"mtp","num_speculative_tokens":1}'""")


def _interpreter(node: NodeSpec, python: str, engine: str) -> Iterator[Finding]:
    """On this machine, where `pdhub up` would start the nodes."""
    where = f"pool '{node.pool}'"
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
        told = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        yield _error(where, f"{python!r} cannot be asked for its packages: {error}", "set its `python`")
        return
    yield from examine_interpreter(where, told, engine)


def examine_interpreter(where: str, told: Mapping[str, Any], engine: str) -> Iterator[Finding]:
    """What TileRT's wheel needs: Python 3.12, torch 2.11 or 2.12 for CUDA 13, and for its kernels eight B200."""
    if told.get("python") != [3, 12]:
        yield _error(where, f"its Python is {told.get('python')}; TileRT's wheel is for 3.12", "set its `python`")
    if not told.get("tilert"):
        yield _error(where, "its Python has no package tilert", "pip install tilert==0.1.6.post3 there")
    if "torch" not in told:
        yield _error(
            where, f"its Python cannot import torch: {told.get('torch_error')}", "pip install 'torch>=2.11,<2.13'"
        )
        return
    if not re.match(r"2\.1[12]\.", str(told["torch"])):
        yield _error(
            where, f"its torch is {told['torch']}; TileRT needs 2.11 or 2.12", "pip install 'torch>=2.11,<2.13'"
        )
    if not str(told.get("cuda") or "").startswith("13"):
        yield _error(
            where, f"its torch is for CUDA {told.get('cuda')}; TileRT's kernels are for 13", "install a CUDA 13 torch"
        )
    devices = told.get("devices") or []
    if engine == "tilert" and (len(devices) < 8 or any(d[0] != 10 for d in devices)):
        message = f"TileRT's kernels need eight B200 (compute capability 10.x); there are {devices or 'none'}"
        yield _error(where, message, "`engine: stub` tries everything else")


def _hello(host: str, port: int) -> dict[str, Any]:
    with socket.create_connection((host, port), WITHIN_S) as connection:
        connection.settimeout(WITHIN_S)
        stream = connection.makefile("rb")
        (size,) = struct.unpack("!I", stream.read(4))
        document = json.loads(stream.read(min(size, _LIMIT)))
    if not isinstance(document, dict):
        raise ValueError("it is no object")
    return document


def _text(node: NodeSpec, path: str) -> str | None:
    headers = {"authorization": f"Bearer {node.api_key}"} if node.api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(node.url + path, headers=headers), timeout=WITHIN_S) as reply:
            return str(reply.read(_LIMIT).decode("utf-8", "replace"))
    except (OSError, ValueError, urllib.error.URLError):
        return None


def _json(node: NodeSpec, path: str) -> dict[str, Any] | None:
    try:
        document = json.loads(_text(node, path) or "null")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _error(where: str, message: str, fix: str) -> Finding:
    return Finding(Severity.ERROR, where, message, fix)
