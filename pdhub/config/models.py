"""The YAML, as pydantic models. Every field has a default or is required, and a description: ``docs/config.md``
is generated from here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pdhub.config.base import Component as Component
from pdhub.config.base import Model, Name
from pdhub.config.policy_models import PolicyConfig

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Millis = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
Extra = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65_535)]


class ServedModel(Model):
    """The model behind the endpoint."""

    name: str = Field(description="Id that clients send and `/v1/models` lists.")
    path: str | None = Field(None, description="Directory (Hugging Face) or GGUF file that hosted engines load.")
    tokenizer: str | None = Field(
        None, description="Directory or tokenizer.json for the router's detokeniser; default: found at `path`."
    )
    aliases: list[str] = Field(default_factory=list, description="Other ids that clients may send.")
    parser: Component | None = Field(
        None,
        description="Parser of reasoning and tool calls for pools that speak tokens; default: they are not given "
        "requests that need one. Servers that speak OpenAI's API have their own.",
    )
    reasoning: bool | None = Field(
        None,
        description="Chat answers begin with reasoning that has to be split off, so chat requests go only to pools "
        "with the feature `reasoning`; default: if `parser` splits it.",
    )
    sampling_defaults: dict[Literal["temperature", "top_p", "top_k", "min_p", "repetition_penalty"], float] | None = (
        Field(
            None,
            description="What counts where a client omits it; default is what a hosted prefill instance tells, else "
            "`generation_config.json` beside the tokenizer. `{}`: as with `--generation-config vllm`.",
        )
    )


class DecisionsConfig(Model):
    """What is kept of the policy's decisions."""

    sample: float = Field(0.0, ge=0, le=1, description="Share of requests whose decision becomes a line of JSON.")
    file: str | None = Field(None, description="File for those lines; default is the logger `pdhub.decisions`.")
    file_bytes: int = Field(
        64 << 20, gt=0, description="A file that would grow beyond this becomes FILE.1, in place of an older one."
    )
    keep: int = Field(256, ge=0, le=100_000, description="Latest decisions at `/debug/decisions`, with debug_headers.")


class RecycleConfig(Model):
    """Decode nodes that hold KV which nobody uses and which no call frees, as after the death of a prefill instance."""

    when: Literal["never", "spare", "always"] = Field(
        "spare",
        description="Such a node is taken out to be started again: only while another node of its pool can serve "
        "(`spare`), or even if it is the only one. It takes as long as loading the model.",
    )
    above: float = Field(0.05, ge=0, lt=1, description="Only if that is more than this share of its KV memory.")
    after_s: Seconds = Field(
        10.0,
        description="How long nothing must have happened there before KV counts as unused; longer where the engine "
        "lets go by itself within a minute.",
    )
    nodes: list[Name] = Field(
        default_factory=list,
        description="Nodes that somebody starts again when `/ready` says so; `pdhub up` adds those that it launched. "
        "Others stay in, and are only reported.",
    )


class RouterConfig(Model):
    """The OpenAI endpoint."""

    host: str = Field("127.0.0.1", description="Address to listen on. Nothing is public unless you say so.")
    port: Port = Field(8000, description="Port to listen on; 0 takes a free one.")
    body_limit_bytes: int = Field(8 << 20, gt=0, description="A larger request body is refused with 413.")
    connect_timeout_s: Seconds = Field(2.0, description="Opening a connection to a node or prefill instance.")
    first_byte_timeout_s: Seconds = Field(60.0, description="From sending a call to its first answer byte.")
    idle_timeout_s: Seconds = Field(10.0, description="Longest gap between two pieces of a stream.")
    total_timeout_s: Seconds = Field(600.0, description="A whole request.")
    retries: int = Field(1, ge=0, le=5, description="Attempts on another node before the first byte was sent.")
    breaker_failures: int = Field(2, ge=1, description="Failures in a row that take a node out.")
    breaker_open_s: Seconds = Field(2.0, description="How long a node stays out before one request may try it.")
    probe_interval_s: Seconds = Field(1.0, description="Time between two health probes of a node.")
    probe_timeout_s: Seconds = Field(2.0, description="A probe that takes longer has failed.")
    probe_failures: int = Field(3, ge=1, description="Failed probes in a row after which an idle node is down.")
    pair_check: bool = Field(
        True,
        description="Before a prefill instance and a node are used together, and when one comes back: compare a short "
        "greedy answer with that of one server alone, where the engine can answer so.",
    )
    recycle: RecycleConfig = Field(
        default_factory=RecycleConfig, description="Decode nodes whose KV memory nobody will free."
    )
    drain_s: Seconds = Field(10.0, description="When told to stop: how long open answers may take to finish.")
    debug_headers: bool = Field(
        False,
        description="Answer with x-pdhub-* headers that say what was decided; serve /debug and /explain.",
    )
    decisions: DecisionsConfig = Field(default_factory=DecisionsConfig, description="What is kept of decisions.")
    reload_interval_s: float = Field(
        1.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="How often the file is looked at for a new `policy` or `admission`; 0 = only on SIGHUP.",
    )


class AdmissionConfig(Model):
    """Who may enter, and who waits."""

    default_budget_s: Seconds = Field(30.0, description="How long a request without a TTFT target may wait in all.")
    queue_limit: int = Field(256, ge=0, description="Requests that may wait a pool; more are refused with 429.")
    order: Component = Field(
        default_factory=lambda: Component(type="priority_deadline"),
        description="Who of those that wait enters next, and who may be refused in favour of others.",
    )
    spill: bool = Field(
        True, description="Wait at the policy's next pool where waiting at the first would cost the TTFT target."
    )
    prefill_ahead_s: Seconds = Field(
        0.05,
        description="The next prompt is sent to a prefill instance when so little of its work is left, at the pace "
        "that was measured. The others wait here, in order.",
    )
    prefill_ahead_tokens: int | None = Field(
        None,
        ge=1,
        description="Instead: when fewer prompt tokens than this are not answered; default is by `prefill_ahead_s`.",
    )
    shed: bool = Field(
        True, description="Refuse a sheddable request at once where every pool would serve it after its time is over."
    )


class HandoffConfig(Model):
    """KV handoff between prefill and the nodes of `pdhub node`."""

    transport: Component = Field(default_factory=lambda: Component(type="shm"), description="KV transport.")
    claim_ttl_s: Seconds = Field(30.0, description="A claim without a writer ends after this.")
    deadline_s: Seconds = Field(30.0, description="A hand-over that is not complete after this has failed.")
    ready_ttl_s: Seconds = Field(30.0, description="Complete KV that nobody decodes is freed after this.")
    fence_within_s: Seconds = Field(5.0, description="Proof that a lost writer cannot write; else the node restarts.")
    verify: bool = Field(False, description="Send and check a digest of every handed-over byte (test mode, slower).")
    staging_bytes: int = Field(64 << 20, gt=0, description="Sender's staging memory.")


class NodeConfig(Model):
    """One process. `launch: true` lets `pdhub up` start it; otherwise it must already run at `host:port`."""

    name: Name = Field(description="Unique name.")
    host: str = Field("127.0.0.1", description="Address of its HTTP server.")
    port: Port = Field(description="Port of its HTTP server.")
    control_port: Port = Field(0, description="Port of its control channel for senders; 0 takes a free one.")
    scheme: Literal["http", "https"] = Field("http", description="Scheme of its HTTP server.")
    launch: bool = Field(True, description="Started by `pdhub up`.")
    api_key_env: str | None = Field(None, description="Environment variable that holds its API key.")
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0 lets the engine choose.")
    drain_s: Seconds = Field(30.0, description="When told to stop: how long running requests may take to finish.")
    labels: dict[str, str] = Field(default_factory=dict, description="Free labels that rules may match.")


class PrefillConfig(NodeConfig):
    """A prefill instance."""

    engine: Component = Field(description="Engine plugin with a prefill facet, or one that is a prefill instance.")
    pools: list[Name] = Field(
        default_factory=list,
        description="Pools that it computes prompts for; default is every pool that needs prefill and whose KV fits.",
    )


class LatencySeed(Model):
    """What the latency model assumes before it has seen anything. Measured times soon replace it; without traffic for
    two minutes it counts again. What is not given is unknown, and costs per token or request then start at zero."""

    ttft_ms: Millis | None = Field(None, description="Time to the first token of a short prompt, nothing else running.")
    tpot_ms: Millis | None = Field(None, description="Time per output token of one request alone.")
    ttft_ms_per_token: Extra | None = Field(None, description="Added to TTFT by each prompt token that is not cached.")
    ttft_ms_per_waiting_token: Extra | None = Field(
        None, description="Added to TTFT by each prompt token ahead at prefill; default: as `ttft_ms_per_token`."
    )
    tpot_ms_per_request: Extra | None = Field(None, description="Added to TPOT by each other request on the node.")
    tpot_ms_per_context_token: Extra | None = Field(None, description="Added to TPOT by each token of context.")
    output_tokens: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Tokens of a typical answer: how long a slot stays taken until answers have been seen.",
    )


class PoolConfig(Model):
    """Interchangeable nodes with one engine."""

    name: Name = Field(description="Unique name.")
    engine: Component = Field(description="Engine plugin.")
    nodes: list[NodeConfig] = Field(min_length=1, description="Members of the `static` discovery source.")
    landings: int | None = Field(None, ge=1, description="Landings a node; default is its slots + 1.")
    cost: float = Field(1.0, ge=0, description="Relative cost of a token; lower is cheaper.")
    labels: dict[str, str] = Field(default_factory=dict, description="Free labels that rules may match.")
    latency: LatencySeed = Field(default_factory=LatencySeed, description="Seeds of the latency model.")


class PluginsConfig(Model):
    """Which plugin distributions may load."""

    block: list[str] = Field(default_factory=list, description="Distributions whose entry points are not loaded.")
    modules: list[str] = Field(
        default_factory=list,
        description="Importable plugin modules that no installed distribution names: plugins under development.",
    )


class Config(Model):
    """The whole file."""

    version: Literal[1] = Field(1, description="Version of this format.")
    model: ServedModel = Field(description="The served model.")
    router: RouterConfig = Field(default_factory=RouterConfig, description="The OpenAI endpoint.")
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig, description="Who may enter.")
    handoff: HandoffConfig = Field(default_factory=HandoffConfig, description="KV handoff.")
    prefill: list[PrefillConfig] = Field(default_factory=list, description="Prefill instances.")
    pools: list[PoolConfig] = Field(min_length=1, description="Decode pools.")
    policy: PolicyConfig = Field(description="Routing policy, service classes and tenants.")
    launcher: Component = Field(default_factory=lambda: Component(type="local"), description="How `up` starts nodes.")
    plugins: PluginsConfig = Field(default_factory=PluginsConfig, description="Plugin loading.")
