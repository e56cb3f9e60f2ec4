"""Loading a model, and its one forward pass over rows."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pdhub.api import ConfigError, EngineContext, KVLayout, model_identity
from pdhub_transformers.abilities import DEFAULT_CONTEXT
from pdhub_transformers.attention import NAME, Feed, RowCache
from pdhub_transformers.config import TransformersConfig
from pdhub_transformers.exact import make_exact
from pdhub_transformers.latent import NAME as LATENT
from pdhub_transformers.latent import LatentCache, LatentGeometry
from pdhub_transformers.rows import Geometry
from pdhub_transformers.source import model_directory

_log = logging.getLogger("pdhub.transformers")

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_UNSTABLE_ROPE = ("dynamic", "longrope")  # their angles depend on the longest request of a batch


class Alone(Protocol):
    """See :class:`pdhub_transformers.graph.GraphedStep`."""

    def fits(self, feed: Feed) -> bool:
        """Whether it can compute this step."""

    def step(self, feed: Feed) -> Tensor:
        """Logits ``[1, vocabulary]``, valid until the next step."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model that computes over :class:`Row` storage.

    Args:
        model: the Transformers model, in evaluation mode.
        geometry, layout: of its KV cache. accepts: further layouts that rows can be loaded from.
        max_context: tokens of prompt plus output.
        vocabulary: number of token ids.
        eos_token_ids: ids that end a sequence, from the generation config or the config.
        sampling_defaults: from the generation config.
        cache: made for each forward pass.
        together: several rows may share a forward pass.
        alone: computes steps of one token of one request, where there is a faster way for it.
    """

    model: torch.nn.Module
    directory: Path
    geometry: Geometry | LatentGeometry
    layout: KVLayout
    accepts: tuple[KVLayout, ...]
    max_context: int
    vocabulary: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float | int]
    forward: Callable[..., Any]
    cache: Callable[..., Any] = RowCache
    together: bool = True
    alone: Alone | None = None

    def decode(self, feeds: Sequence[Feed]) -> Tensor:
        """One step: logits ``[tokens, vocabulary]`` for every fed token, in order; valid until the next step."""
        if self.alone is not None and len(feeds) == 1 and self.alone.fits(feeds[0]):
            return self.alone.step(feeds[0])
        if self.together:
            return self._step(feeds)
        return torch.cat([self._step([one]) for feed in feeds for one in feed.single()])

    def _step(self, feeds: Sequence[Feed]) -> Tensor:
        ids = [token for feed in feeds for token in feed.tokens]
        positions = [feed.start + i for feed in feeds for i in range(len(feed.tokens))]
        both = torch.tensor([ids, positions], device=self.geometry.device).unsqueeze(-1)
        return self.forward(both[0], both[1], self.cache(feeds))[:, -1]

    def chunk(self, feed: Feed) -> Tensor:
        """One prefill chunk: logits ``[vocabulary]`` of its last token."""
        ids = torch.tensor([feed.tokens], device=self.geometry.device)
        positions = torch.arange(feed.start, feed.start + len(feed.tokens), device=self.geometry.device)
        return self.forward(ids, positions.unsqueeze(0), self.cache([feed], chunk=True))[0, -1]


def load_model(config: TransformersConfig, context: EngineContext, *, exact_rows: int = 0) -> LoadedModel:
    """Load the model that the node names. Takes seconds; call it from a thread.

    Args:
        exact_rows: most rows of a decode step if they must not influence each other; 0 = do not care.

    Raises ConfigError if there is no such model or it has no plain attention cache.
    """
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    if threads := context.threads or config.threads:
        torch.set_num_threads(threads)
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device {config.device!r} is not available", where="engine.config.device")
    directory = model_directory(context.model_path, config.cache_dir)
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    dtype = getattr(torch, config.dtype)
    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    hf_logging.disable_progress_bar()
    try:
        if config.weights == "random":
            model = _random(directory, torch.device(config.device), {name: dtype})
        else:
            model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **{name: dtype})
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load the model at {directory}: {error}", where="model.path") from error
    model = model.eval().requires_grad_(False).to(config.device)
    _check_attention(model, directory)

    limit = int(model.config.max_position_embeddings)
    if config.max_context is not None and config.max_context > limit:
        raise ConfigError(
            f"max_context {config.max_context} is more than the model's {limit}", where="engine.config.max_context"
        )
    geometry = _geometry(model, config, raw)
    loaded = LoadedModel(
        model=model,
        directory=directory,
        geometry=geometry,
        layout=geometry.layout(model_identity(raw)),
        accepts=geometry.accepts(model_identity(raw)),
        max_context=config.max_context or min(limit, DEFAULT_CONTEXT),
        vocabulary=int(model.config.vocab_size),
        eos_token_ids=_eos(model),
        sampling_defaults=_defaults(directory),
        forward=_forward(model),
        cache=RowCache if isinstance(geometry, Geometry) else LatentCache,
        together=isinstance(geometry, Geometry),
    )
    with torch.inference_mode():
        return _prepare(loaded, exact_rows)


def _random(directory: Path, device: torch.device, dtype: Mapping[str, torch.dtype]) -> Any:
    """The model of a configuration, the same weights every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, local_files_only=True), **dtype)


def _geometry(model: Any, config: TransformersConfig, raw: Mapping[str, Any]) -> Geometry | LatentGeometry:
    own = model.config
    common = {
        "layers": own.num_hidden_layers,
        "dtype": getattr(torch, config.dtype),
        "device": torch.device(config.device),
        "block_tokens": config.block_tokens,
    }
    if getattr(own, "kv_lora_rank", None):
        return LatentGeometry(
            rank=own.kv_lora_rank,
            rotary=own.qk_rope_head_dim,
            drafts=int(raw.get("num_nextn_predict_layers") or 0),
            **common,
        )
    heads = own.num_attention_heads
    return Geometry(
        heads=getattr(own, "num_key_value_heads", None) or heads,
        dim=getattr(own, "head_dim", None) or own.hidden_size // heads,
        **common,
    )


def _check_attention(model: Any, directory: Path) -> None:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    latent = getattr(config, "kv_lora_rank", None)
    problem = None
    if latent and (getattr(config, "index_topk", None) or not getattr(config, "rope_interleave", True)):
        problem = "sparse attention, or latent attention with another order of rotary pairs"
    elif latent and not any(hasattr(module, "expand_kv") for module in model.modules()):
        problem = "latent attention whose cache is not latent in this release of transformers (5.24 does)"
    elif kinds - {"full_attention"} or (window and not kinds):
        problem = "sliding-window or other layers without a plain attention cache"
    elif not hasattr(config, "num_attention_heads") or not hasattr(config, "max_position_embeddings"):
        problem = "an architecture without plain attention layers"
    elif rope.get("rope_type", rope.get("type")) in _UNSTABLE_ROPE:
        problem = "rotary scaling that changes with the length of a batch"
    if problem:
        raise ConfigError(f"the model at {directory} has {problem}, which this engine cannot serve", where="model.path")


def _forward(model: Any) -> Callable[..., Any]:
    """The model's logits over ids, positions and a cache. The argument's name changed between releases."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def forward(ids: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        out = model(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache}, **keep)
        return out.logits.float()

    return forward


def _prepare(loaded: LoadedModel, exact_rows: int) -> LoadedModel:
    """Switch the model to rows and prove, on a few tokens, that it still computes what it did."""
    model, size = loaded.model, min(6, loaded.max_context - 1)
    ids = [i % loaded.vocabulary for i in range(3, 4 + size)]
    want = model(input_ids=torch.tensor([ids], device=loaded.geometry.device), use_cache=False).logits[0, -1].float()
    model.config._attn_implementation = NAME if loaded.together else LATENT
    row = loaded.geometry.row(size + 1 + exact_rows)
    last = Feed(row, size, ids[-1:])
    try:
        if size:
            loaded.chunk(Feed(row, 0, ids[:-1]))
        got = loaded.decode([last])[0]
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{type(model).__name__} has no plain attention: {error}", where="model.path") from error
    tolerance = 1e-3 if loaded.geometry.dtype is torch.float32 else 0.1
    if not torch.allclose(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max())):
        raise ConfigError(
            f"{type(model).__name__} computes something else than plain attention over its cache", where="model.path"
        )
    if exact_rows < 2 or not loaded.together:
        return loaded
    make_exact(model, exact_rows)
    several = Feed(row, size, [i % loaded.vocabulary for i in range(exact_rows)])
    if torch.equal(loaded.decode([several]), torch.cat([loaded.decode([one]) for one in several.single()])):
        return loaded
    _log.warning("%s: rows influence each other's rounding here, so each is computed alone", type(model).__name__)
    return replace(loaded, together=False)


def _eos(model: Any) -> tuple[int, ...]:
    value = getattr(model.generation_config, "eos_token_id", None)
    if value is None:
        value = getattr(model.config, "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def _defaults(directory: Path) -> dict[str, float | int]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return {k: document[k] for k in _SAMPLING if isinstance(document.get(k), (int, float))}
