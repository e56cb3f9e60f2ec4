"""The file that keeps runs of the trials: each as it was, and what they add up to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def keep(path: Path, run: Mapping[str, Any]) -> None:
    """Add a run to the file, or replace what is there of it (a run is known by its command and commit)."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    known = [(old["command"], old["commit"]) for old in runs]
    here = (run["command"], run["commit"])
    if here in known:
        runs[known.index(here)] = run
    else:
        runs.append(run)
    path.write_text(json.dumps({"trials": totals(runs), "runs": runs}, indent=1) + "\n")


def totals(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all runs, by state: trials on each transport and with each fault, leases in the state, findings."""
    out: dict[str, Any] = {}
    for run in runs:
        for state, transports in run["states"].items():
            row = out.setdefault(state, {"all": 0, "leases_in_the_state": 0, "wrong": 0})
            faults = Counter(row.get("faults", {}))
            for transport, cell in transports.items():
                row["all"] += cell["trials"]
                row[transport] = row.get(transport, 0) + cell["trials"]
                row["leases_in_the_state"] += cell["leases_in_the_state"]
                row["wrong"] += cell["wrong"]
                faults.update(cell["faults"])
            row["faults"] = dict(sorted(faults.items()))
    return out
