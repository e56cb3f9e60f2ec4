"""The exact command of a server: what `pdhub vllm command` prints and `pdhub up` runs."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pdhub_vllm.command import VLLMCommand
from pdhub_vllm.config import VLLMConfig
from pdhub_vllm.operate import VLLMOperate
from pdhub_vllm.operate_ports import side_channels
from pdhub_vllm.operate_refusals import refusals
from pdhub_vllm.operate_serve import process, shell

from pdhub.api import CommandHost, ConfigError, NodeSpec, Process, Topology


def node(name: str, port: int, role: str = "decode", pool: str | None = None, **options: Any) -> NodeSpec:
    config = VLLMConfig.model_validate(options).model_dump()
    return NodeSpec(name, role, pool, f"http://127.0.0.1:{port}", "vllm", config, port=port)


def topology(
    *nodes: NodeSpec, serves: Mapping[str, Sequence[str]], foreign: Sequence[Mapping[str, Any]] = ()
) -> Topology:
    """As the host makes it: every instance gets the children of the pools that it serves."""
    bare = Topology("m", "/models/m", nodes, "shm")
    made = []
    for spec in nodes:
        if spec.role == "prefill":
            children: list[Mapping[str, Any]] = []
            for other in nodes:
                if other.pool in serves[spec.name]:
                    child = VLLMOperate(VLLMConfig.model_validate(dict(other.config))).prefill_child(other, bare)
                    if child is not None and child not in children:
                        children.append(child)
            spec = replace(spec, serves=tuple(serves[spec.name]), children=(*children, *foreign))
        made.append(spec)
    return replace(bare, nodes=tuple(made))


def started(whole: Topology, name: str) -> tuple[dict[str, str | None], dict[str, str]]:
    """Flags and environment."""
    spec = whole.node(name)
    assert spec is not None
    made = process(spec, whole)
    argv = list(made.argv)
    assert argv[:3] == ["vllm", "serve", "/models/m"]
    flags: dict[str, str | None] = {}
    for i, word in enumerate(argv):
        if word.startswith("--"):
            follows = argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith("--") else None
            flags[word] = follows
    return flags, dict(made.env)


def transfer(flags: Mapping[str, str | None]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(flags["--kv-transfer-config"] or "null")
    return found


def pull(**options: Any) -> Topology:
    return topology(
        node("p", 8100, "prefill", **options),
        node("d0", 8200, pool="pull", slots=16, **options),
        node("d1", 8201, pool="pull", slots=16, **options),
        serves={"p": ["pull"]},
    )


def test_pull() -> None:
    flags, env = started(pull(), "p")
    assert transfer(flags) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": 30},
    }
    assert env == {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    assert flags["--served-model-name"] == "m"
    assert "--max-num-seqs" not in flags
    flags, env = started(pull(), "d1")
    assert transfer(flags) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"kv_lease_duration": 30},
        "kv_load_failure_policy": "fail",
    }
    assert flags["--max-num-seqs"] == "16"


def test_both_sides_have_the_same_lease() -> None:
    whole = pull(lease_s=12)
    leases = {
        transfer(started(whole, name)[0])["kv_connector_extra_config"]["kv_lease_duration"] for name in ("p", "d0")
    }
    assert leases == {12}


def test_servers_of_one_machine_listen_on_different_ports() -> None:
    assert side_channels(pull()) == {"p": 5600, "d0": 5601, "d1": 5602}
    assert side_channels(pull(data_parallel=4)) == {"p": 5600, "d0": 5604, "d1": 5608}
    far = replace(pull().nodes[2], host="10.0.0.9")
    assert side_channels(replace(pull(), nodes=(*pull().nodes[:2], far)))["d1"] == 5600


def test_ports_that_servers_have_are_not_side_channels() -> None:
    whole = topology(node("p", 5602, "prefill"), node("d", 5601, pool="pull"), serves={"p": ["pull"]})
    assert side_channels(whole) == {"p": 5600, "d": 5603}


def test_push_has_a_known_engine_id() -> None:
    whole = topology(
        node("p", 8100, "prefill", handoff="nixl_push", engine_id="e"),
        node("d", 8200, pool="push", handoff="nixl_push"),
        serves={"p": ["push"]},
    )
    assert transfer(started(whole, "p")[0])["kv_connector"] == "NixlPushConnector"
    assert transfer(started(whole, "p")[0])["engine_id"] == "e"
    assert "engine_id" not in transfer(started(whole, "d")[0])


def test_mooncake() -> None:
    serve = {"mooncake_protocol": "tcp"}
    whole = topology(
        node("p", 8100, "prefill", handoff="mooncake", bootstrap_port=9000, serve=serve),
        node("d", 8200, pool="x", handoff="mooncake", serve=serve),
        serves={"p": ["x"]},
    )
    flags, env = started(whole, "p")
    assert transfer(flags)["kv_connector_extra_config"] == {"mooncake_protocol": "tcp"}
    assert env == {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "45", "VLLM_MOONCAKE_BOOTSTRAP_PORT": "9000"}
    _, env = started(whole, "d")
    assert env == {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "45"}


def test_aggregated_has_no_connector() -> None:
    flags, env = started(topology(node("a", 8300, pool="a", handoff="none", slots=3), serves={}), "a")
    assert "--kv-transfer-config" not in flags
    assert flags["--max-num-seqs"] == "3"
    assert env == {}


def test_what_other_engines_need_comes_after_nixl() -> None:
    child = {"kv_connector": "Sender", "kv_connector_module_path": "sender.vllm"}
    whole = topology(
        node("p", 8100, "prefill", engine_id="e"), node("d", 8200, pool="pull"), serves={"p": ["pull"]}, foreign=[child]
    )
    config = transfer(started(whole, "p")[0])
    assert (config["kv_connector"], config["kv_role"], config["engine_id"]) == ("MultiConnector", "kv_producer", "e")
    first, second = config["kv_connector_extra_config"]["connectors"]
    assert first["kv_connector"] == "NixlConnector"
    assert second == {**child, "kv_role": "kv_producer"}
    assert "engine_id" not in first  # it would be given twice


def test_an_instance_for_other_engines_alone_has_no_connector_of_vllm() -> None:
    child = {"kv_connector": "Sender", "kv_connector_module_path": "sender.vllm"}
    whole = topology(node("p", 8100, "prefill", handoff="none"), serves={"p": []}, foreign=[child])
    assert transfer(started(whole, "p")[0])["kv_connector"] == "Sender"


def test_sizes_and_own_words() -> None:
    serve = {
        "command": ["/opt/bin/python", "-m", "server"], "model": "hub/name", "args": ["--enforce-eager"],
        "env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}, "kv_buffer_device": "cpu", "nixl_backends": ["LIBFABRIC"],
        "connector": "Mine", "connector_module": "mine", "connector_options": {"kv_lease_duration": 5},
    }  # fmt: skip
    options = {"tensor_parallel": 2, "pipeline_parallel": 3, "data_parallel": 4, "max_context": 99, "serve": serve}
    whole = topology(node("p", 8100, "prefill", **options), node("d", 1, pool="x"), serves={"p": ["x"]})
    spec = whole.node("p")
    assert spec is not None
    made = process(replace(spec, threads=6), whole)
    assert made.argv[:4] == ("/opt/bin/python", "-m", "server", "hub/name")
    assert made.argv[-1] == "--enforce-eager"
    words = " ".join(made.argv)
    for part in (
        "--tensor-parallel-size 2",
        "--pipeline-parallel-size 3",
        "--data-parallel-size 4",
        "--max-model-len 99",
    ):
        assert part in words
    config = json.loads(made.argv[made.argv.index("--kv-transfer-config") + 1])
    assert config == {
        "kv_connector": "Mine", "kv_role": "kv_producer", "kv_connector_module_path": "mine", "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": 5, "backends": ["LIBFABRIC"]},
    }  # fmt: skip
    assert made.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1"
    assert made.env["OMP_NUM_THREADS"] == "6"


def test_a_shell_runs_what_is_printed() -> None:
    options = {"serve": {"env": {"A": "b c", "Q": "it's"}}}
    whole = topology(node("p", 8100, "prefill", **options), node("d", 1, pool="x"), serves={"p": ["x"]})
    spec = replace(whole.nodes[0], api_key_env="MY_KEY")
    made = process(spec, whole)
    text = shell(made).replace(
        "vllm serve", "python3 -c 'import os,sys,json; print(json.dumps([sys.argv[1:], dict(os.environ)]))'"
    )
    out = subprocess.run(
        ["bash", "-c", text], env={"PATH": "/usr/bin:/bin", "MY_KEY": "k1"}, capture_output=True, check=True
    )
    argv, env = json.loads(out.stdout)
    assert argv == list(made.argv[2:])
    assert {name: env[name] for name in made.env} == dict(made.env)
    assert env["VLLM_API_KEY"] == "k1"
    assert "k1" not in text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    whole = pull()

    def made(path: str, name: str, overrides: Sequence[str]) -> Process:
        assert (path, list(overrides)) == ("c.yaml", ["a.b=1"])
        spec = whole.node(name)
        if spec is None:
            raise ConfigError("no such node")
        return process(spec, whole)

    host = CommandHost(topology=lambda *_: whole, process=made)
    assert VLLMCommand().run_with(["command", "c.yaml", "p", "--set", "a.b=1"], host) == 0
    out, err = capsys.readouterr()
    assert shlex.split(out.replace("\\\n", " "))[2:5] == ["vllm", "serve", "/models/m"]
    assert "http://127.0.0.1:8100/health" in err
    assert VLLMCommand().run_with(["command", "c.yaml", "p", "--set", "a.b=1", "--json"], host) == 0
    assert json.loads(capsys.readouterr().out)["argv"][0] == "vllm"
    assert VLLMCommand().run_with(["command"], host) == 2
    assert VLLMCommand().run(["command", "c.yaml", "p"]) == 2
    with pytest.raises(ConfigError):
        VLLMCommand().run_with(["command", "c.yaml", "nobody", "--set", "a.b=1"], host)


@pytest.mark.parametrize(
    ("other", "names"),
    [("nixl_push", "NixlConnector and NixlPushConnector"), ("mooncake", "MooncakeConnector and NixlConnector")],
)
def test_one_instance_has_one_connector_of_vllm(other: str, names: str) -> None:
    whole = topology(
        node("p", 8100, "prefill"),
        node("a", 8200, pool="a"),
        node("b", 8201, pool="b", handoff=other),
        serves={"p": ["a", "b"]},
    )
    (finding,) = refusals(whole)
    assert names in finding.message
    assert "split" in finding.fix
    split = topology(
        node("p", 8100, "prefill"),
        node("q", 8101, "prefill", handoff=other, side_channel_port=5700),
        node("a", 8200, pool="a"),
        node("b", 8201, pool="b", handoff=other),
        serves={"p": ["a"], "q": ["b"]},
    )
    assert list(refusals(split)) == []


def test_what_else_cannot_work() -> None:
    def messages(*nodes: NodeSpec, serves: Mapping[str, Sequence[str]]) -> str:
        return "\n".join(finding.message for finding in refusals(topology(*nodes, serves=serves)))

    wrong = messages(node("p", 1, "prefill"), node("d", 2, pool="x", handoff="mooncake"), serves={"p": ["x"]})
    assert "its handoff is nixl, that of its pools is mooncake" in wrong
    lease = messages(node("p", 1, "prefill", lease_s=9), node("d", 2, pool="x"), serves={"p": ["x"]})
    assert "lease_s is 30 here and 9 at 'p'" in lease
    same = messages(
        node("p", 1, "prefill"), node("q", 3, "prefill"), node("d", 2, pool="x"), serves={"p": ["x"], "q": ["x"]}
    )
    assert "port 5600 of 127.0.0.1 is also that of 'p'" in same
    other = NodeSpec("t", "prefill", None, "http://x:1", "transformers", host="x", port=1)
    foreign = messages(other, node("d", 2, pool="x"), serves={"t": ["x"]})
    assert "'t' is no vLLM server (transformers)" in foreign


def test_what_servers_must_publish_they_are_told() -> None:
    events = {"d0": {"endpoint": "tcp://10.0.0.2:5557", "replay": "tcp://10.0.0.2:5558", "topic": "kv"}}
    whole = pull(kv_events=events, server_load=True)
    flags, _ = started(whole, "d0")
    assert json.loads(flags["--kv-events-config"] or "") == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }
    assert "--enable-server-load-tracking" in flags
    assert "--kv-events-config" not in started(whole, "p")[0]
    nobody = pull(kv_events={"d9": events["d0"]})
    assert any("'d9' is none" in finding.message for finding in refusals(nobody))
