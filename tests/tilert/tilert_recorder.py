"""A receiver that keeps what it is told and what was written into it: ``tilert_recorder.py SCRIPT OUT LONGEST``.

It says hello as TileRT's receive server does, with real NIXL memory behind it, but answers as its script says. Script:
a JSON list with one object a connection. ``{}`` accepts; ``{"error": "busy"}`` refuses; ``{"hello": {…}}`` says hello
with other values. After the last connection OUT has the bytes that came over each, and a digest of the memory then.
"""

import base64
import hashlib
import json
import os
import socket
import struct
import sys
from pathlib import Path

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
from tilert_planes import LAYERS, PAGE, PAGE_BYTES

UNTOUCHED = 0xA5


def main(script, out, longest):
    memory = np.full(LAYERS * (longest * (528 + 128) + -(-longest // PAGE) * PAGE_BYTES), UNTOUCHED, np.uint8)
    agent = nixl_agent(f"recorder:{os.getpid()}", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    kv = memory.ctypes.data
    pe = kv + LAYERS * longest * 528
    hello = {
        "magic": "tilert-pd", "protocol_version": 2, "layout_version": 11, "transport": "nixl", "max_seq_len": longest,
        "busy": False, "nixl_meta": base64.b64encode(agent.get_agent_metadata()).decode(), "nixl_dev": 0,
        "senders": 1, "kv_base": kv, "pe_base": pe, "ki_base": pe + LAYERS * longest * 128,
    }  # fmt: skip
    kept = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        for number, how in enumerate(script):
            memory.fill(UNTOUCHED)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(60)
                raw = serve(connection, {**hello, **how.get("hello", {})}, how.get("error"), number)
            kept.append({"bytes": raw.hex(), "memory": hashlib.blake2b(memory, digest_size=16).hexdigest()})
    out.write_text(json.dumps(kept))
    os._exit(0)  # exit handlers of NIXL's libraries crash on some machines


def serve(connection, hello, error, generation):
    """Everything that came over one connection, length prefixes included."""
    tell(connection, hello)
    raw = message = take(connection)
    if message:
        request = json.loads(message[4:])
        named = {"rid": request["rid"], "rank": request["rank"]}
        tell(
            connection,
            {"accepted": error is None, **named, **({"error": error} if error else {"generation": generation})},
        )
    while message:
        message = take(connection)
        raw += message
    return raw


def tell(connection, document):
    data = json.dumps(document).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def take(connection):
    """One message with its prefix; empty at the end."""
    head = exactly(connection, 4)
    return head + exactly(connection, struct.unpack("!I", head)[0]) if len(head) == 4 else head


def exactly(connection, size):
    data = b""
    while len(data) < size:
        try:
            piece = connection.recv(size - len(data))
        except ConnectionResetError:
            break
        if not piece:
            break
        data += piece
    return data


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
