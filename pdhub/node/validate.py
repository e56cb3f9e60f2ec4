"""Bytes of a request to a node → checked messages. Everything wrong is an InvalidRequest that names the member."""

from __future__ import annotations

import math
from typing import Annotated, Final, TypeVar

import msgspec

from pdhub.api.engine import DecodeRequest, TokenLogprob
from pdhub.api.errors import InvalidRequest
from pdhub.api.request import Sampling
from pdhub.wire.http import CancelBody, ClaimBody, DecodeBody

T = TypeVar("T", bound=msgspec.Struct)

LONGEST_ID: Final = 128
MAX_ID: Final = (1 << 31) - 1
_TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)], ...]


def parse(data: bytes, kind: type[T]) -> T:
    """JSON → ``kind``."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"bad {kind.__name__}: {error}") from error


def claim_body(data: bytes) -> ClaimBody:
    """Of POST /claim."""
    body = parse(data, ClaimBody)
    _check_id(body.transfer_id)
    _need(1 <= body.tokens <= MAX_ID, "tokens", "must be at least 1")
    _need(0 <= body.max_tokens <= MAX_ID, "max_tokens", "must be at least 1, or 0 for the rest of the context")
    _need(math.isfinite(body.ttl_s) and body.ttl_s > 0, "ttl_s", "must be a positive number of seconds")
    return body


def cancel_body(data: bytes) -> CancelBody:
    """Of POST /cancel."""
    body = parse(data, CancelBody)
    _check_id(body.transfer_id)
    return body


def decode_body(data: bytes) -> tuple[DecodeBody, DecodeRequest]:
    """Of POST /decode, and the engine's request that it stands for."""
    body = parse(data, DecodeBody)
    _check_id(body.transfer_id)
    _need(bool(body.prompt_token_ids), "prompt_token_ids", "must not be empty")
    prompt = _token_ids("prompt_token_ids", body.prompt_token_ids)
    stop = _token_ids("stop_token_ids", body.stop_token_ids)
    _token_ids("first_token", [body.first_token])
    _need(1 <= body.max_tokens <= MAX_ID, "max_tokens", "must be at least 1")
    _need(body.min_tokens >= 0, "min_tokens", "must not be negative")
    _need(body.logprobs is None or body.logprobs >= 0, "logprobs", "must not be negative")
    _need(math.isfinite(body.wait_s) and body.wait_s > 0, "wait_s", "must be a positive number of seconds")
    return body, _request(body, prompt, stop)


def _token_ids(name: str, ids: list[int]) -> tuple[int, ...]:
    """In one call: thousands of ids are read between prefill's answer and the first step."""
    try:
        return msgspec.convert(ids, _TokenIds)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{name} must be token ids", param=name) from None


def _request(body: DecodeBody, prompt: tuple[int, ...], stop: tuple[int, ...]) -> DecodeRequest:
    first = body.first_logprob
    return DecodeRequest(
        transfer_id=body.transfer_id,
        request_id=body.request_id,
        prompt_token_ids=prompt,
        first_token=body.first_token,
        max_tokens=body.max_tokens,
        sampling=_sampling(body),
        first_logprob=None if first is None else TokenLogprob(first[0], first[1], tuple(first[2])),
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=stop,
        logprobs=body.logprobs,
    )


def _sampling(body: DecodeBody) -> Sampling:
    sent = body.sampling
    bias: dict[int, float] = {}
    for key, value in sent.logit_bias.items():
        _need(key.isascii() and key.isdigit() and len(key) < 11, "sampling.logit_bias", "has keys that are no ids")
        bias[int(key)] = value
    return Sampling(
        temperature=sent.temperature,
        top_p=sent.top_p,
        top_k=sent.top_k,
        min_p=sent.min_p,
        presence_penalty=sent.presence_penalty,
        frequency_penalty=sent.frequency_penalty,
        repetition_penalty=sent.repetition_penalty,
        seed=sent.seed,
        logit_bias=bias,
    )


def _check_id(transfer_id: str) -> None:
    _need(0 < len(transfer_id) <= LONGEST_ID, "transfer_id", f"must have 1 to {LONGEST_ID} characters")


def _need(fine: bool, param: str, text: str) -> None:
    if not fine:
        raise InvalidRequest(f"{param} {text}", param=param)
