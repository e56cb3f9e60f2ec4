"""Every shipped configuration loads with the plugins that it names."""

from __future__ import annotations

import json
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest

from pdhub.cli import main
from pdhub.config.build import load_config, load_plan
from pdhub.config.topology import topology

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_hosts_part_is_valid(path: Path) -> None:
    config, _ = load_config(path)
    assert config.pools


def test_the_quickstart_resolves_every_plugin() -> None:
    path = next(path for path in CONFIGS if path.name == "quickstart.yaml")
    try:
        metadata.version("pdhub-transformers")
    except metadata.PackageNotFoundError:
        pytest.skip("pdhub-transformers is not installed")
    plan = load_plan(path)
    slots = {name: resolved.config.model_dump()["slots"] for name, resolved in plan.pools.items()}
    assert slots == {"fast": 1, "general": 4}
    assert plan.pools["fast"].config.model_dump()["speculation"] == "prompt_lookup"
    assert plan.transport.spec.name == "shm"
    assert plan.policy.spec.name == "slo"


@pytest.mark.parametrize("name", ["vllm-pull", "vllm-push", "vllm-efa"])
def test_vllm_servers_have_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pdhub_vllm", reason="pdhub-vllm is not installed")
    path = next(path for path in CONFIGS if path.stem == name)
    ports = set()
    for node in topology(load_plan(path)).nodes:
        with pytest.raises(SystemExit) as done:
            main(["vllm", "command", str(path), node.name, "--json"])
        assert done.value.code == 0
        made = json.loads(capsys.readouterr().out)
        assert made["argv"][:2] == ["vllm", "serve"]
        assert made["ready_url"] == f"{node.url}/health"
        if "--kv-transfer-config" in made["argv"]:
            ports.add((node.host, made["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"]))
    assert len(ports) == sum(1 for node in topology(load_plan(path)).nodes if node.config["handoff"] != "none")


def test_pdhubs_connector_stands_beside_vllms_in_one_instance(capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("pdhub_vllm", "pdhub_transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    path = next(path for path in CONFIGS if path.stem == "vllm-pdhub")
    with pytest.raises(SystemExit) as done:
        main(["vllm", "command", str(path), "prefill-0", "--json"])
    assert done.value.code == 0
    argv = json.loads(capsys.readouterr().out)["argv"]
    transfer = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "MultiConnector"
    stock, ours = transfer["kv_connector_extra_config"]["connectors"]
    assert stock["kv_connector"] == "NixlConnector"
    assert (ours["kv_connector"], ours["kv_connector_module_path"]) == ("PDHubConnector", "pdhub.connector.vllm")
    assert ours["kv_role"] == "kv_producer"
    extra = ours["kv_connector_extra_config"]
    assert (extra["transport"], extra["block_tokens"], extra["port"]) == ("shm", 16, 5580)


@pytest.mark.parametrize("name", ["tilert", "tilert-slo"])
def test_tilerts_topologies_have_commands_that_agree(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("pdhub_vllm", "pdhub_tilert"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    path = next(path for path in CONFIGS if path.stem == name)
    with pytest.raises(SystemExit) as checked:
        main(["check", str(path), "--set", f"model.path={tmp_path}"])
    assert checked.value.code == 0, capsys.readouterr()
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main(["tilert", "command", str(path), "--json"])
    told = capsys.readouterr()
    assert (done.value.code, told.err) == (0, "")
    made = json.loads(told.out)
    node, prefill = made["tilert-0"], made["prefill-0"]
    transfer = json.loads(prefill["argv"][prefill["argv"].index("--kv-transfer-config") + 1])
    children = transfer["kv_connector_extra_config"].get("connectors", [transfer])
    (child,) = [child for child in children if child["kv_connector"] == "TileRTConnector"]
    words = dict(pairwise(node["argv"]))
    assert child["kv_connector_extra_config"] == {
        "tilert_model": words["--model"],
        "tilert_max_seq_len": int(words["--max-seq-len"]),
        "tilert_transport": words["--transport"],
    }
    assert prefill["env"]["TILERT_PD_SENDERS"] == node["env"]["TILERT_PD_SENDERS"]
    assert len(children) == (2 if name == "tilert-slo" else 1)


def test_pull_and_push_cannot_share_an_instance(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pdhub_vllm", reason="pdhub-vllm is not installed")
    path = next(path for path in CONFIGS if path.stem == "vllm-push")
    with pytest.raises(SystemExit) as done:
        main(["check", str(path), "--set", 'prefill.0.pools=["pull", "push"]'])
    assert done.value.code == 2
    assert "split it" in capsys.readouterr().err
