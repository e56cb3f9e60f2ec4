"""What a KV cache looks like on the wire, and where a landing keeps each block.

A *layout* is a promise about bytes: prefill and node compare its :attr:`KVLayout.fingerprint` before a
prefill is spent. Arithmetic only; nothing here touches memory. A pure permutation between two layouts is
planned by the host (``pdhub.core.handoff``); dequantising or repacking belongs to the engine's ``inject``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any


class GroupKind(StrEnum):
    """What a group's blocks hold; it decides how many blocks a prompt needs."""

    FULL = "full"
    MLA = "mla"
    SLIDING = "sliding"
    INDEXER = "indexer"
    STATE = "state"


class Order(StrEnum):
    """Which index of a landing runs slower.

    ``BLOCK_MAJOR``: ``[block][layer]``; one chunk of tokens, over all layers, is one contiguous write.
    ``LAYER_MAJOR``: ``[layer][block]``; one layer of the whole prompt is contiguous.
    """

    BLOCK_MAJOR = "block_major"
    LAYER_MAJOR = "layer_major"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose blocks have one shape.

    Args:
        name: unique in the layout.
        kind: see :class:`GroupKind`.
        layers: model layer indices, in landing order.
        block_tokens: tokens a block covers (for ``state`` the block covers the whole request).
        block_bytes: bytes of one block of one layer, padding included.
        axes: meaning of a block's dimensions, outermost first, e.g. ``("kv:2", "head:3", "token:16", "dim:64")``.
        dtype: element type, e.g. ``float32``, ``bfloat16``, ``fp8_ds_mla``.
        window: tokens kept by a ``sliding`` group; 0 otherwise.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    block_tokens: int
    block_bytes: int
    axes: tuple[str, ...]
    dtype: str
    window: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks of one layer that ``tokens`` tokens fill (the last one perhaps partly)."""
        if self.kind is GroupKind.STATE:
            return 1
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True)
class KVLayout:
    """The whole cache of one model on one shard set.

    Args:
        model: identity of the model (see :func:`model_identity`); different models never match.
        version: raised whenever the meaning of the bytes changes.
        shards: tensor-parallel shards of the writer side; each shard writes its own region.
        groups: in landing order.
        order: see :class:`Order`.
    """

    model: str
    version: int
    shards: int
    groups: tuple[KVGroup, ...]
    order: Order = Order.BLOCK_MAJOR

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits; equal exactly if every byte of a landing means the same on both sides."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def group_bytes(self, group: KVGroup, tokens: int) -> int:
        """Bytes that ``group`` takes in a landing of ``tokens`` tokens."""
        return len(group.layers) * group.blocks(tokens) * group.block_bytes

    def landing_bytes(self, tokens: int) -> int:
        """Bytes of a landing (one shard) that can hold ``tokens`` tokens."""
        return sum(self.group_bytes(g, tokens) for g in self.groups)

    def group_offset(self, index: int, tokens: int) -> int:
        """Byte offset of group number ``index`` in a landing of ``tokens`` tokens."""
        return sum(self.group_bytes(g, tokens) for g in self.groups[:index])

    def block_offset(self, index: int, layer: int, block: int, tokens: int) -> int:
        """Byte offset of one block.

        Args:
            index: number of the group.
            layer: position in ``groups[index].layers`` (not the model's layer number).
            block: block number, 0 for the first tokens of the prompt.
            tokens: capacity of the landing in tokens, as in the accept message.
        """
        group = self.groups[index]
        if self.order is Order.BLOCK_MAJOR:
            cell = block * len(group.layers) + layer
        else:
            cell = layer * group.blocks(tokens) + block
        return self.group_offset(index, tokens) + cell * group.block_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range inside one region."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: Span) -> bool:
        return self.offset < other.end and other.offset < self.end


# Members of a Hugging Face config.json that change what the KV bytes mean.
_IDENTITY_MEMBERS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "rope_theta", "rope_scaling", "kv_lora_rank",
    "qk_rope_head_dim", "sliding_window", "tie_word_embeddings",
)  # fmt: skip


def model_identity(config: Mapping[str, Any], revision: str = "") -> str:
    """Identity of a model for :attr:`KVLayout.model`: 16 hex digits over what shapes its KV cache.

    Args:
        config: the model's ``config.json``.
        revision: anything that tells weights of one shape apart (a hub revision, a checksum).
    """
    picked = {k: config.get(k) for k in _IDENTITY_MEMBERS} | {"revision": revision}
    return hashlib.sha256(json.dumps(picked, sort_keys=True, default=str).encode()).hexdigest()[:16]
