"""Does a version of vLLM have what this plugin uses? Reads a wheel, or an installed package, without importing it.

What is looked for is text in named files: that a name is there says that nothing was renamed, not that it works.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from pdhub_vllm.metrics import SIGNALS


@dataclass(frozen=True, slots=True)
class Need:
    """One thing that is used.

    Args:
        what: for people. files: pattern of paths, one of which must have all ``names`` as whole words.
        optional: the plugin does without it; the text says what is lost.
    """

    what: str
    files: str
    names: tuple[str, ...]
    optional: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """``missing`` names; empty = all are there."""

    need: Need
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.missing or bool(self.need.optional)


_KV: Final = "vllm/distributed/kv_transfer/kv_connector/"
_NIXL: Final = _KV + "v1/nixl/"
_OPENAI: Final = "vllm/entrypoints/openai/"

NEEDS: Final = (
    Need(
        "connectors",
        _KV + "factory.py",
        ("NixlConnector", "NixlPushConnector", "MooncakeConnector", "MultiConnector"),
    ),
    Need(
        "transfer config",
        "vllm/config/kv_transfer.py",
        (
            "kv_connector", "kv_role", "engine_id", "kv_buffer_device", "kv_connector_extra_config",
            "kv_connector_module_path", "kv_load_failure_policy", "kv_producer", "kv_consumer",
        ),
    ),
    Need("NIXL options", _NIXL + "base_*.py", ("kv_lease_duration",)),
    Need("NIXL backends", _NIXL + "*.py", ("backends",)),
    Need(
        "NIXL pull: prefill's answer",
        _NIXL + "pull_scheduler.py",
        (
            "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
            "remote_host", "remote_port", "tp_size",
        ),
    ),
    Need(
        "NIXL push: decode's request",
        _NIXL + "push_scheduler.py",
        ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"),
    ),
    Need("NIXL: kind of transfer told", _NIXL + "*.py", ("transfer_mode",), "doctor cannot tell pull from push"),
    Need(
        "Mooncake: both requests",
        _KV + "v1/mooncake/mooncake_connector.py",
        ("do_remote_prefill", "do_remote_decode", "transfer_id", "remote_bootstrap_addr", "remote_engine_id"),
    ),
    Need("Mooncake options", _KV + "v1/mooncake/*.py", ("mooncake_protocol",)),
    Need("Mooncake: external bootstrap", _KV + "v1/mooncake/*.py", ("bootstrap_server_address",), "no `bootstrap_url`"),
    Need("Mooncake bootstrap", _KV + "v1/mooncake/mooncake_utils.py", ("/query", "worker_addr", "engine_id")),
    Need(
        "chat body",
        _OPENAI + "chat_completion/protocol.py",
        ("kv_transfer_params", "return_token_ids", "cache_salt"),
    ),
    Need(
        "completions body",
        _OPENAI + "completion/protocol.py",
        ("kv_transfer_params", "return_token_ids", "cache_salt"),
    ),
    Need("prompt's token ids in answers", _OPENAI + "*/protocol.py", ("prompt_token_ids",)),
    Need(
        "chat prompts as token ids",
        "vllm/renderers/online_renderer.py",
        ("_reused_prompt_token_ids",),
        "decode tokenises a chat prompt again",
    ),
    Need(
        "prefill's cached tokens to decode",
        "vllm/v1/core/sched/scheduler.py",
        ("remote_prefill_cached_tokens",),
        "the router alone corrects cached_tokens",
    ),
    Need("headers", "vllm/entrypoints/*.py", ("X-data-parallel-rank",)),
    Need("request ids", "vllm/entrypoints/*.py", ("X-Request-Id",)),
    Need(
        "environment",
        "vllm/envs.py",
        (
            "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT",
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "VLLM_API_KEY",
        ),
    ),
    Need(
        "arguments",
        "vllm/engine/arg_utils.py",
        (
            "--served-model-name", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
            "--max-model-len", "--max-logprobs", "--max-num-seqs", "--kv-transfer-config",
        ),
    ),
    Need("cached tokens in usage", "vllm/entrypoints/*cli_args.py", ("enable_prompt_tokens_details",)),
    Need("load", "vllm/v1/metrics/loggers.py", tuple(names[0] for names in SIGNALS.values())),
    Need("load by one number", "vllm/entrypoints/*.py", ("/load", "server_load"), "no `server_load`"),
    Need("load in headers", "vllm/entrypoints/*.py", ("endpoint-load-metrics-format",), "no `orca`"),
    Need(
        "KV events",
        "vllm/distributed/kv_events.py",
        (
            "BlockStored", "BlockRemoved", "AllBlocksCleared", "block_hashes", "parent_block_hash", "token_ids",
            "block_size", "medium", "group_idx", "extra_keys", "ZmqEventPublisher", "END_SEQ",
        ),
        "no `kv_events`, or one that mistakes some blocks for others",
    ),
    Need("cache configuration", "vllm/v1/metrics/loggers.py", ("vllm:cache_config_info",)),
    Need("drafts", "vllm/v1/spec_decode/metrics.py", ("vllm:spec_decode_num_drafts",)),
    Need(
        "NIXL's troubles",
        _NIXL + "stats.py",
        ("vllm:nixl_num_kv_expired_reqs", "vllm:nixl_num_failed_transfers", "vllm:nixl_num_failed_notifications"),
    ),
    Need("NIXL's own measure", _NIXL + "stats.py", ("vllm:nixl_xfer_time_seconds", "vllm:nixl_bytes_transferred")),
    Need(
        "NIXL's late reads",
        _NIXL + "stats.py",
        ("vllm:nixl_num_notifications_after_expiry",),
        "doctor does not see them",
    ),
    Need(
        "Mooncake's troubles",
        _KV + "v1/mooncake/*.py",
        ("vllm:mooncake_num_failed_transfers", "vllm:mooncake_num_failed_recvs", "vllm:mooncake_num_kv_expired_reqs"),
        "doctor does not see them",
    ),
    Need("questions of doctor", "vllm/entrypoints/*.py", ("/version", "/tokenize", "/health", "/v1/models")),
    Need("token-in, token-out endpoints", "vllm/entrypoints/*cli_args.py", ("enable_scale_out",), "not used"),
    Need(
        "reasoning and tool parsers",
        "vllm/parser/*.py",
        (
            "ParserManager", "get_parser", "DelegatingParser", "parse_delta", "parse", "adjust_request",
            "count_reasoning_tokens", "ChatCompletionRequest", "ChatCompletionNamedToolChoiceParam",
        ),
        "not for `model.parser`: name the Python of a newer one",
    ),
    Need("tokenizers for them", "vllm/tokenizers/__init__.py", ("get_tokenizer",), "as the parsers"),
    Need(
        "derender endpoint that insists on the request",
        "vllm/entrypoints/scale_out/derender/*.py",
        ("chat_request", "chat_request is required", "stream_state"),
        "no `via: derender`",
    ),
    Need(
        "connector base",
        _KV + "v1/base.py",
        (
            "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_num_new_matched_tokens",
            "update_state_after_alloc", "build_connector_meta", "request_finished", "request_finished_all_groups",
            "SupportsHMA", "get_finished", "register_kv_caches", "on_new_request", "has_pending_push_work",
            "bind_connector_metadata", "handle_preemptions", "update_connector_output",
        ),
    ),
    Need(
        "connector: failures told to the scheduler",
        _KV + "v1/base.py",
        ("KVConnectorWorkerMetadata", "build_connector_worker_meta"),
        "the answer does not say that pdhub's hand-over failed, the node alone does",
    ),
)  # fmt: skip


def version_of(path: Path) -> str:
    """From a wheel's name, or from the metadata beside an installed package; ``unknown`` if neither tells."""
    if path.suffix == ".whl":
        return path.name.split("-")[1]
    for found in sorted(path.glob("vllm*.dist-info")):
        return found.name.removesuffix(".dist-info").rpartition("-")[2]
    return "unknown"


def check(path: Path) -> list[Result]:
    """Every need against one version.

    Args:
        path: a wheel, or the directory (site-packages) that has the package ``vllm``.

    Raises:
        OSError, zipfile.BadZipFile: it cannot be read.
    """
    names, read = _wheel(path) if path.suffix == ".whl" else _directory(path)
    texts: dict[str, str] = {}

    def text(name: str) -> str:
        if name not in texts:
            texts[name] = read(name)
        return texts[name]

    return [Result(need, _missing(need, [n for n in names if fnmatchcase(n, need.files)], text)) for need in NEEDS]


def _missing(need: Need, files: list[str], text: Callable[[str], str]) -> tuple[str, ...]:
    """What the best file lacks; of files that together have all of it, none lacks anything."""
    return tuple(name for name in need.names if not any(_has(text(file), name) for file in files))


def _has(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w:-]){re.escape(name)}(?![\w-])", text) is not None


def _wheel(path: Path) -> tuple[list[str], Callable[[str], str]]:
    archive = zipfile.ZipFile(path)
    names = [name for name in archive.namelist() if name.endswith(".py")]
    return names, lambda name: archive.read(name).decode("utf-8", "replace")


def _directory(path: Path) -> tuple[list[str], Callable[[str], str]]:
    if not (path / "vllm" / "__init__.py").is_file():
        raise FileNotFoundError(f"no package 'vllm' in {path}")
    names = [str(file.relative_to(path)) for file in (path / "vllm").rglob("*.py")]
    return names, lambda name: (path / name).read_text(encoding="utf-8", errors="replace")


def table(found: Mapping[str, list[Result]]) -> Iterator[str]:
    """Lines for people: one a version, then what each lacks."""
    for version, results in found.items():
        lacking = [result for result in results if result.missing]
        broken = [result for result in lacking if not result.ok]
        state = "broken" if broken else "ok"
        yield f"vLLM {version}: {state} ({len(results) - len(lacking)} of {len(results)} found)"
        for result in lacking:
            note = f"  ({result.need.optional})" if result.need.optional else ""
            yield f"  {'-' if result.ok else '!'} {result.need.what}: {', '.join(result.missing)}{note}"
