"""For plugin authors: conformance kits, fakes and fixtures.

Installing ``pdhub[testing]`` gives pytest the ``hub`` fixture (:mod:`pdhub.testing.plugin`). The kits are
classes to subclass: :class:`EngineConformance`, :class:`TransportConformance`, :class:`PolicyConformance`,
:class:`FilterConformance`, :class:`ScorerConformance`, :class:`OrderConformance`, :class:`ParserConformance`,
:class:`PackageConformance`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdhub.testing.engine_kit import EngineConformance
    from pdhub.testing.faults import FaultyTransport
    from pdhub.testing.order_kit import OrderConformance
    from pdhub.testing.package_kit import PackageConformance
    from pdhub.testing.parser_kit import ParserConformance
    from pdhub.testing.policy_kit import PolicyConformance
    from pdhub.testing.policy_parts_kit import FilterConformance, ScorerConformance
    from pdhub.testing.transport_kit import TransportConformance

__all__ = [
    "EngineConformance",
    "FaultyTransport",
    "FilterConformance",
    "OrderConformance",
    "PackageConformance",
    "ParserConformance",
    "PolicyConformance",
    "ScorerConformance",
    "TransportConformance",
]

_HOMES = {
    "EngineConformance": "engine_kit",
    "FaultyTransport": "faults",
    "FilterConformance": "policy_parts_kit",
    "OrderConformance": "order_kit",
    "PackageConformance": "package_kit",
    "ParserConformance": "parser_kit",
    "PolicyConformance": "policy_kit",
    "ScorerConformance": "policy_parts_kit",
    "TransportConformance": "transport_kit",
}


def __getattr__(name: str) -> Any:
    # Lazy: pytest loads this package at start-up in every project that has pdhub installed.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
