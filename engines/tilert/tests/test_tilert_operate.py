"""Deployment: commands, the connector's place in a prefill instance, refusals, doctor, weights."""

import json
import socket
import struct
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pdhub_tilert.command import TileRTCommand, shell
from pdhub_tilert.config import TileRTConfig
from pdhub_tilert.convert import convert, progress
from pdhub_tilert.operate import TileRTOperate
from pdhub_tilert.operate_checks import checks, examine_hello, examine_interpreter
from pdhub_tilert.operate_refusals import refusals
from pdhub_tilert.operate_serve import child, process

from pdhub.api import CommandHost, NodeSpec, Process, Severity, Topology

SERVE = {
    "args": [
        "--kv-cache-dtype", "fp8_ds_mla", "--block-size", "64", "--speculative-config",
        '{"method":"mtp","num_speculative_tokens":1}',
    ],
    "env": {"TILERT_PD_SENDERS": "1"},
}  # fmt: skip


def node(name="t0", port=5557, pool="tilert", **options):
    config = TileRTConfig.model_validate(options).model_dump()
    return NodeSpec(name, "decode", pool, f"http://127.0.0.1:{port}", "tilert", config, port=port)


def topology(*nodes, serve=SERVE, engine="vllm", launch=True):
    children = []
    for each in nodes:
        made = child(TileRTConfig.model_validate(dict(each.config)))
        children += [made] if made not in children else []
    serves = tuple({each.pool: None for each in nodes})
    prefill = NodeSpec(
        "p0", "prefill", None, "http://127.0.0.1:8100", engine, {"serve": serve}, port=8100, launch=launch
    )
    return Topology("m", "/m", (replace(prefill, serves=serves, children=tuple(children)), *nodes), "shm")


def said(findings):
    return [finding.message for finding in findings]


def test_the_command_of_a_decode_server():
    made = process(node(serve={"weights_dir": "/w", "probe_address": "10.0.0.1", "args": ["--num-mtp", "3"]}))
    words = dict(zip(made.argv[3::2], made.argv[4::2], strict=False))
    assert made.argv[:3] == ("python3", "-m", "tilert.pd_vllm.decode_server")
    assert (words["--ctrl-port"], words["--http-port"], words["--transport"]) == ("5556", "5557", "nixl")
    assert "--with-mtp" in made.argv
    assert made.env == {
        "TILERT_PD_SHARDS": "1", "TILERT_PD_SENDERS": "1", "TILERT_PD_PROBE_ADDR": "10.0.0.1",
        "TILERT_DECODE_POLL_MS": "5",
    }  # fmt: skip
    assert process(node(mtp=False)).env["TILERT_PD_NO_MTP"] == "1"
    assert process(node(transport="mooncake")).env["TILERT_PD_SHARDS"] == "8"
    assert shell(made).splitlines()[0] == "TILERT_PD_SHARDS=1 \\"


def test_one_connector_for_all_nodes_of_a_pool():
    whole = topology(node(), node("t1", 5600))
    assert len(whole.nodes[0].children) == 1
    found = TileRTOperate(TileRTConfig()).prefill_child(whole.nodes[1], whole)
    assert found["kv_connector_module_path"] == "tilert.pd_vllm.prefill_connector"
    assert "tilert_host" not in found["kv_connector_extra_config"]
    assert not list(refusals(whole))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"args": SERVE["args"][:4]}, "--speculative-config is None"),
        ({"args": SERVE["args"][2:]}, "--kv-cache-dtype is None"),
        ({"args": ["--kv-cache-dtype=auto", *SERVE["args"][4:]]}, "--kv-cache-dtype is 'auto'"),
        ({"args": [*SERVE["args"], "--block-size", "16"][4:] + SERVE["args"][:2]}, "--block-size is 16"),
        ({"env": {}}, "TILERT_PD_SENDERS is 8"),
    ],
)
def test_what_the_prefill_instance_lacks_is_said(change, part):
    serve = {**SERVE, **change}
    (found,) = list(refusals(topology(node(), serve=serve)))
    assert part in found.message
    assert found.severity is Severity.ERROR
    (found,) = list(refusals(topology(node(), serve=serve, launch=False)))
    assert found.severity is Severity.WARNING


def test_what_cannot_work_together():
    assert "is no vLLM server" in said(refusals(topology(node(), engine="toy")))[0]
    assert "differ in profile" in said(refusals(topology(node(), node("u0", 5700, "other", max_seq_len=4096))))[0]
    assert "one device" in said(refusals(topology(node(serve={"shards": 8}))))[0]
    assert "control port 5557" in said(refusals(topology(node(), node("t1", 5558))))[0]
    assert "wants 61 layers" in said(refusals(topology(node(profile="dsv32"))))[0]
    bf16 = {**SERVE, "args": SERVE["args"][2:]}
    assert not list(refusals(topology(node(kv_cache_dtype="bf16"), serve=bf16)))


HELLO = {
    "magic": "tilert-pd", "protocol_version": 2, "layout_version": 10, "transport": "nixl", "max_seq_len": 202_752,
    "senders": 1, "busy": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"layout_version": 50}, {"transport": "mooncake"}, {"max_seq_len": 4096}, {"senders": 8}, {"magic": 1}]
)
def test_a_hello_that_prefill_would_refuse(change):
    config = TileRTConfig()
    assert not list(examine_hello("t0", HELLO, config))
    (found,) = examine_hello("t0", {**HELLO, **change}, config)
    assert next(iter(change)) in found.message


def test_what_an_interpreter_lacks():
    good = {"python": [3, 12], "torch": "2.11.0+cu130", "cuda": "13.0", "tilert": True, "devices": [[10, 0]] * 8}
    assert not list(examine_interpreter("p", good, "tilert"))
    for change in (
        {"python": [3, 11]}, {"torch": "2.13.0"}, {"cuda": "12.8"}, {"tilert": False}, {"devices": [[9, 0]] * 8},
    ):  # fmt: skip
        assert len(list(examine_interpreter("p", {**good, **change}, "tilert"))) == 1
    assert len(list(examine_interpreter("p", {"python": [3, 12], "tilert": True, "torch_error": "x"}, "tilert"))) == 1


@contextmanager
def server(answers):
    """HTTP answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield http.server_address[1]
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@contextmanager
def control(hello):
    """A control port that greets once."""
    data = json.dumps(hello).encode()
    listener = socket.create_server(("127.0.0.1", 0))

    def greet():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(struct.pack("!I", len(data)) + data)

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(10)
        listener.close()


def test_doctor_asks_the_node_its_control_port_and_the_prefill_instance():
    capabilities = json.dumps({"profile": "glm5", "engine": "StubEngine", "capabilities": {}})
    metrics = 'vllm:cache_config_info{block_size="16",cache_dtype="auto"} 1.0\n'
    with (
        control({**HELLO, "max_seq_len": 4096}) as port,
        server({"/capabilities": capabilities}) as http,
        server({"/metrics": metrics}) as vllm,
    ):
        config = TileRTConfig(ctrl_port=port)
        whole = topology(replace(node(ctrl_port=port), url=f"http://127.0.0.1:{http}", port=http, launch=False))
        prefill = replace(whole.nodes[0], url=f"http://127.0.0.1:{vllm}", port=vllm)
        found = said(checks(config, replace(whole, nodes=(prefill, whole.nodes[1]))))
    for part in ("stub engine", "max_seq_len 4096", "block size is 16", "cache dtype is auto", "decoding is off"):
        assert any(part in message for message in found), (part, found)


def test_doctor_says_who_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gone = replace(node(), url=f"http://127.0.0.1:{port}", port=port, launch=False)
    assert any("does not answer" in message for message in said(checks(TileRTConfig(), topology(gone))))


def test_the_commands_of_a_whole_topology(capsys):
    whole = topology(node())
    made = {"p0": Process(("vllm", "serve", "m"), "http://p/health", secrets={"VLLM_API_KEY": "KEY"})}
    made["t0"] = process(whole.nodes[1])
    host = CommandHost(lambda path, sets: whole, lambda path, name, sets: made[name])
    assert TileRTCommand().run_with(["command", "c.yaml"], host) == 0
    out = capsys.readouterr().out
    assert 'VLLM_API_KEY="$KEY"' in out
    assert out.count("ready when") == 2
    assert out.endswith("pdhub router c.yaml\n")
    assert TileRTCommand().run_with(["command", "c.yaml", "t0", "--json"], host) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["t0"]
    broken = CommandHost(lambda path, sets: topology(node(), serve={}), lambda path, name, sets: made[name])
    assert TileRTCommand().run_with(["command", "c.yaml"], broken) == 1
    assert "--kv-cache-dtype" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["nonsense"], ["convert"], ["command", "c.yaml"]])
def test_wrong_words_are_a_usage_error(words, capsys):
    assert TileRTCommand().run(words) == 2
    assert capsys.readouterr().err


def test_conversion_shows_how_far_it_is(tmp_path):
    """A stand-in for TileRT's converter that writes one file and ends with a status of its own."""
    package = tmp_path / "python"
    (package / "tilert/models/preprocess").mkdir(parents=True)
    for place in ("tilert", "tilert/models", "tilert/models/preprocess"):
        (package / place / "__init__.py").touch()
    (package / "tilert/models/preprocess/weight_converter.py").write_text(
        "import pathlib, sys, time\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--save_dir') + 1])\n"
        "(out / 'a.safetensors').write_bytes(bytes(512))\n"
        "while not (out / 'told').exists(): time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    source, saved, lines = tmp_path / "hf", tmp_path / "out", []
    source.mkdir()
    (source / "w.safetensors").write_bytes(bytes(1024))
    wrapper = tmp_path / "python-with-tilert"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{package}" exec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)

    def say(line):
        lines.append(line)
        if "50 %" in line:
            (saved / "told").touch()

    assert convert(str(wrapper), "glm-5", source, saved, say, every_s=0.02) == 3
    assert "50 %" in lines[-1]
    assert progress(0, 0, 1.0) == "0.0 GiB written of about 0.0 GiB, 1 s"


@pytest.mark.parametrize(
    ("python", "model", "reason"),
    [
        (sys.executable, "absent", "absent is not a directory"),
        ("/no/such/python", "hf", "cannot run --python /no/such/python: No such file"),
        ("without", "hf", "has no TileRT"),
    ],
)
def test_a_conversion_that_cannot_start_makes_no_directory(tmp_path, capsys, python, model, reason):
    (tmp_path / "hf").mkdir()
    if python == "without":
        wrapper = tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
        wrapper.chmod(0o755)
        python = str(wrapper)
    saved = tmp_path / "out/deep"
    words = ["--model-type", "glm-5", "--model-dir", str(tmp_path / model), "--save-dir", str(saved)]
    assert TileRTCommand().run(["convert", *words, "--python", python]) == 2
    assert reason in capsys.readouterr().err
    assert not saved.parent.exists()
