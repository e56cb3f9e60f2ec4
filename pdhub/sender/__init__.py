"""The sending half of a KV handoff: join landings, stage chunks, write, say done.

Synchronous and thread-safe, without an event loop: the embedded prefill host and a connector inside another
server's worker process use the same code. It knows only the wire and the contract.
"""

from pdhub.sender.errors import LandingTooSmall
from pdhub.sender.sender import Sender, SenderStats
from pdhub.sender.session import Session

__all__ = ["LandingTooSmall", "Sender", "SenderStats", "Session"]
