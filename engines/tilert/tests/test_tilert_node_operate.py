"""Deployment of hosted nodes: what prefill must have, how a node starts, doctor."""

import json
import sys

import pytest
from pdhub_tilert import operate_node
from pdhub_tilert.command import TileRTCommand
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.operate_checks import hosted

from pdhub import registry
from pdhub.api import CommandHost, ConfigError, Severity
from pdhub.config.build import build_plan
from pdhub.config.models import Config
from pdhub.config.topology import topology
from pdhub.connector.options import read_options
from pdhub.operate.tree import process

ARGS = ["--kv-cache-dtype", "fp8_ds_mla", "--speculative-config", '{"method":"mtp","num_speculative_tokens":1}']


def plan(*, args=ARGS, tensor_parallel=8, path="/m", launch=True, further=(), **options):
    vllm = {"handoff": "pdhub", "tensor_parallel": tensor_parallel, "serve": {"args": list(args)}}
    config = {"weights_dir": "/w", **options}
    nodes = [{"name": "t0", "port": 8300, "launch": launch}]
    data = {
        "model": {"name": "m", "path": path},
        "prefill": [{"name": "p0", "port": 8100, "engine": {"type": "vllm", "config": vllm}}],
        "pools": [{"name": "tilert", "engine": {"type": "tilert-node", "config": config}, "nodes": nodes}, *further],
        "policy": {"type": "slo"},
    }
    return build_plan(Config.model_validate(data), registry.load())


def whole(**options):
    return topology(plan(**options))


def test_prefill_gets_pdhubs_own_connector_in_the_form_of_planes():
    (child,) = whole(shards=4).node("p0").children
    assert child["kv_connector"] == "PDHubConnector"
    read = read_options(child["kv_connector_extra_config"])
    assert (read.form, read.shards, read.transport) == ("planes", 4, "shm")


def test_rows_and_planes_are_not_written_by_one_instance():
    other = {"name": "rows", "engine": {"type": "transformers"}, "nodes": [{"name": "r0", "port": 8400}]}
    with pytest.raises(ConfigError, match="other forms"):
        plan(further=[other])


def test_a_node_starts_where_and_as_long_as_its_options_say():
    made = plan(python="/opt/tilert/bin/python", ready_within_s=900)
    found = process(made, topology(made), "t0")
    assert found.argv[:4] == ("/opt/tilert/bin/python", "-m", "pdhub", "node")
    assert (found.argv[-1], found.ready_within_s) == ("t0", 900)
    made = plan()
    assert process(made, topology(made), "t0").argv[0] == sys.executable


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"args": ARGS[:2]}, "--speculative-config is None"),
        ({"args": ARGS[2:]}, "--kv-cache-dtype is None"),
        ({"args": [*ARGS, "--block-size", "16"]}, "--block-size is 16"),
        ({"profile": "dsv32"}, "wants 61 layers"),
        ({"tensor_parallel": 2, "shards": 8}, "cannot write 8 shards"),
        ({"path": None}, "config.json"),
        ({"weights_dir": None}, "converted weights"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(options, part):
    with pytest.raises(ConfigError) as caught:
        plan(**options)
    assert part in str(caught.value)


def test_what_works_is_not_complained_about():
    assert not list(operate_node.refusals(whole()))
    assert not list(operate_node.refusals(whole(profile="dsv32", args=ARGS[:2], engine="stub", weights_dir=None)))
    assert not list(operate_node.refusals(whole(kv_cache_dtype="bf16", args=ARGS[2:])))


def test_doctor_asks_the_interpreter_that_hosts_it():
    found = list(hosted(TileRTNodeConfig(weights_dir="/w", python="/nowhere/python"), whole(python="/nowhere/python")))
    said = [(finding.severity, finding.message) for finding in found]
    assert (Severity.ERROR, True) in [(severity, "/nowhere/python" in message) for severity, message in said]
    assert any("does not tell its cache configuration" in message for _, message in said)


def test_the_command_of_a_hosted_node(capsys):
    made = plan()
    host = CommandHost(lambda path, sets: topology(made), lambda path, name, sets: process(made, topology(made), name))
    assert TileRTCommand().run_with(["command", "c.yaml", "t0", "--json"], host) == 0
    assert json.loads(capsys.readouterr().out)["t0"]["argv"][-4:] == ["pdhub", "node", "None", "t0"]
