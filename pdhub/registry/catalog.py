"""Name → spec, for each kind, and a helpful error for a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdhub.api.errors import PluginError
from pdhub.api.plugin import PluginSpec
from pdhub.registry.discover import Source
from pdhub.registry.providers import KNOWN_KINDS, KNOWN_PROVIDERS
from pdhub.registry.validate import kind_of


@dataclass(frozen=True, slots=True)
class Entry:
    """A valid spec and who gave it."""

    spec: PluginSpec
    source: Source


@dataclass
class Catalog:
    """Every valid spec by kind and name; a name that several gave is kept with all of them and usable by none."""

    _entries: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self._entries.setdefault((kind_of(entry.spec), entry.spec.name), []).append(entry)

    def __iter__(self) -> Iterator[Entry]:
        """Usable entries only."""
        return (found[0] for found in self._entries.values() if len(found) == 1)

    def clashes(self) -> Iterator[list[Entry]]:
        """Entries that share one name."""
        return (found for found in self._entries.values() if len(found) > 1)

    def names(self, kind: str) -> list[str]:
        """Usable names of a kind, sorted."""
        return sorted(name for (k, name), found in self._entries.items() if k == kind and len(found) == 1)

    def find(self, kind: str, name: str, failed: Sequence[Source]) -> PluginSpec:
        """The spec. ``failed`` are sources without a plugin, for the error.

        Raises:
            PluginError: nobody provides it, or several do.
        """
        found = self._entries.get((kind, name), [])
        if len(found) == 1:
            return found[0].spec
        if found:
            raise clash_error(found)
        raise unknown_error(kind, name, self.names(kind), failed)


def clash_error(entries: Sequence[Entry]) -> PluginError:
    """Two plugins, one name."""
    spec = entries[0].spec
    owners = " and ".join(str(e.source) for e in entries)
    return PluginError(
        f"two plugins provide the {kind_of(spec)} '{spec.name}': {owners}; neither is used",
        hint=f"uninstall one, or name its distribution in plugins.block: {', '.join(_distributions(entries))}",
    )


def _distributions(entries: Sequence[Entry]) -> list[str]:
    return sorted({e.source.distribution or e.source.name for e in entries})


def unknown_error(kind: str, name: str, installed: Sequence[str], failed: Sequence[Source]) -> PluginError:
    """No such plugin: what is installed, the nearest name, who would provide it, what failed to load."""
    message = f"no {kind} plugin '{name}' is installed; installed: {', '.join(installed) or 'none'}"
    provider = KNOWN_PROVIDERS.get(name)
    related = [s for s in failed if name == s.name or s.distribution in (provider, f"pdhub-{name}")]
    if related:
        message += "".join(f"\n  {s} did not load: {s.error}" for s in related)
        fix = "remove it from plugins.block" if related[0].blocked else f"repair or reinstall {related[0].distribution}"
        return PluginError(message, hint=f"{fix}; `pdhub plugins` shows every plugin and its error")
    if provider:
        return PluginError(message, hint=f"{provider} provides it: pip install {provider}")
    hint = _nearest(kind, name, installed, failed) or "`pdhub plugins` lists what is installed"
    if failed:
        broken = ", ".join(s.name for s in failed)
        hint += f"; these plugins did not load and may provide it: {broken} (see `pdhub plugins`)"
    return PluginError(message, hint=hint)


def _nearest(kind: str, name: str, installed: Sequence[str], failed: Sequence[Source]) -> str:
    """The name that was likely meant, and how to get its plugin if it is not there; empty if none is near."""
    near = difflib.get_close_matches(name, dict.fromkeys([*installed, *KNOWN_KINDS.get(kind, ())]), n=1)
    if not near:
        return ""
    hint = f"did you mean '{near[0]}'?"
    provider = KNOWN_PROVIDERS.get(near[0])
    if near[0] in installed or provider in {s.distribution for s in failed}:
        return hint
    return f"{hint} {provider} provides it: pip install {provider}"
