"""What a live vLLM server tells of itself over HTTP."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pdhub.api import NodeSpec

WITHIN_S: Final = 5.0
"""For one question."""

_LIMIT: Final = 16 << 20
_SAMPLE: Final = re.compile(r"^(vllm:[a-z0-9_]+)(?:\{([^\n]*)\})? +(\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-zA-Z0-9_]+)="((?:[^"\\]|\\.)*)"')


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A node must not send these questions to anybody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


@dataclass(frozen=True, slots=True)
class Answer:
    """Status 0 = it did not answer; ``body`` then says why."""

    status: int
    body: str = ""

    def json(self) -> Any:
        """The parsed body; None if it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Facts:
    """Args:
    problem: why nothing else is known; empty if it answers.
    cache: labels of ``vllm:cache_config_info``: block size, cache dtype and all that vLLM puts there.
    metrics: sums of samples by name, without ``_total``.
    server: what ``/server_info`` says; empty unless the server runs in development mode.
    """

    node: NodeSpec
    problem: str = ""
    version: str = ""
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cache: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)


def ask(node: NodeSpec, path: str, body: Mapping[str, Any] | None = None, within_s: float = WITHIN_S) -> Answer:
    """One question. Whatever happens is an answer.

    Args:
        body: sent as JSON with POST; None = GET.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} if data else {}
    if node.api_key:
        headers["authorization"] = f"Bearer {node.api_key}"
    request = urllib.request.Request(node.url + path, data=data, headers=headers)
    try:
        with _opener.open(request, timeout=within_s) as reply:
            return Answer(reply.status, reply.read(_LIMIT).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(_LIMIT).decode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        return Answer(0, str(getattr(error, "reason", error)) or type(error).__name__)


def learn(node: NodeSpec) -> Facts:
    """Ask one server everything that needs no request to the model."""
    models = ask(node, "/v1/models")
    if models.status != 200:
        return Facts(node, problem=_problem(models))
    document = models.json()
    cards = document.get("data") if isinstance(document, dict) else None
    version = ask(node, "/version").json()
    samples = list(_samples(ask(node, "/metrics").body))
    server = ask(node, "/server_info?config_format=json")
    return Facts(
        node,
        version=str(version.get("version", "")) if isinstance(version, dict) else "",
        models={str(c.get("id")): c for c in cards or () if isinstance(c, dict)},
        cache=next((labels for name, labels, _ in samples if name == "vllm:cache_config_info"), {}),
        metrics=_sums(samples),
        server=found if server.status == 200 and isinstance(found := server.json(), dict) else {},
    )


def listens(host: str, port: int, within_s: float = 2.0) -> bool:
    """A TCP connection can be opened."""
    try:
        with socket.create_connection((host, port), within_s):
            return True
    except OSError:
        return False


def _problem(answer: Answer) -> str:
    if answer.status == 0:
        return f"does not answer: {answer.body}"
    if answer.status in (401, 403):
        return "refuses the API key: see `api_key_env`"
    return f"/v1/models answers {answer.status}"


def _samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    out = []
    for name, labels, value in _SAMPLE.findall(text):
        try:
            out.append((name, dict(_LABEL.findall(labels)), float(value)))
        except ValueError:
            continue
    return out


def _sums(samples: list[tuple[str, dict[str, str], float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, _, value in samples:
        key = name.removesuffix("_total")
        out[key] = out.get(key, 0.0) + value
    return out
