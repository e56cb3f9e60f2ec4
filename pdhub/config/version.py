"""Which configuration of routing is live: a digest of what can change while a router runs."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Final

from pdhub.config.models import Config

RELOADABLE: Final = ("policy", "admission")
"""Sections that can change while the router runs."""


def version_of(config: Config) -> str:
    """Twelve digits that change with the content of those sections, not with comments, order or spelling."""
    data = {section: getattr(config, section).model_dump(mode="json") for section in RELOADABLE}
    return sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:12]
