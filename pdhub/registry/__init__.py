"""Which plugins are installed: discovery, compatibility, blocking, and a typed lookup by name."""

from pdhub.registry.registry import Registry, load
from pdhub.registry.row import PluginRow, Status

__all__ = ["PluginRow", "Registry", "Status", "load"]
