"""The parser of reasoning and tool calls, for pools that speak tokens: what it can do now, and one for each answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pdhub.api.client import Call
from pdhub.api.errors import ParserFailed, RequestError
from pdhub.api.parser import OutputParser, ParseRequest, ParserFactory
from pdhub.api.request import Feature
from pdhub.router.caller import Caller
from pdhub.router.openai import ClientRequest

if TYPE_CHECKING:
    from pdhub.router.endpoint import Endpoint


class Parsing:
    """Args:
    factory: of the configured plugin; None = there is no parser. features: what it can do when nothing is wrong.
    reasons: every chat answer has reasoning that must be split off.
    """

    def __init__(
        self, factory: ParserFactory | None = None, features: frozenset[Feature] = frozenset(), *, reasons: bool = False
    ) -> None:
        self._factory = factory
        self._features = features
        self.reasons = reasons

    @property
    def problem(self) -> str:
        """Why it cannot parse just now; empty if it can, or if there is no parser."""
        return "" if self._factory is None else self._factory.problem

    def features(self) -> frozenset[Feature]:
        """What a pool that speaks tokens can do now because of it."""
        return self._features if self._factory is not None and not self._factory.problem else frozenset()

    def absent(self, missing: frozenset[Feature]) -> bool:
        """Whether all of this could be done if the parser were well."""
        return bool(missing) and bool(self.problem) and missing <= self._features

    async def open(
        self, request: ClientRequest, caller: Caller, instance: Endpoint | None, headers: Mapping[str, str]
    ) -> OutputParser | None:
        """A parser for the answer to a request; None if it needs none.

        Args:
            instance: the prefill instance that computes its prompt. headers: of the calls that the parser makes there.

        Raises:
            InvalidRequest, Unsupported, ParserFailed: see :meth:`pdhub.api.ParserFactory.open`.
        """
        if self._factory is None or not request.chat or not self._factory.wanted(request.body):
            return None

        async def ask(call: Call) -> Mapping[str, Any]:
            assert instance is not None
            return await caller.document(instance, call, headers=headers)

        foreign = instance is not None and not instance.hosted
        try:
            name = "" if instance is None else instance.name
            wanted = ParseRequest(request.body, request.stream, name, ask if foreign else None)
            return await self._factory.open(wanted)
        except RequestError:
            raise
        except Exception as error:
            raise ParserFailed("the parser of reasoning and tool calls failed") from error

    async def start(self) -> None:
        """See :meth:`pdhub.api.ParserFactory.start`."""
        if self._factory is not None:
            await self._factory.start()

    async def close(self) -> None:
        """See :meth:`pdhub.api.ParserFactory.close`."""
        if self._factory is not None:
            await self._factory.close()
