"""The scheduler's side: which requests are ours, how far they are, and whose blocks vLLM must keep.

No I/O and no vLLM: its objects are only looked at. It lives in the engine's scheduler thread, so every call is a few
dictionary operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdhub.connector.match import match
from pdhub.connector.steps import Advance, End, Failure, Report, Start, Step, Table
from pdhub.wire.http import HANDOFF_KEY


@dataclass(slots=True)
class _Entry:
    tokens: int
    transfer_id: str
    failure: Failure | None = None
    computed: int = 0
    scheduled: bool = False


class Ledger:
    """See the module's text. Requests that are not ours leave no trace in it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._starts: dict[str, Start] = {}
        self._ends: list[End] = []
        self._held: set[str] = set()

    @property
    def pending(self) -> bool:
        """Workers have still to be told something, or to report blocks that vLLM holds for us: the engine must go on
        stepping although it has no request."""
        return bool(self._held or self._ends)

    def arrived(self, req_id: str, kv_transfer_params: Any, tokens: int) -> None:
        """A request came to vLLM, whoever it is for. ``tokens``: of its prompt."""
        found = match(kv_transfer_params, tokens)
        if found is None or req_id in self._entries:
            return
        if isinstance(found, Failure):
            self._entries[req_id] = _Entry(tokens, "", found)
            return
        self._entries[req_id] = _Entry(tokens, found.transfer_id)
        self._starts[req_id] = Start(req_id, found, tokens)

    def step(self, output: Any) -> Step:
        """What the workers must know about one step.

        Args:
            output: vLLM's ``SchedulerOutput``.
        """
        starts, self._starts = tuple(self._starts.values()), {}
        ends, self._ends = tuple(self._ends), []
        preempted = tuple(r for r in getattr(output, "preempted_req_ids", None) or () if r in self._entries)
        for req_id in preempted:
            self._entries[req_id].computed = 0
        return Step(preempted, ends, starts, tuple(self._advances(output)) if self._entries else ())

    def _advances(self, output: Any) -> Iterable[Advance]:
        scheduled: Mapping[str, int] = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            # also a request that comes back after a preemption, with the newer model runner
            yield from self._advance(new.req_id, new.block_ids, True, new.num_computed_tokens, scheduled)
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            fresh = req_id in cached.resumed_req_ids
            blocks, before = cached.new_block_ids[index], cached.num_computed_tokens[index]
            yield from self._advance(req_id, blocks or (), fresh, before, scheduled)

    def _advance(
        self, req_id: str, blocks: Iterable[Iterable[int]], fresh: bool, before: int, scheduled: Mapping[str, int]
    ) -> Iterable[Advance]:
        entry = self._entries.get(req_id)
        if entry is None or entry.failure is not None:
            return
        if entry.scheduled and not fresh and entry.computed >= entry.tokens:
            return  # its prompt is through: output tokens are none of ours
        entry.scheduled = True
        entry.computed = min(before + scheduled.get(req_id, 0), entry.tokens)
        table: Table = tuple(tuple(ids) for ids in blocks)
        yield Advance(req_id, table, fresh, min(before, entry.tokens), entry.computed)

    def finished(self, req_id: str) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is about to free a request.

        Returns:
            whether it must keep the blocks until every worker has reported the request, and what the answer's
            ``kv_transfer_params`` say.
        """
        entry = self._entries.pop(req_id, None)
        if entry is None:
            return False, None
        told: dict[str, Any] = {"transfer_id": entry.transfer_id, "tokens": entry.tokens}
        if entry.failure is not None:
            told["error"] = {"code": entry.failure.code, "message": entry.failure.message, "need": entry.failure.need}
        if self._starts.pop(req_id, None) is None and entry.transfer_id:
            complete = entry.computed >= entry.tokens
            self._ends.append(End(req_id, entry.scheduled, complete))
            if entry.scheduled:
                self._held.add(req_id)
        return req_id in self._held, {HANDOFF_KEY: told}

    def reported(self, report: Report | None, sent: Iterable[str]) -> None:
        """What came back from the workers.

        Args:
            sent: requests that every worker has reported; vLLM frees their blocks now.
        """
        self._held.difference_update(sent)
        for req_id, failure in (report.failures if report is not None else {}).items():
            entry = self._entries.get(req_id)
            if entry is not None and entry.failure is None:
                entry.failure = failure
