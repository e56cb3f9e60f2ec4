"""Reading a request's body, for both kinds of node."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from pdhub.api.errors import RequestCancelled
from pdhub.wire.errors import BodyTooLarge


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge beyond ``limit`` bytes, RequestCancelled if the caller went away."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise BodyTooLarge(f"the body is larger than {limit} bytes")
    except ClientDisconnect as error:
        raise RequestCancelled("the connection was dropped while the body was read") from error
    return bytes(body)
