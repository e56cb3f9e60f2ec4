"""docs/policy.md knows every reason."""

from __future__ import annotations

import re
from pathlib import Path

from pdhub.api import Reason

PAGE = (Path(__file__).parents[3] / "docs" / "policy.md").read_text()


def test_every_reason_is_explained() -> None:
    table = PAGE.partition("## Reasons")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == {reason.value for reason in Reason}
