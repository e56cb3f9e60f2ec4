"""``PDHubConnector``: vLLM's face of the connector, and the only module that imports vLLM.

``--kv-transfer-config '{"kv_connector": "PDHubConnector", "kv_connector_module_path": "pdhub.connector.vllm",
"kv_role": "kv_producer", …}'``, alone or as a child of ``MultiConnector``. Everything happens in ``wait_for_save`` and
in a thread of its own, so no per-layer hook is needed and CUDA graphs stay whole; nothing of vLLM is replaced.

vLLM does not catch what a connector raises: one that reached its scheduler would end the engine. So every hook that
runs after the start catches everything, logs it, and lets the request's hand-over fail.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from pdhub.api.errors import ConfigError
from pdhub.api.layout import model_identity
from pdhub.connector.ledger import Ledger
from pdhub.connector.options import read_options
from pdhub.connector.specs import layers_of
from pdhub.connector.steps import Report, Step
from pdhub.connector.worker import Place, Worker

log = logging.getLogger("pdhub.connector")

P = ParamSpec("P")
T = TypeVar("T")

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def guarded(otherwise: Callable[[], Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A hook that never raises: what it cannot do it logs, and returns ``otherwise()``."""

    def wrap(hook: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(hook)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return hook(*args, **kwargs)
            except Exception:
                log.exception("%s failed; hand-overs may fail, the engine goes on", hook.__name__)
                result: T = otherwise()
                return result

        return call

    return wrap


def _nothing() -> None:
    return None


class PDHubMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step, from the scheduler to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class PDHubReport(getattr(base, "KVConnectorWorkerMetadata", object)):  # type: ignore[misc]
    """What failed, from the workers to the scheduler."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: PDHubReport) -> PDHubReport:
        return PDHubReport(self.report.merged(other.report))


class PDHubConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module's text.

    Raises:
        ConfigError: at the start only: options, or a way of running vLLM in which KV cannot be handed over.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _share_log()
        self._options = read_options(dict(self._kv_transfer_config.kv_connector_extra_config))
        self._cache_config = kv_cache_config
        _check_parallel(vllm_config.parallel_config)
        self._ledger = Ledger()
        self._worker: Worker | None = None
        self._step = Step()

    # -- the scheduler's side ------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        self._ledger.arrived(request.request_id, request.kv_transfer_params, request.num_prompt_tokens)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    @guarded(lambda: PDHubMetadata(Step()))
    def build_connector_meta(self, scheduler_output: Any) -> PDHubMetadata:
        return PDHubMetadata(self._ledger.step(scheduler_output))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._ledger.finished(request.request_id)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._ledger.finished(request.request_id)

    @guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        report = told.report if isinstance(told, PDHubReport) else None
        self._ledger.reported(report, connector_output.finished_sending or ())

    def has_pending_push_work(self) -> bool:
        return self._ledger.pending

    # -- the workers' side ---------------------------------------------------------------------------------------------

    @classmethod
    def supports_sleep_mode(cls, *args: Any) -> bool:
        """Sleeping frees the cache while a copy may be under way."""
        return False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        tensors = {name: tensor for name, tensor in kv_caches.items() if isinstance(tensor, torch.Tensor)}
        layers = {layer.name: (layer, cache) for layer, cache in layers_of(self._cache_config, tensors, ue8m0=_ue8m0())}
        device = next(iter(tensors.values())).device
        if device.type == "cpu":
            _check_cpu_kernels(self._vllm_config, layers.values())
        scheduler = self._vllm_config.scheduler_config
        self._worker = Worker(
            self._options,
            _place(self._vllm_config, str(self._kv_transfer_config.engine_id)),
            layers,
            device,
            most_tokens=scheduler.max_num_batched_tokens,
        )

    @guarded(_nothing)
    def handle_preemptions(self, told: Any) -> None:
        """Newer releases give the step's metadata, older ones a set of ids."""
        if self._worker is not None:
            step = told.step if isinstance(told, PDHubMetadata) else Step(preempted=tuple(told or ()))
            self._worker.preempted(step)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata)

    @guarded(_nothing)
    def _begin(self, metadata: Any) -> None:
        self._step = metadata.step
        if self._worker is not None:
            self._worker.begin(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        step, self._step = self._step, Step()
        if self._worker is not None:
            self._worker.computed(step)

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return (self._worker.released() or None) if self._worker is not None else None, None

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> PDHubReport | None:
        report = self._worker.report() if self._worker is not None else None
        return PDHubReport(report) if report is not None else None

    @guarded(_nothing)
    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def _share_log() -> None:
    """vLLM configures its own logger and no other."""
    ours, theirs = logging.getLogger("pdhub"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level or logging.INFO)
        ours.propagate = False


def _check_parallel(parallel: Any) -> None:
    names = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    for name in names:
        if getattr(parallel, name, 1) > 1:
            hint = "use tensor parallelism, and several instances"
            raise ConfigError(f"KV cannot be handed over with {name} > 1", hint=hint)


def _check_cpu_kernels(vllm_config: Any, layers: Any) -> None:
    """Of the CPU backend's ways to pack a block only the vector kernels' is known."""
    from vllm.v1.attention.backends import cpu_attn

    for layer, cache in layers:
        if layer.kind not in ("full", "sliding"):
            continue
        isa = cpu_attn._get_attn_isa(cache.tensor.dtype, layer.block_tokens // cache.ratio, layer.dim)
        if isa not in ("vec", "vec16"):
            raise ConfigError(
                f"the CPU kernels '{isa}' pack the cache in a way of their own", hint="use --dtype float32"
            )


def _ue8m0() -> bool:
    """Whether this device's indexer keeps its scales as exponents."""
    try:
        from vllm.utils import deep_gemm
    except ImportError:
        return False
    asked = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    return bool(asked()) if asked is not None else False


def _place(vllm_config: Any, engine_id: str) -> Place:
    from vllm.distributed import get_tensor_model_parallel_rank

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    rank = get_tensor_model_parallel_rank()
    defaults = model.get_diff_sampling_param()
    return Place(
        name=f"vllm-{engine_id[:8]}-{rank}",
        model=model_identity(_hf_config(model)),
        rank=rank,
        ranks=parallel.tensor_parallel_size,
        kv_heads=model.get_total_num_kv_heads(),
        max_model_len=model.max_model_len,
        max_logprobs=model.max_logprobs,
        data_rank=getattr(parallel, "data_parallel_rank", 0),
        sampling_defaults={name: float(defaults[name]) for name in _SAMPLING if name in defaults},
        eos_token_ids=_eos(model),
    )


def _hf_config(model: Any) -> dict[str, Any]:
    """The model's ``config.json`` as it was written: what a library reads into it differs between releases."""
    path = Path(model.model) / "config.json"
    if not path.is_file():
        from transformers.utils import cached_file

        path = Path(cached_file(model.model, "config.json", revision=model.revision))
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _eos(model: Any) -> tuple[int, ...]:
    found = (model.try_get_generation_config() or {}).get("eos_token_id")
    if found is None:
        found = getattr(model.hf_config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
