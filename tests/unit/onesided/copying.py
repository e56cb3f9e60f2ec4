"""A one-sided library in thirty lines, for tests: the writer's kernel copies to an address in the target's process
(``process_vm_writev``). As rightless as the real ones: deregistering stops nobody."""

import ctypes
import os
import struct
from typing import ClassVar

from pdhub.api import TransferFailed, TransportSpec, hookimpl
from pdhub.onesided import Native, OneSidedConfig, OneSidedTransport, Route, Sending

libc = ctypes.CDLL(None, use_errno=True)


class Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def copy(pid, source, target, nbytes):
    """Raises TransferFailed if the target's process is gone or has nothing there."""
    local, remote = Range(source, nbytes), Range(target, nbytes)
    done = libc.process_vm_writev(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if done != nbytes:
        raise TransferFailed(f"{done} of {nbytes} bytes copied: {os.strerror(ctypes.get_errno())}")


class Copied(Sending):
    def poll(self):
        return True


class CopyRoute(Route):
    def __init__(self, pid):
        self.pid = pid
        self.learned = []
        self.closed = 0

    def learn(self, memory):
        self.learned.append(memory)

    def post(self, pieces):
        for piece in pieces:
            copy(self.pid, piece.source, piece.target, piece.nbytes)
        return Copied()

    def close(self):
        self.closed += 1


class CopyNative(Native):
    remote = False
    routes: ClassVar[list] = []

    def open(self):
        self.registered = set()

    def describe(self):
        return struct.pack("<q", os.getpid())

    def connect(self, description):
        self.routes.append(CopyRoute(*struct.unpack("<q", description)))
        return self.routes[-1]

    def register(self, address, nbytes, device):
        self.registered.add((address, nbytes))
        return address, nbytes

    def describe_memory(self, handle):
        return struct.pack("<qq", *handle)

    def deregister(self, handle):
        self.registered.remove(handle)

    def close(self):
        self.registered.clear()


def transport(config):
    return OneSidedTransport("copying", CopyNative(), config, "nothing else")


SPEC = TransportSpec(name="copying", summary="process_vm_writev", config=OneSidedConfig, factory=transport)


@hookimpl
def pdhub_register_transports():
    return [SPEC]
