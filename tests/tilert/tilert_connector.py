"""The side of TileRT's stock connector, without vLLM: what it says, in which order, and where it writes.

Written from the wire protocol: one connection a (request, rank); hello, request, accept or reject, one-sided writes,
done. Rejections that pass are tried again, five times, after 0.2, 0.4 … seconds.
"""

import base64
import json
import os
import socket
import struct
import time

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
from tilert_planes import LAYERS, PAGE_BYTES, planes

ATTEMPTS = 5
BACKOFF_S = 0.2
PASSING = {"busy", "cancelling"}
LAYOUT_VERSION = 11
"""DeepSeek-V3.2 with an fp8 cache."""


def rid_of(engine_id):
    """The key that both sides derive from vLLM's internal request id."""
    rid = engine_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    head, _, tail = rid.rpartition("-")
    if head and len(tail) <= 8 and all(c in "0123456789abcdef" for c in tail):
        rid = head
    head, _, tail = rid.rpartition("-")
    return head if head and tail.isdigit() and len(tail) <= 3 else rid


def send(connection, message):
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive(connection):
    (size,) = struct.unpack("!I", _exactly(connection, 4))
    return json.loads(_exactly(connection, size))


def _exactly(connection, size):
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("closed in the middle of a message")
        data += piece
    return data


class Connector:
    """One prefill rank with one staging area, as in TileRT: the next request overwrites what the last one left."""

    def __init__(self, longest):
        self._agent = nixl_agent(f"producer:{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        pages = -(-longest // 64)
        self._staging = np.zeros(LAYERS * (longest * (528 + 128) + pages * PAGE_BYTES), np.uint8)
        self._agent.register_memory([(self._staging.ctypes.data, self._staging.nbytes, 0, "")], "DRAM")
        self._peers = {}

    def send(self, engine_id, prompt, host, port, *, before_done=lambda: None, twice=False, repetition_penalty=1.0):
        """Hand over one prompt's KV. Returns what the node said: ``sent``, or the error of its refusal.

        Args:
            before_done: called when everything is written but ``done`` is not sent. twice: once more, afterwards.
            repetition_penalty: of the request; other than 1 the node needs the prompt's tokens.
        """
        rid, pause = rid_of(engine_id), BACKOFF_S
        more = {} if repetition_penalty == 1.0 else {"prompt_token_ids": prompt}
        for attempt in range(ATTEMPTS):
            told = self._once(rid, prompt, host, port, before_done, more)
            if told not in PASSING:
                break
            if attempt < ATTEMPTS - 1:
                time.sleep(pause)
                pause *= 2
        if twice and told == "sent":
            told = self._once(rid, prompt, host, port, lambda: None, more)
        return told

    def _once(self, rid, prompt, host, port, before_done, more):
        with socket.create_connection((host, port), timeout=60) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = receive(connection)
            assert (hello["magic"], hello["protocol_version"]) == ("tilert-pd", 2), hello
            assert (hello["layout_version"], hello["senders"]) == (LAYOUT_VERSION, 1), hello
            assert hello["transport"] == "nixl", hello
            assert len(prompt) <= hello["max_seq_len"], hello
            window = BACKOFF_S * (2 ** (ATTEMPTS - 1) - 1)
            request = {
                "rid": rid, "rank": 0, "seq_len": len(prompt), "last_prompt_token": prompt[-1], "sampling": None,
                "admission_window_s": window, **more,
            }  # fmt: skip
            send(connection, request)
            reply = receive(connection)
            if not reply.get("accepted"):
                return reply["error"]
            self._write(hello, prompt)
            before_done()
            send(connection, {"done": True, "rid": rid, "rank": 0, "generation": reply["generation"]})
        return "sent"

    def _write(self, hello, prompt):
        """Three writes a layer, from the staging area to where the hello says."""
        sources, targets, at, longest = [], [], 0, hello["max_seq_len"]
        strides = {"kv": longest * 528, "pe": longest * 128, "ki": -(-longest // 64) * PAGE_BYTES}
        for name, plane in zip(("kv", "pe", "ki"), planes(prompt), strict=True):
            for layer in range(LAYERS):
                data = plane[layer].reshape(-1)
                self._staging[at : at + data.size] = data
                sources.append((self._staging.ctypes.data + at, data.size, 0))
                targets.append((hello[f"{name}_base"] + layer * strides[name], data.size, hello["nixl_dev"]))
                at += data.size
        peer = self._peer(base64.b64decode(hello["nixl_meta"]))
        local = self._agent.get_xfer_descs(sources, "DRAM")
        remote = self._agent.get_xfer_descs(targets, "DRAM")
        handle = self._agent.initialize_xfer("WRITE", local, remote, peer)
        state = self._agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            time.sleep(0.0005)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        assert state == "DONE"

    def _peer(self, metadata):
        if metadata not in self._peers:
            self._peers[metadata] = self._agent.add_remote_agent(metadata)
        return self._peers[metadata]
