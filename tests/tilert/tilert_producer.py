"""A prefill instance without a model: vLLM's API, and a connector that hands over made-up KV.

``POST /script`` sets how the next hand-overs go: ``compute_s``, ``write_s`` (between the bytes and done), ``lose`` (no
hand-over at all), ``twice``. ``GET /seen`` tells what was computed, sent and broken off.
"""

import asyncio
import json
import secrets
import sys
import threading
import time

from aiohttp import web
from tilert_connector import Connector
from tilert_planes import EOS, answer_of, first_of


class Producer:
    def __init__(self, longest):
        self.longest = longest
        self.connector = Connector(longest)
        self.script = {}
        self.computed, self.left, self.told, self.most = [], 0, {}, 0
        self._jobs = asyncio.Queue()
        self._staged = set()  # prompts whose KV lies in the one staging area until it is written to the node

    async def models(self, request):
        card = {"id": "m", "object": "model", "max_model_len": self.longest, "owned_by": "vllm"}
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request):
        return web.Response(text="", content_type="text/plain")

    async def set_script(self, request):
        self.script = await request.json()
        self.most, self.told = len(self._staged), {}
        return web.json_response({})

    async def seen(self, request):
        seen = {"computed": self.computed, "left": self.left, "told": self.told, "most": self.most}
        return web.json_response({**seen, "staged": len(self._staged)})

    async def serve(self, request):
        body, script = await request.json(), dict(self.script)
        chat = request.path.endswith("chat/completions")
        prompt = _ids(body, chat)
        base = ("chatcmpl-" if chat else "cmpl-") + request.headers["x-request-id"]
        engine_id = f"{base}{'' if chat else '-0'}-{secrets.token_hex(4)}"
        try:
            await asyncio.sleep(script.get("compute_s", 0))
        except asyncio.CancelledError:
            self.left += 1
            raise
        self.computed.append({"body": body, "prompt": prompt})
        params = body.get("kv_transfer_params") or {}
        if params.get("tilert_host") and not script.get("lose"):
            self._staged.add(engine_id)
            self.most = max(self.most, len(self._staged))
            self._jobs.put_nowait((engine_id, prompt, params, body.get("repetition_penalty", 1.0), script))
        if not params:
            return web.json_response(_alone(base, body, prompt))
        return web.json_response(_answer(base, body, prompt, chat))

    async def send(self):
        """One hand-over after the other, as the connector's one thread does."""
        loop = asyncio.get_running_loop()
        while True:
            engine_id, prompt, params, penalty, script = await self._jobs.get()
            told = loop.create_future()
            job = (loop, told, engine_id, prompt, params, penalty, script)
            threading.Thread(target=self._send, args=job).start()
            self.told[engine_id] = await told

    def _send(self, loop, told, engine_id, prompt, params, penalty, script):
        def written():
            self._staged.discard(engine_id)
            time.sleep(script.get("write_s", 0))

        try:
            said = self.connector.send(
                engine_id,
                prompt,
                params["tilert_host"],
                params["tilert_ctrl_port"],
                before_done=written,
                twice=script.get("twice", False),
                repetition_penalty=penalty,
            )
        except Exception as error:  # noqa: BLE001  as the connector: it is logged and nobody else hears of it
            said = f"{type(error).__name__}: {error}"
        self._staged.discard(engine_id)
        loop.call_soon_threadsafe(told.set_result, said)


def _ids(body, chat):
    if not chat:
        return list(body["prompt"].encode()) if isinstance(body["prompt"], str) else body["prompt"]
    return list("".join(f"<{m['role']}>{m['content']}" for m in body["messages"]).encode())


def _alone(base, body, prompt):
    """The whole completion, as one server gives it that decodes by itself."""
    tokens, reason = answer_of(prompt, body["max_tokens"])
    choice = {"index": 0, "text": bytes(tokens).decode(), "finish_reason": reason, "token_ids": tokens}
    return {"id": base, "object": "text_completion", "model": body["model"], "choices": [choice]}


def _answer(base, body, prompt, chat):
    first = first_of(prompt)
    text = "" if first == EOS else chr(first)
    choice = {"index": 0, "finish_reason": "length", "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    if body.get("logprobs"):
        name, top = f"token_id:{first}", [{"token": f"token_id:{first}", "logprob": -0.125, "bytes": None}]
        chats = {"content": [{"token": name, "logprob": -0.125, "bytes": None, "top_logprobs": top}]}
        texts = {"tokens": [name], "token_logprobs": [-0.125], "top_logprobs": [{name: -0.125}], "text_offset": [0]}
        choice["logprobs"] = chats if chat else texts
    out = {"id": base, "object": "chat.completion" if chat else "text_completion", "created": 1, "model": body["model"]}
    out |= {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1}}
    if body.get("return_token_ids"):
        choice["token_ids"] = [first]
        (out if chat else choice)["prompt_token_ids"] = prompt
    return out


async def main(port, longest):
    producer = Producer(longest)
    app = web.Application()
    app.router.add_get("/v1/models", producer.models)
    app.router.add_get("/metrics", producer.metrics)
    app.router.add_get("/seen", producer.seen)
    app.router.add_post("/script", producer.set_script)
    app.router.add_post("/v1/completions", producer.serve)
    app.router.add_post("/v1/chat/completions", producer.serve)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(json.dumps({"ready": port}), flush=True)
    await producer.send()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
