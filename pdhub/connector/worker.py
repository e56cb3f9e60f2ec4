"""One worker of vLLM: what it writes, how, and which of the step's notes go to the pump.

Knows nothing of vLLM but what it is given; ``vllm.py`` gives it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import torch

from pdhub import __version__
from pdhub.api.errors import ConfigError
from pdhub.api.layout import KVLayout
from pdhub.api.request import Feature
from pdhub.api.transport import Transport
from pdhub.connector.describe import Describer
from pdhub.connector.layouts import Layer, piece_tokens, plan
from pdhub.connector.memory import staging_memory
from pdhub.connector.options import ConnectorOptions
from pdhub.connector.planes import plan_planes
from pdhub.connector.pump import Pump
from pdhub.connector.source import Cache, TorchSource
from pdhub.connector.steps import Report, Step
from pdhub.registry import load
from pdhub.sender import Sender
from pdhub.wire.control import PROTOCOL
from pdhub.wire.http import CapabilitiesBody, PrefillInfoReply, to_json

log = logging.getLogger("pdhub.connector")


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker this is, and of what.

    Args:
        name: for logs of nodes. model: identity, as :attr:`KVLayout.model`.
        rank, ranks: tensor-parallel. kv_heads: of the model, over all ranks.
        sampling_defaults, eos_token_ids, max_model_len, max_logprobs: told to routers.
        data_rank: data-parallel.
    """

    name: str
    model: str
    rank: int
    ranks: int
    kv_heads: int
    max_model_len: int
    max_logprobs: int = 20
    data_rank: int = 0
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()


class Worker:
    """See the module's text.

    Args:
        layers: every layer of this rank.
        device: where the caches are.

    Raises:
        ConfigError, PluginError: the cache has no form on the wire, or the transport cannot be used here.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        place: Place,
        layers: Mapping[str, tuple[Layer, Cache]],
        device: torch.device,
        *,
        most_tokens: int,
    ) -> None:
        every = [layer for layer, _ in layers.values()]
        if options.form == "planes":
            shards = options.shards
            if place.ranks % shards:
                raise ConfigError(f"{shards} shards of planes, and {place.ranks} workers", where="kv_transfer_config")
            shard = place.rank // (place.ranks // shards)
            self._plan = plan_planes(every, model=place.model, shards=shards, shard=shard)
        else:
            replicated = all(layer.kind in ("mla", "indexer") for layer in every)
            shards = 1 if replicated else min(place.ranks, place.kv_heads)
            self._plan = plan(every, model=place.model, shards=shards, block_tokens=options.block_tokens)
        copies = place.ranks // shards
        self._options, self._place = options, place
        self._window = self._plan.window
        self._mute: set[str] = set()
        self._pump: Pump | None = None
        self._transport: Transport | None = None
        self._describer: Describer | None = None
        if place.rank % copies == 0:  # the others have the same bytes once more
            self._source = TorchSource(self._plan, {name: cache for name, (_, cache) in layers.items()}, device)
            self._open(device, shards, place.rank // copies, most_tokens)
        if place.rank == 0:
            port = options.port + place.data_rank if options.port else 0
            json = "application/json"
            self._describer = Describer(options.host, port, {"/prefill": (json, self._told), "/": (json, self._told)})
        groups = ", ".join(f"{g.name}: {len(g.layers)} layers of {g.dtype}" for g in self.layout.groups)
        log.info("hands over %s (layout %s, rank %d)", groups, self.layout.fingerprint, place.rank)

    def _open(self, device: torch.device, shards: int, shard: int, most_tokens: int) -> None:
        options = self._options
        spec = load().transport(options.transport)
        transport = spec.factory(spec.config.model_validate(options.transport_config))
        caps = transport.open()
        self._transport = transport
        most = piece_tokens(self._plan, min(options.chunk_tokens, most_tokens), options.staging_bytes)
        self._pump = Pump(
            lambda on_slot: Sender(
                transport,
                name=self._place.name,
                layout=self.layout,
                chunk_tokens=most,
                staging_bytes=options.staging_bytes,
                verify=options.verify,
                max_ops=caps.max_ops,
                connect_timeout_s=options.connect_timeout_s,
                memory=staging_memory(device, caps.devices),
                on_slot=on_slot,
            ),
            self._source,
            rank=shard,
            writers=shards,
            most=most,
        )

    @property
    def layout(self) -> KVLayout:
        """What it writes."""
        return self._plan.layout

    @property
    def port(self) -> int:
        """Where it tells its layout; 0 on all ranks but the first."""
        return self._describer.port if self._describer is not None else 0

    def preempted(self, step: Step) -> None:
        """Before the step's forward pass: its blocks may be overwritten when this returns."""
        if self._pump is not None:
            for req_id in step.preempted:
                self._pump.preempt(req_id)

    def begin(self, step: Step) -> None:
        """Before the forward pass."""
        pump = self._pump
        if pump is None:
            self._mute.update(end.req_id for end in step.ends if end.held)
            return
        self.preempted(step)
        if self._window:
            for advance in step.advances:
                pump.forget_before(advance.req_id, advance.before - self._window + 1)
        for end in step.ends:
            pump.end(end)
        for start in step.starts:
            pump.start(start)

    def computed(self, step: Step) -> None:
        """After the forward pass was launched."""
        if self._pump is None or not step.advances:
            return
        mark = self._source.mark()
        for advance in step.advances:
            self._pump.advance(advance, mark)

    def released(self) -> set[str]:
        """Requests whose blocks this worker does not need any more, each once."""
        if self._pump is not None:
            return self._pump.released()
        released, self._mute = self._mute, set()
        return released

    def report(self) -> Report | None:
        """Hand-overs that failed since the last call."""
        return self._pump.report() if self._pump is not None else None

    def close(self) -> None:
        """Idempotent."""
        describer, self._describer = self._describer, None
        if describer is not None:
            describer.close()
        if self._pump is not None:
            self._pump.close()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _told(self) -> bytes:
        place = self._place
        features = sorted(str(feature) for feature in Feature)
        capabilities = CapabilitiesBody(features, place.max_model_len, place.max_logprobs)
        return to_json(
            PrefillInfoReply(
                node=place.name,
                version=__version__,
                protocol=PROTOCOL,
                engine="vllm",
                model=self.layout.model,
                transport=self._options.transport,
                fingerprint=self.layout.fingerprint,
                max_model_len=place.max_model_len,
                capabilities=capabilities,
                sampling_defaults=dict(place.sampling_defaults),
                eos_token_ids=list(place.eos_token_ids),
                layout=asdict(self.layout),
            )
        )
