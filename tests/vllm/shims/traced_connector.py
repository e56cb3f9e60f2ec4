"""PDHubConnector that also writes down when each forward pass was over, and which functions of vLLM are other ones than
before it came. For tests; lines of JSON go to the file that ``PDHUB_TRACE`` names."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from typing import Any

import torch

from pdhub.connector.vllm import PDHubConnector


class TracedConnector(PDHubConnector):
    """See the module's text."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._before = _functions()
        super().register_kv_caches(kv_caches)
        self._tell({"looked_at": len(self._before), "changed": self._changed()})

    def wait_for_save(self) -> None:
        now, step = time.monotonic(), self._step
        super().wait_for_save()
        for advance in step.advances:
            self._tell({"forward_over": now, "computed": advance.computed})
        if step.ends:
            self._tell({"looked_at": len(self._before), "changed": self._changed()})

    def _changed(self) -> list[str]:
        now = _functions()
        return sorted(
            name
            for (owner, name), value in self._before.items()
            if now.get((owner, name), value) is not value and name not in _VLLMS_OWN
        )

    def _tell(self, what: dict[str, Any]) -> None:
        with open(os.environ["PDHUB_TRACE"], "a") as file:
            file.write(json.dumps(what) + "\n")


_RUNNERS: list[Any] = []
_VLLMS_OWN = ("vllm.envs.__getattr__",)
"""vLLM puts a cache around it when its start is over."""


def _functions() -> dict[tuple[Any, str], Any]:
    """Everything callable that can be reached from the model runner, the model's layers and vLLM's modules."""
    if not _RUNNERS:
        found = (frame.frame.f_locals.get("self") for frame in inspect.stack())
        _RUNNERS.extend(one for one in found if type(one).__name__.endswith("ModelRunner"))
    (runner, *_) = _RUNNERS
    owners: list[Any] = [runner, *runner.model.modules()]
    owners += [layer.impl for layer in runner.model.modules() if hasattr(layer, "impl")]
    owners += [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]
    owners += {cls for owner in owners for cls in type(owner).__mro__}
    return {
        (id(owner), f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"): value
        for owner in owners
        for name, value in list(vars(owner).items() if hasattr(owner, "__dict__") else ())
        if inspect.isroutine(value) or inspect.isclass(value)
    }
