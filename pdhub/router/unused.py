"""KV memory of a decode node that nobody uses and, it seems, nobody will ever free. Sans-IO.

Where decode takes memory before prefill has written there, some engines keep it when the write never comes: vLLM's
NixlPushConnector for ever, its Mooncake connector for a while. No call frees it. What can be seen is an engine that
runs nothing, for which nothing waits, and that holds KV all the same.
"""

from __future__ import annotations

from pdhub.api.engine import EngineLoad

WORTH_WAITING_S = 60.0
"""An engine that lets go by itself within this time is left to do so."""


class Unused:
    """What one probe after the other tells of one node.

    Args:
        after_s: how long nothing must happen there.
        lets_go_s, lets_go_lost_s: as :class:`pdhub.api.client.EngineClient` declares them.
    """

    def __init__(self, after_s: float, lets_go_s: float = 0.0, lets_go_lost_s: float = 0.0) -> None:
        self._after_s = after_s
        self._lets_go_s = lets_go_s
        self._lets_go_lost_s = lets_go_lost_s
        self._lost = False
        self._since: float | None = None
        self.usage = 0.0

    def seen(self, load: EngineLoad, busy: bool, now: float) -> None:
        """A probe was answered.

        Args:
            load: what it told. What is unknown proves nothing.
            busy: something of the router's own is there, was since the last probe, or is still to come.
        """
        if load.running is None or load.waiting is None or load.kv_usage is None:
            self._since = None
            return
        usage, before = load.kv_usage, self.usage
        self.usage = usage
        if not usage:
            self._lost = False
        if busy or load.running or load.waiting or not usage:
            self._since = None
        elif self._since is None or usage != before:  # a change is a sign of somebody at work
            self._since = now

    def lost(self) -> None:
        """A prefill instance that may write there is gone. Remembered until the node holds nothing."""
        self._lost = True

    def void(self) -> None:
        """The process is gone, and what was known of it."""
        self._since, self._lost, self.usage = None, False, 0.0

    @property
    def quiet(self) -> bool:
        """At the last probe: KV is held, and nothing runs, waits, or has happened since the one before."""
        return self._since is not None

    def stranded_s(self, now: float) -> float | None:
        """For how long it has been certain that nobody uses what is held; None while it is not."""
        lets_go_s = self._lets_go_lost_s if self._lost else self._lets_go_s
        patience_s = self._after_s + (lets_go_s if lets_go_s <= WORTH_WAITING_S else 0.0)
        if self._since is None or now - self._since < patience_s:
            return None
        return now - self._since - patience_s
