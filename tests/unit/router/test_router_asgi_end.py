"""The server reports a disconnect when an answer is complete; that is no client that left."""

import asyncio

from pdhub.router.asgi import CompletionEndpoint


class SlowToFinish:
    """A service whose bookkeeping yields after the answer was sent."""

    outcome = "running"

    async def serve(self, path, headers, body, sink):
        try:
            await sink.start(200, {})
            await sink.write(b"{}")
            await sink.end()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.outcome = "ok"
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise


async def test_the_end_of_an_answer_is_no_disconnect():
    complete = asyncio.Event()
    sent = []

    async def receive():
        if not sent and not complete.is_set() and not receive.asked:
            receive.asked = True
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await complete.wait()
        return {"type": "http.disconnect"}

    receive.asked = False

    async def send(message):
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            complete.set()

    service = SlowToFinish()
    endpoint = CompletionEndpoint(service, "/v1/completions", 1000)
    await endpoint({"headers": []}, receive, send)
    assert service.outcome == "ok"
