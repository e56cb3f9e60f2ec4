"""One body of the prefill leg: checked, and turned into what the engine and the sender take."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pdhub.api.engine import Capabilities
from pdhub.api.errors import InvalidRequest, ModelNotFound
from pdhub.api.prefill import PrefillInfo
from pdhub.api.request import Feature, Sampling
from pdhub.node.prefill_members import CHAT, COMPLETIONS, INERT, NEUTRAL, READ
from pdhub.wire.http import HANDOFF_KEY, HandoffParams

_NUMBERS = {  # name: (lowest, highest, whether the lowest itself is allowed)
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 100.0, False),
}


@dataclass(frozen=True, slots=True)
class LegRequest:
    """A checked body.

    Args:
        body: for the engine's ``tokenize``; a single prompt is unwrapped.
        logprobs: alternatives asked for; None = none at all.
        min_tokens, stop_token_ids: the client's, from the hand-over's parameters or the body.
    """

    chat: bool
    model: str
    body: Mapping[str, Any]
    sampling: Sampling
    logprobs: int | None
    handoff: HandoffParams | None
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    return_token_ids: bool
    tokens_as_ids: bool

    @property
    def prompt_member(self) -> str:
        """Where the client put the prompt."""
        return "messages" if self.chat else "prompt"

    def first_mask(self, eos: Collection[int]) -> tuple[int, ...]:
        """Ids that must not come first, because the sequence may not end with them yet."""
        return (*eos, *self.stop_token_ids) if self.min_tokens else ()


def parse(raw: bytes, *, chat: bool, models: Collection[str], info: PrefillInfo) -> LegRequest:
    """Read a body. Raises InvalidRequest naming the member at fault, or ModelNotFound."""
    body = _decode(raw)
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequest("model is required", param="model")
    if model not in models:
        raise ModelNotFound(f"the model `{model[:200]}` does not exist", param="model")
    _check_members(body, chat)
    _check_limit(body)
    handoff = _handoff(body.get("kv_transfer_params"))
    request = LegRequest(
        chat=chat,
        model=model,
        body=_prompt(body, chat),
        sampling=_sampling(body, info),
        logprobs=_logprobs(body, chat, info.capabilities),
        handoff=handoff,
        min_tokens=handoff.min_tokens if handoff else _integer(body, "min_tokens", 0, 1),
        stop_token_ids=tuple(handoff.stop_token_ids if handoff else _ids(body, "stop_token_ids")),
        ignore_eos=_flag(body, "ignore_eos"),
        return_token_ids=_flag(body, "return_token_ids"),
        tokens_as_ids=_flag(body, "return_tokens_as_token_ids"),
    )
    if request.min_tokens and Feature.MIN_TOKENS not in info.capabilities.features:
        raise InvalidRequest("this prefill instance does not support min_tokens", param="min_tokens")
    return request


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return {name: value for name, value in body.items() if value is not None}  # null counts as absent


def _check_members(body: Mapping[str, Any], chat: bool) -> None:
    prompt = CHAT if chat else COMPLETIONS
    for name, value in body.items():
        if name in NEUTRAL:
            if not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[name]):
                raise InvalidRequest(f"this prefill instance does not support {name} with this value", param=name)
        elif name not in READ and name not in INERT and name not in prompt:
            raise InvalidRequest(f"this prefill instance does not support {name}", param=name)
    for name in ("tool_choice", "function_call"):
        if body.get(name, "auto") not in ("auto", "none"):
            raise InvalidRequest(f"this prefill instance cannot force a call: {name} must be auto or none", param=name)


def _check_limit(body: Mapping[str, Any]) -> None:
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if type(body.get(name)) is not int or body[name] != 1:
        raise InvalidRequest(f"this is a prefill instance, it generates one token: {name} must be 1", param=name)


def _handoff(params: Any) -> HandoffParams | None:
    if params is None:
        return None
    if not isinstance(params, dict) or set(params) != {HANDOFF_KEY}:
        message = f"kv_transfer_params must have the one member {HANDOFF_KEY}"
        raise InvalidRequest(message, param="kv_transfer_params")
    try:
        handoff = msgspec.convert(params[HANDOFF_KEY], HandoffParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"kv_transfer_params.{HANDOFF_KEY}: {error}", param="kv_transfer_params") from error
    if not (0 < handoff.budget_s < math.inf and 0 < handoff.port < 65536 and handoff.transfer_id):
        raise InvalidRequest(f"kv_transfer_params.{HANDOFF_KEY} is incomplete", param="kv_transfer_params")
    return handoff


def _prompt(body: dict[str, Any], chat: bool) -> Mapping[str, Any]:
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be an array that is not empty", param="messages")
        return body
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise InvalidRequest("this prefill instance takes one prompt a request", param="prompt")
        prompt = prompt[0]
    ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt)
    if not (isinstance(prompt, str) or ids):
        raise InvalidRequest("prompt must be a string or an array of token ids", param="prompt")
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    return {**body, "prompt": prompt}


def _sampling(body: Mapping[str, Any], info: PrefillInfo) -> Sampling:
    features, defaults = info.capabilities.features, dict(info.sampling_defaults)
    if Feature.SAMPLING not in features:
        defaults.setdefault("temperature", 0.0)
    picked: dict[str, Any] = {name: float(defaults[name]) for name in _NUMBERS if name in defaults}
    for name, limits in _NUMBERS.items():
        if name in body:
            picked[name] = _number(body[name], name, *limits)
    picked["top_k"] = max(0, _integer({"top_k": defaults.get("top_k", 0), **body}, "top_k", -1, 1 << 31))
    picked["seed"] = _integer(body, "seed", -(1 << 63), (1 << 63) - 1) if "seed" in body else None
    picked["logit_bias"] = _bias(body.get("logit_bias", {}))
    sampling = Sampling(**picked)
    _check_features(sampling, features)
    return sampling


def _check_features(s: Sampling, features: Collection[Feature]) -> None:
    random = s.temperature > 0
    for name, feature, asked in (
        ("temperature", Feature.SAMPLING, random),
        ("top_k", Feature.TOP_K, random and s.top_k > 0),
        ("min_p", Feature.MIN_P, random and s.min_p > 0),
        ("seed", Feature.SEED, random and s.seed is not None),
        ("presence_penalty", Feature.PRESENCE_PENALTY, s.presence_penalty != 0),
        ("frequency_penalty", Feature.FREQUENCY_PENALTY, s.frequency_penalty != 0),
        ("repetition_penalty", Feature.REPETITION_PENALTY, s.repetition_penalty != 1),
        ("logit_bias", Feature.LOGIT_BIAS, bool(s.logit_bias)),
    ):
        if asked and feature not in features:
            raise InvalidRequest(f"this prefill instance does not support {name}", param=name)


def _logprobs(body: Mapping[str, Any], chat: bool, capabilities: Capabilities) -> int | None:
    if chat:
        if not _flag(body, "logprobs"):
            if body.get("top_logprobs"):
                raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
            return None
        name, count = "top_logprobs", _integer(body, "top_logprobs", 0, 1 << 20)
    else:
        if "logprobs" not in body:
            return None
        name, count = "logprobs", _integer(body, "logprobs", 0, 1 << 20)
    if Feature.LOGPROBS not in capabilities.features:
        raise InvalidRequest("this prefill instance does not support logprobs", param="logprobs")
    if count > capabilities.max_logprobs:
        raise InvalidRequest(f"{name} must be at most {capabilities.max_logprobs}", param=name)
    return count


def _number(value: Any, name: str, low: float, high: float, closed: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a number", param=name)
    if not low <= value <= high or (value == low and not closed):
        raise InvalidRequest(
            f"{name} must be {'at least' if closed else 'above'} {low:g}, at most {high:g}", param=name
        )
    return float(value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = body.get(name, 0)
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return value


def _ids(body: Mapping[str, Any], name: str) -> list[int]:
    value = body.get(name, [])
    if not isinstance(value, list) or any(type(token) is not int or token < 0 for token in value):
        raise InvalidRequest(f"{name} must be an array of token ids", param=name)
    return value


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and k.isascii() and k.isdigit() for k in value):
        raise InvalidRequest("logit_bias must be an object of token ids and numbers", param="logit_bias")
    return {int(k): _number(v, "logit_bias", -100.0, 100.0, True) for k, v in value.items()}
