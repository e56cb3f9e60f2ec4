"""Answers in a form in which two of the same request are equal: without ids and times, streams put together."""

from __future__ import annotations

import json
import re
from typing import Any

_DROPPED = {"id", "created", "system_fingerprint", "request_id", "prompt_tokens_details"}
"""The details of usage say what was in a cache: it depends on what was asked before."""

_TOOL_ID = re.compile(r"^(chatcmpl-tool-|call_|functions\.).*$")


def normal(status: int, text: str, stream: bool) -> dict[str, Any]:
    """``{"status", "answer"}``, or for a stream ``{"status", "choices", "usage", "ends", "error"}``."""
    if status == 200 and stream:
        return {"status": status, **_stream(text)}
    try:
        document = json.loads(text)
    except ValueError:
        return {"status": status, "answer": text}
    return {"status": status, "answer": _clean(document)}


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Paths at which they differ; numbers that are not whole may differ by a five-hundredth."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = []
        for key in {**one, **other}:
            if key not in one or key not in other:
                found.append(f"{where}.{key}: {'only through pdhub' if key in other else 'only directly'}")
            else:
                found += differences(one[key], other[key], f"{where}.{key}")
        return found
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{where}[{i}]")
        ]
    if isinstance(one, float) and isinstance(other, float) and abs(one - other) < 2e-3:
        return []
    return [] if one == other else [f"{where}: {json.dumps(one)[:300]} | {json.dumps(other)[:300]}"]


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        # A member that is null and one that is not there say the same.
        kept = {k: _clean(v) for k, v in value.items() if k not in _DROPPED and v is not None}
        if isinstance(value.get("id"), str) and _TOOL_ID.match(value["id"]):
            kept["id"] = "a tool call's"
        return kept
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _stream(text: str) -> dict[str, Any]:
    """Chunks put together by choice: how tokens were cut into events is chance."""
    choices: dict[int, dict[str, Any]] = {}
    out: dict[str, Any] = {"choices": choices, "usage": [], "error": [], "ends": text.rstrip().endswith("data: [DONE]")}
    kinds = set()
    for line in text.splitlines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        event = json.loads(line[5:])
        kinds.add((event.get("object"), event.get("model")))
        if "error" in event:
            out["error"].append(_clean(event["error"]))
        if event.get("usage") and not event["choices"]:
            out["usage"].append(_clean(event["usage"]))
        for choice in event.get("choices", ()):
            _add(choices.setdefault(choice["index"], {}), _clean(choice))
    return {**out, "kinds": sorted(map(str, kinds))}


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        old = whole.get(name)
        if name in ("index", "role", "type"):
            whole[name] = value
        elif name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(call["index"], {}), call)
        elif name in ("id", "finish_reason", "stop_reason", "name"):
            whole.setdefault(name, []).append(value)
        elif isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif old is None:
            whole[name] = value
        elif isinstance(value, str | list):
            whole[name] = old + value
        else:
            whole[name] = value
