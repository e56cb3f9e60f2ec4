"""ASGI middleware of decode servers under test (`--middleware refuse.Refuse`): refuses requests while told to.

`POST /refuse?503` makes every further completion fail with that status, `POST /refuse?0` ends it. vLLM itself says 503
only while it scales; what stands in front of it (rate limits, meshes, gateways) says it at any time.
"""

import json


class Refuse:
    status = 0

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/refuse":
            Refuse.status = int(scope["query_string"])
            await _answer(send, 200, {})
        elif (
            scope["type"] == "http" and Refuse.status and scope["path"].startswith("/v1/") and scope["method"] == "POST"
        ):
            await _answer(send, Refuse.status, {"error": {"message": "refused", "code": Refuse.status}})
        else:
            await self._app(scope, receive, send)


async def _answer(send, status, document):
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(document).encode()})
