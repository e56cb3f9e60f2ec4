"""A node over real sockets, with a sender and a router that do exactly what a test says."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import msgspec

from pdhub.api import Grant, PeerMetadata, Sampling, TransportSpec, WriteOp
from pdhub.config.build import Resolved
from pdhub.config.models import Config
from pdhub.core.digest import landing_digest
from pdhub.node.decode import NodeServer
from pdhub.testing import toy
from pdhub.testing.memory import MemoryTransport
from pdhub.transports.plugin import pdhub_register_transports
from pdhub.wire import control
from pdhub.wire.http import ClaimReply, Frame, LoadReply, NodeInfo

GREEDY = Sampling(temperature=0.0)
PROMPT = tuple(b"the quick brown fox jumps over it")
LENGTH = len(PROMPT)
MEMORY = TransportSpec(name="memory", summary="In one process.", factory=lambda config: MemoryTransport())


def transport_spec(name):
    if name == "memory":
        return MEMORY
    return next(s for s in pdhub_register_transports() if s.name == name)


def plan_for(transport="memory", engine=None, spec=None, handoff=None, landings=None, node=None):
    """The parts of a plan that a node reads."""
    config = Config.model_validate(
        {
            "model": {"name": "toy"},
            "handoff": {"transport": {"type": transport}, **(handoff or {})},
            "pools": [
                {
                    "name": "fast",
                    "engine": {"type": "toy"},
                    "nodes": [{"name": "fast-0", "port": 0, **(node or {})}],
                    "landings": landings,
                }
            ],
            "policy": {"type": "any"},
        }
    )
    found = transport_spec(transport)
    return SimpleNamespace(
        config=config,
        transport=Resolved(found, found.config()),
        pools={"fast": Resolved(spec or toy.pdhub_register_engines()[0], toy.ToyConfig(**(engine or {})))},
        prefill={},
    )


class World:
    """One node; ``claim`` … ``decode`` are the router's calls."""

    def __init__(self, plan):
        self.plan = plan
        self.config = plan.pools["fast"].config
        self.layout = self.config.layout()
        self.node = NodeServer(plan, "fast", plan.config.pools[0].nodes[0])
        self.senders = []

    async def open(self):
        await self.node.start()
        self.http = aiohttp.ClientSession(self.node.url, timeout=aiohttp.ClientTimeout(total=30))
        return self

    async def close(self):
        for sender in self.senders:
            await sender.close()
        await self.http.close()
        await self.node.close()

    async def post(self, path, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data) as reply:
            return reply.status, json.loads(await reply.read())

    async def claim(self, tid, tokens=LENGTH, max_tokens=8, **more):
        body = {
            "transfer_id": tid,
            "request_id": f"r-{tid}",
            "tokens": tokens,
            "max_tokens": max_tokens,
            "fingerprint": self.layout.fingerprint,
            **more,
        }
        status, reply = await self.post("/claim", body)
        return msgspec.convert(reply, ClaimReply) if status == 200 else (status, reply["error"])

    def decode_body(self, claim, prompt=PROMPT, max_tokens=8, **more):
        return {
            "transfer_id": claim.transfer_id,
            "generation": claim.generation,
            "request_id": "r",
            "prompt_token_ids": list(prompt),
            "first_token": toy.generate(prompt, 1, self.config)[0],
            "max_tokens": max_tokens,
            "sampling": {"temperature": 0.0},
            **more,
        }

    async def decode(self, claim, prompt=PROMPT, **more):
        """Frames of a whole stream, or (status, error)."""
        async with self.http.post("/decode", json=self.decode_body(claim, prompt, **more)) as reply:
            body = await reply.read()
            if reply.status != 200:
                return reply.status, json.loads(body)["error"]
            return [msgspec.json.decode(line, type=Frame) for line in body.splitlines()]

    async def cancel(self, tid):
        assert await self.post("/cancel", {"transfer_id": tid, "reason": "test"}) == (200, {})

    async def load(self):
        async with self.http.get("/load") as reply:
            return msgspec.json.decode(await reply.read(), type=LoadReply)

    async def info(self):
        async with self.http.get("/capabilities") as reply:
            return msgspec.json.decode(await reply.read(), type=NodeInfo)

    async def until(self, done, what=""):
        for _ in range(1000):
            if done():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"did not happen: {what}; events {[tuple(e)[1:] for e in self.node.events]}")

    async def until_free(self):
        """Everything came back: leases, landings, slots, the engine's landings, the transport's regions."""
        receiver = self.node.receiver
        await self.until(lambda: not len(receiver.table), "no lease left")
        load = await self.load()
        assert load.leases == {}
        assert load.landings_free == receiver.table.landings.capacity
        await self.until(lambda: receiver.slots.free == receiver.slots.total, "all slots free")
        assert receiver.slots.waiting == 0
        assert receiver.engine._landings == {}
        names = [(e.transfer_id, e.name) for e in self.node.events]
        for tid, name in names:
            if name == "claimed":
                assert names.count((tid, "released")) == 1
        if isinstance(self.node._transport, MemoryTransport):
            assert self.node._transport.regions == {}

    def names(self, tid):
        return [e.name for e in self.node.events if e.transfer_id == tid]

    async def sender(self, **hello):
        sender = Sender(self)
        self.senders.append(sender)
        await sender.connect(**hello)
        return sender

    async def handed_over(self, tid, prompt=PROMPT, sender=None, **claim):
        """Claim, join, write, done."""
        made = await self.claim(tid, tokens=len(prompt), **claim)
        sender = sender or await self.sender()
        accept = await sender.join(made, tokens=len(prompt))
        await asyncio.to_thread(sender.write, accept, prompt)
        await sender.done(made, accept)
        return made

    def expected(self, prompt=PROMPT, max_tokens=8):
        return toy.generate(prompt, max_tokens, self.config)


class Sender:
    """The sending half, by hand."""

    def __init__(self, world):
        self.world = world
        spec = world.plan.transport.spec
        self.transport = spec.factory(world.plan.transport.config)
        self.transport.open()
        self.decoder = control.Decoder()
        self.inbox = []
        self.nbytes = 0
        self.digest = ""

    async def connect(self, **hello):
        host, port = self.world.node.control
        self.reader, self.writer = await asyncio.open_connection(host, port)
        fields = {
            "protocol": control.PROTOCOL,
            "version": "test",
            "sender": "test",
            "transport": self.transport.name,
            "fingerprint": self.world.layout.fingerprint,
        }
        await self.send(control.Hello(**(fields | hello)))
        self.welcome = await self.receive()
        if isinstance(self.welcome, control.Welcome):
            metadata = PeerMetadata(self.welcome.transport, self.welcome.metadata)
            self.peer = await asyncio.to_thread(self.transport.connect, metadata)

    async def send(self, message):
        self.writer.write(message if isinstance(message, bytes) else control.encode(message))
        await self.writer.drain()

    async def receive(self):
        """The next message; None at the end of the connection."""
        while not self.inbox:
            data = await asyncio.wait_for(self.reader.read(65536), 10)
            if not data:
                return None
            self.inbox += self.decoder.feed(data)
        return self.inbox.pop(0)

    async def join(self, claim, tokens=LENGTH, **change):
        fields = {"generation": claim.generation, "rank": 0, "writers": 1, "tokens": tokens} | change
        await self.send(control.Join(claim.transfer_id, **fields))
        return await self.receive()

    def write(self, accept, prompt=PROMPT, flip=False):
        """The whole prompt's KV; blocks, so in a thread."""
        layout, size = self.world.layout, self.world.config.block_tokens
        blocks = layout.groups[0].blocks(len(prompt))
        data = toy.ToyPrefill(self.world.config, None)._chunk(
            toy.kv_entries(prompt, self.world.config.layers), 0, len(prompt)
        )
        self.digest = landing_digest(memoryview(data), layout, blocks * size, len(prompt))
        source = self.transport.allocate(len(data))
        source.view[: len(data)] = data
        if flip:
            source.view[5] ^= 1
        grant = Grant(accept.region_id, accept.nbytes, accept.grant)
        transfer = self.transport.write(self.peer, grant, [WriteOp(source, 0, 0, len(data))])
        state = transfer.wait(10)
        self.transport.unregister(source.id)
        self.nbytes = len(data)
        return state

    async def done(self, claim, accept, digest=None):
        digest = self.digest if digest is None else digest
        await self.send(control.Done(claim.transfer_id, accept.generation, 0, self.nbytes, digest))

    async def leave(self, claim, stopped=True):
        await self.send(control.Leave(claim.transfer_id, claim.generation, 0, "test", stopped))

    def cut(self):
        """The connection breaks without a word."""
        self.writer.transport.abort()

    async def close(self):
        self.writer.close()
        if hasattr(self, "peer"):
            await asyncio.to_thread(self.peer.close)
        await asyncio.to_thread(self.transport.close)


@asynccontextmanager
async def world(**options):
    made = await World(plan_for(**options)).open()
    try:
        yield made
    finally:
        await made.close()


def tokens_of(frames):
    return [t for f in frames for t in f.t or ()]
