"""One request's life in an embedded prefill instance: tokenise, join, compute and send, answer, finish.

Refusals cost nothing: the length is checked and the landing joined before anything is computed. The answer leaves
with the first token; the last writes and the done message follow in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from pdhub.api.errors import (
    AdmissionRejected,
    EngineFailed,
    InvalidRequest,
    LeaseExpired,
    RequestCancelled,
    RequestError,
    TransferFailed,
)
from pdhub.api.prefill import FirstToken, KVChunk, PrefillEngine, PrefillInfo, PrefillRequest
from pdhub.node.prefill_answer import document
from pdhub.node.prefill_job import Job
from pdhub.node.prefill_metrics import PrefillMetrics
from pdhub.node.prefill_request import LegRequest
from pdhub.node.prefill_turns import Turns
from pdhub.sender import LandingTooSmall, Sender, Session
from pdhub.wire.control import RefusedCode
from pdhub.wire.errors import context_length_message

log = logging.getLogger("pdhub.prefill")

T = TypeVar("T")

STALL_S = 0.05
"""A chunk that finds no staging slot in this time lets the next request compute."""

MOST_OPEN = 8
"""Prefills that may be begun at once: one computes, the others wait for their nodes."""


class PrefillService:
    """See the module's text.

    Args:
        waiting_limit: requests that may wait for their turn; more are refused with 429.
        idle_timeout_s: a node that answers no join and takes no KV for so long is stopped.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        info: PrefillInfo,
        sender: Sender,
        metrics: PrefillMetrics,
        *,
        waiting_limit: int,
        idle_timeout_s: float,
    ) -> None:
        self._engine, self._info, self._sender, self._metrics = engine, info, sender, metrics
        self._limit = waiting_limit
        self._idle_timeout_s = idle_timeout_s
        self._turns = Turns()
        self._stalled = 0
        self._jobs: set[Job] = set()
        self._entering: set[Job] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="pdhub-tokenize")
        self._send_threads = ThreadPoolExecutor(MOST_OPEN, thread_name_prefix="pdhub-prefill-send")
        self._leave_threads = ThreadPoolExecutor(4, thread_name_prefix="pdhub-prefill-leave")

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def waiting(self) -> int:
        """Requests that have not computed anything yet."""
        return len(self._entering)

    @property
    def active(self) -> int:
        """Requests that are not over, hand-overs in the background included."""
        return len(self._jobs)

    def begin(self, request: LegRequest, request_id: str) -> tuple[Job, asyncio.Task[dict[str, Any]]]:
        """Start a request. Stop it with :meth:`Job.stop`; never cancel the task.

        Raises:
            AdmissionRejected: draining, or too many wait.
        """
        if self._draining:
            raise AdmissionRejected("this prefill instance is draining", contended=False)
        # whoever has not computed yet counts, also while it tokenises or joins
        if len(self._entering) >= self._limit + (not self._turns.taken):
            raise AdmissionRejected("too many requests wait for this prefill instance", retry_after_s=1.0)
        job = Job(self._leave)
        self._jobs.add(job)
        self._entering.add(job)
        self._idle.clear()
        task = self._spawn(self._run(job, request, request_id))
        return job, task

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones. True if all ended in time."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop every request and end the threads. The engine and the sender stay the caller's."""
        self._draining = True
        for job in list(self._jobs):
            job.stop(RequestCancelled("this prefill instance is closing"))
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        for pool in (self._text_thread, self._send_threads, self._leave_threads):
            await asyncio.to_thread(pool.shutdown)

    async def _run(self, job: Job, request: LegRequest, request_id: str) -> dict[str, Any]:
        started, outcome, handed_over = time.monotonic(), "failed", False
        try:
            prompt = await self._text(self._engine.tokenize, request.body)
            self._check_length(prompt, request.prompt_member)
            job.check()
            if request.handoff is not None:
                await self._join(job, request, len(prompt))
            first = await self._compute(job, request, request_id, prompt)
            job.check()
            if job.session is not None:
                self._spawn(self._finish(job, job.session))
                handed_over = True
            eos = self._info.eos_token_ids
            answer = await self._text(document, request, request_id, prompt, first, self._engine.decode_text, eos)
            outcome = "ok"
            self._metrics.prompt_tokens.inc(len(prompt))
            return answer
        except RequestCancelled:
            outcome = "cancelled"
            raise
        except (InvalidRequest, LandingTooSmall):
            outcome = "refused"
            raise
        finally:
            self._metrics.ended(outcome, time.monotonic() - started)
            if not handed_over:
                if job.session is not None:
                    self._leave(job.session, "the prefill failed")
                self._over(job)

    def _check_length(self, prompt: tuple[int, ...], member: str) -> None:
        limit = self._info.capabilities.max_context
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param=member)
        if len(prompt) + 1 > limit:
            message = context_length_message(limit, len(prompt), 1)
            raise InvalidRequest(message, param=member, code=RefusedCode.CONTEXT)

    async def _join(self, job: Job, request: LegRequest, tokens: int) -> Session:
        assert request.handoff is not None, "only a hand-over joins"
        joined = self._sender.begin_join(request.handoff, tokens, on_end=job.stop_soon)
        try:
            return await job.join(joined, min(self._idle_timeout_s, request.handoff.budget_s))
        except TimeoutError:
            raise TransferFailed("the node did not answer in time") from None
        except InvalidRequest as error:  # the sender does not know how the client wrote the prompt
            raise InvalidRequest(error.message, param=request.prompt_member, code=error.code) from error

    async def _compute(self, job: Job, request: LegRequest, request_id: str, prompt: tuple[int, ...]) -> FirstToken:
        asked = PrefillRequest(
            transfer_id=request.handoff.transfer_id if request.handoff else request_id,
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=request.sampling,
            logprobs=request.logprobs,
            first_mask_ids=request.first_mask(self._info.eos_token_ids),
        )
        await job.until(self._turns.take())
        self._entering.discard(job)
        try:
            return await self._chunks(job, asked)
        except (RequestError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.exception("prefill of %s failed", request_id)
            raise EngineFailed("the prefill engine failed") from error
        finally:
            self._turns.give()

    async def _chunks(self, job: Job, asked: PrefillRequest) -> FirstToken:
        async with aclosing(self._engine.prefill(asked)) as items:  # type: ignore[type-var]
            job.check()
            # A chunk under way is never cut off: a stop is seen when it is computed.
            async for item in items:
                job.check()
                if isinstance(item, FirstToken):
                    return item
                if job.session is not None:
                    await self._send(job.session, item)
                    job.check()
        raise EngineFailed("the prefill engine gave no first token")

    async def _send(self, session: Session, chunk: KVChunk) -> None:
        """Stage and post a chunk. While its node stalls, somebody else may compute."""
        loop = asyncio.get_running_loop()
        sending = loop.run_in_executor(self._send_threads, session.send, chunk, self._idle_timeout_s)
        done, _ = await asyncio.wait({sending}, timeout=STALL_S)
        if not done and self._stalled < MOST_OPEN - 1:
            self._stalled += 1
            self._metrics.stalls.inc()
            self._turns.give()
            try:
                await asyncio.wait({sending})
            finally:
                self._stalled -= 1
                await self._turns.take(again=True)
        await sending
        self._metrics.kv_bytes.inc(chunk.nbytes)

    async def _finish(self, job: Job, session: Session) -> None:
        """The rest of a hand-over, after the answer."""
        written = session.begin_finish()
        try:
            async with asyncio.timeout(max(0.0, session.deadline - time.monotonic())):
                await asyncio.wrap_future(written)
            self._metrics.handoffs.labels("ok").inc()
        except TimeoutError:
            self._metrics.handoffs.labels("failed").inc()
            log.warning("transfer %s: the KV did not reach the node in time", session.transfer_id)
            job.stop(LeaseExpired("the KV did not reach the node in time"))
        except RequestError as error:
            self._metrics.handoffs.labels("failed").inc()
            level = logging.INFO if session.revoked else logging.WARNING
            log.log(level, "transfer %s: %s", session.transfer_id, error.message)
        finally:
            self._over(job)

    def _over(self, job: Job) -> None:
        self._jobs.discard(job)
        self._entering.discard(job)
        if not self._jobs:
            self._idle.set()

    def _leave(self, session: Session, reason: str) -> None:
        try:
            self._leave_threads.submit(session.fail, reason)
        except RuntimeError:  # closing: the sender fails what is left
            log.debug("transfer %s is left to the sender", session.transfer_id)

    async def _text(self, function: Callable[..., T], *args: Any) -> T:
        """In one thread of its own: a long prompt does not hold the loop, and tokenizers need not be thread-safe."""
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, function, *args)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RequestError):
            log.error("a prefill request failed", exc_info=error)
