"""Ready-made service classes.

The ``mlperf/`` classes are the p99 bounds of MLPerf Inference for large language models, TTFT and TPOT in
milliseconds. Source: https://github.com/mlcommons/inference_policies/blob/master/inference_rules.adoc (table of
datacenter benchmarks; ``server`` is its server scenario, ``interactive`` its interactive one).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_MLPERF: Final = {
    "llama3.1-8b": {"server": (2000.0, 100.0), "interactive": (500.0, 30.0)},
    "llama2-70b": {"server": (2000.0, 200.0), "interactive": (450.0, 40.0)},
    "llama3.1-405b": {"server": (6000.0, 175.0), "interactive": (4500.0, 80.0)},
    "mixtral-8x7b": {"server": (2000.0, 200.0)},
    "deepseek-r1": {"server": (2000.0, 80.0), "interactive": (1500.0, 15.0)},
    "gpt-oss-120b": {"server": (3000.0, 80.0), "interactive": (2000.0, 20.0)},
}

PRESETS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {f"mlperf/{model}-{kind}": bounds for model, kinds in _MLPERF.items() for kind, bounds in kinds.items()}
)
"""Name → (TTFT, TPOT) in milliseconds."""
