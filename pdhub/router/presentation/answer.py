"""One answer's text, token by token: where it is cut, why it ended, and which tokens count. No OpenAI shapes here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdhub.api.engine import Finished, FinishReason, TokenChunk, TokenLogprob
from pdhub.api.errors import EngineFailed
from pdhub.router.presentation.logprobs import Entry
from pdhub.router.presentation.options import Options
from pdhub.router.presentation.pieces import Pieces
from pdhub.router.presentation.shape import Ending
from pdhub.router.presentation.stop import StopMatcher
from pdhub.router.presentation.text import TextDecoder


class Answer:
    """Fed with an engine's items; gives text that may be shown, and the entries of the tokens that belong to it.

    Its text in pieces, for a parser, is in ``pieces`` if that is given.

    A token that may end the answer (end of sequence, stop id) is held until it is known whether it did: its text is
    shown only if the engine went on. ``count`` is of tokens up to and including the one that ended the answer;
    ``last_held`` says that this one was known to be the last when it was shown, or not.
    """

    def __init__(
        self,
        text: TextDecoder,
        options: Options,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Collection[int],
        pieces: Pieces | None = None,
    ) -> None:
        self._options = options
        self._pieces = pieces
        self._stream = text.stream(skip_special_tokens=options.skip_special_tokens, after=prompt_token_ids)
        self._stops = StopMatcher(options.stop, include=options.include_stop) if options.stop else None
        self._eos = frozenset() if options.ignore_eos else frozenset(eos_token_ids)
        self._enders = options.stop_token_ids | self._eos
        self._keep_entries = options.logprobs is not None or options.token_ids
        self._entries: list[Entry] = []
        self._held: int | None = None
        self._decoded = 0  # characters that came out of the tokens
        self._shown = 0  # characters given away
        self.count = 0
        self.ending: Ending | None = None
        self.last_held = False

    @property
    def stopped(self) -> bool:
        """A stop string ended it."""
        return self._stops is not None and self._stops.matched is not None

    def feed(self, items: Sequence[TokenChunk | Finished]) -> str:
        """Text that may be shown now. Items after the end are ignored.

        Raises:
            EngineFailed: log probabilities are missing, or the count of tokens is not the engine's own.
        """
        shown = ""
        for item in items:
            if self.ending:
                break
            if isinstance(item, Finished):
                shown += self._finish(item)
                break
            logprobs: Sequence[TokenLogprob | None] = item.logprobs
            if self._options.logprobs is None:
                logprobs = (None,) * len(item.token_ids)
            elif len(logprobs) != len(item.token_ids):
                raise EngineFailed(f"{len(item.token_ids)} tokens came with {len(logprobs)} log probabilities")
            for token_id, logprob in zip(item.token_ids, logprobs, strict=True):
                shown += self._token(token_id, logprob)
                if self.ending:
                    break
        self._shown += len(shown)
        return shown

    def take(self) -> list[Entry]:
        """Entries of tokens whose text was begun to be shown, each once; after the end all that are left."""
        if self.ending:
            taken, self._entries = self._entries, []
            return taken
        n = 0
        while n < len(self._entries) and self._entries[n].offset < self._shown:
            n += 1
        taken, self._entries = self._entries[:n], self._entries[n:]
        return taken

    def _token(self, token_id: int, logprob: TokenLogprob | None) -> str:
        shown = self._let_go()
        if self.ending:
            return shown
        self.count += 1
        if self._keep_entries:
            self._entries.append(Entry(token_id, self._decoded, logprob))
        if token_id in self._enders:
            self._held = token_id
            return shown
        return shown + self._show(token_id)

    def _finish(self, item: Finished) -> str:
        self.last_held = self._held is not None
        if item.reason is FinishReason.STOP and not self._options.include_stop:
            if self._held is not None and self._pieces is not None:
                self._pieces.token(self._held, self._decoded)
            self._held = None
        shown = self._let_go()
        if self.ending:
            return shown
        if item.completion_tokens != self.count:
            raise EngineFailed(f"the engine counted {item.completion_tokens} tokens, {self.count} arrived")
        if self._stops:
            shown += self._stops.flush()
        by_id = item.stop_token in self._options.stop_token_ids and item.stop_token not in self._eos
        self.ending = Ending(item.reason.value, item.stop_token if by_id else None)
        return shown

    def _let_go(self) -> str:
        if self._held is None:
            return ""
        token_id, self._held = self._held, None
        return self._show(token_id)

    def _show(self, token_id: int) -> str:
        shown = self._cut(self._stream.push(token_id))
        if self._pieces is not None:
            self._pieces.token(token_id, self._decoded)
        return shown

    def _cut(self, text: str) -> str:
        self._decoded += len(text)
        if self._stops is None or not text:
            return text
        shown = self._stops.feed(text, armed=self.count > self._options.min_tokens)
        if self._stops.matched is not None:
            self.ending = Ending(FinishReason.STOP.value, self._stops.matched)
            self.last_held = True
        return shown
