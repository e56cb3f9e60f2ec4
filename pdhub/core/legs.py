"""The two-leg rewrite: one request body in, the body of either leg out. Pure functions over bytes.

The decode leg gets exactly what the client sent. The prefill leg gets the same request cut down to one token;
the table of what changes, and why, is :mod:`pdhub.core.members`. An engine's patch (``Call.set``, ``Call.drop``)
comes last. Only the top level is ever rewritten: every member that nobody names keeps its bytes, so numbers of any
size, escapes and unknown fields survive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from pdhub.api.client import Base, Call
from pdhub.api.errors import InvalidRequest
from pdhub.core.members import PREFILL_CAP, PREFILL_DROP, PREFILL_SET, unforced_choice

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def leg_body(call: Call, client: bytes, parsed: Mapping[str, Any], endpoint: str) -> bytes:
    """The body of one described call.

    Args:
        call: what the engine's client described.
        client: the client's body as it came.
        parsed: the same body, parsed.
        endpoint: the path that the client called.

    Returns:
        ``client`` itself (the same object) for ``Base.CLIENT`` without a patch; nothing for GET. Otherwise compact
        JSON with the members in the client's order and new ones at the end. Of duplicate members the last one
        counts, as in the parsed body. A name both dropped and set is set.

    Raises:
        InvalidRequest: ``client`` is no JSON object.
    """
    if call.method == "GET":
        return b""
    if call.base is Base.CLIENT and not call.set and not call.drop:
        return client
    members: dict[str, Any] = {}
    if call.base is not Base.EMPTY:
        members.update(_split(client))
    if call.base is Base.PREFILL:
        changes, gone = prefill_patch(parsed, endpoint)
        _patch(members, changes, gone)
    _patch(members, call.set, call.drop)
    return msgspec.json.encode(members)


def prefill_rewrite(parsed: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    """A parsed body as the prefill leg sends it, before the engine's patch. ``parsed`` stays as it is."""
    members = dict(parsed)
    changes, gone = prefill_patch(parsed, endpoint)
    _patch(members, changes, gone)
    return members


def prefill_patch(parsed: Mapping[str, Any], endpoint: str) -> tuple[dict[str, Any], frozenset[str]]:
    """The host's own patch for the prefill leg: members to set, members to drop."""
    changes = dict(PREFILL_SET)
    changes.update({name: value for name, value in PREFILL_CAP.items() if name in parsed})
    changes.update(unforced_choice(parsed))
    return changes, frozenset(PREFILL_DROP)


def _split(client: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _members.decode(client)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}") from error


def _patch(members: dict[str, Any], changes: Mapping[str, Any], gone: Collection[str]) -> None:
    for name in gone:
        if name not in changes:
            members.pop(name, None)
    members.update(changes)
