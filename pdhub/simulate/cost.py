"""What an engine costs: plain YAML, fitted from published numbers or from a live router (``pdhub calibrate``)."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from pdhub.api.errors import ConfigError

Millis = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Points = dict[Annotated[int, Field(ge=0)], Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]]

SHIPPED = Path(__file__).parent / "costs"


class Curve:
    """Straight lines between points; flat before the first, and on with the last slope behind the last."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._x = sorted(points)
        self._y = [points[x] for x in self._x]
        self._flat = len(self._x) < 2

    def at(self, x: float) -> float:
        xs, ys = self._x, self._y
        if self._flat or x <= xs[0]:
            return ys[0]
        i = min(bisect.bisect_left(xs, x), len(xs) - 1)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


class _Cost(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PrefillCost(_Cost):
    """A prefill instance: one prompt after the other."""

    kind: Literal["prefill"] = "prefill"
    ms: Millis = Field(0.0, description="Of every prompt.")
    ms_per_token: Millis = Field(0.05, description="Of each token that is not in the prefix cache.")
    ms_per_token_squared: Millis = Field(0.0, description="Times the square of the prompt's length.")
    spread: float = Field(0.0, ge=0, le=1, description="Standard deviation of the logarithm of the time.")
    cache_tokens: int = Field(0, ge=0, description="Size of the prefix cache; 0 = none.")

    def time_ms(self, tokens: int, cached: int) -> float:
        new = max(1, tokens - cached)
        return self.ms + self.ms_per_token * new + self.ms_per_token_squared * tokens * new


class DecodeCost(_Cost):
    """A decode node: its running requests share every step."""

    kind: Literal["decode"] = "decode"
    slots: int = Field(1, ge=1, le=65_536, description="Requests that run at once.")
    landings: int | None = Field(None, ge=1, description="Requests whose KV it holds; default is slots + 1.")
    max_context: int = Field(131_072, ge=1, description="Tokens of prompt and output.")
    tpot_ms: Points = Field(description="Time of a token by running requests; straight lines between the points.")
    context: Points = Field(
        default_factory=dict, description="Factor on it by the mean context of those that run; none = 1."
    )
    spread: float = Field(0.0, ge=0, le=1, description="Standard deviation of the logarithm of a request's own speed.")
    start_ms: Millis = Field(0.0, description="From the end of prefill to being ready to decode: KV hand-over.")
    start_ms_per_token: Millis = Field(0.0, description="Added by each prompt token.")
    late: bool = Field(
        False,
        description="The node fetches the KV when prefill is done (pull), so that it is chosen again at that moment; "
        "else it is chosen before prefill and the KV is sent while prefill runs (push).",
    )
    prefill: PrefillCost | None = Field(
        None, description="Of an engine that prefills itself, one prompt after the other, while it decodes."
    )

    @field_validator("tpot_ms")
    @classmethod
    def _some(cls, value: dict[int, float]) -> dict[int, float]:
        if not value:
            raise ValueError("needs at least one point")
        return value

    @cached_property
    def _batch_curve(self) -> Curve:
        return Curve(self.tpot_ms)

    @cached_property
    def _context_curve(self) -> Curve:
        return Curve(self.context or {1: 1.0})

    @property
    def places(self) -> int:
        """Requests that it takes at once, running or arriving."""
        return self.landings or self.slots + 1

    def token_ms(self, running: int, context: float) -> float:
        """Time of one token with so many requests running, of so long a mean context."""
        return self._batch_curve.at(running) * self._context_curve.at(context)


Cost = Annotated[DecodeCost | PrefillCost, Field(discriminator="kind")]


class Costs(_Cost):
    """A costs file.

    ::

        models: {mine: {kind: decode, slots: 8, tpot_ms: {1: 9, 8: 14}}}     # optional
        prefill: {model: prefill-glm5}
        pools: {fast: {model: tilert-glm5-mtp}, general: {model: mine, slots: 4}}
    """

    models: dict[str, Cost] = Field(default_factory=dict, description="Named models.")
    prefill: dict[str, Any] | None = Field(None, description="Model of every prefill instance, and what differs.")
    pools: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Model of each pool, and what differs.")

    def pool(self, name: str) -> DecodeCost | None:
        """A pool's model; None if the file does not name the pool."""
        if name not in self.pools:
            return None
        found = self._find(self.pools[name], f"pools.{name}", "decode")
        assert isinstance(found, DecodeCost)
        return found

    def prefill_cost(self) -> PrefillCost | None:
        """The prefill instances' model; None if the file does not say."""
        if self.prefill is None:
            return None
        found = self._find(self.prefill, "prefill", "prefill")
        assert isinstance(found, PrefillCost)
        return found

    def _find(self, entry: Mapping[str, Any], where: str, kind: str) -> DecodeCost | PrefillCost:
        own = dict(entry)
        named = own.pop("model", None)
        base: dict[str, Any] = {"kind": kind}
        if named is not None:
            known = {**published().models, **self.models}
            if named not in known:
                hint = f"there are: {', '.join(sorted(known))}"
                raise ConfigError(f"there is no cost model '{named}'", where=where, hint=hint)
            base = known[named].model_dump()
            if base["kind"] != kind:
                raise ConfigError(f"cost model '{named}' is for {base['kind']}", where=where)
        try:
            return TypeAdapter(Cost).validate_python({**base, **own})
        except ValidationError as error:
            raise ConfigError(_first(error), where=where) from None


def load_costs(path: Path) -> Costs:
    """Raises ConfigError with the file and what is wrong in it."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read costs: {error}", where=str(path)) from None
    return parse_costs(data, str(path))


def parse_costs(data: Any, where: str = "costs") -> Costs:
    """From plain data. Raises ConfigError."""
    try:
        return Costs.model_validate(data or {})
    except ValidationError as error:
        raise ConfigError(_first(error), where=where) from None


@lru_cache(maxsize=1)
def published() -> Costs:
    """The models that come with the host."""
    return load_costs(SHIPPED / "published.yaml")


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
