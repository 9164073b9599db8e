"""Everything a user can set, as one checked model. `kvtide config` prints it resolved.

`serve run deployments:app key=value …` validates these fields; so do `kvtide serve` and `serve.yaml` (`args:`).
"""

import json
import os
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from deployments.api.settings import ApiSettings
from policies.recipe import MAX_KERNEL, MAX_SINKS, MAX_TOKENS, MAX_WINDOW, Recipe, RecipeError, make_recipe

GIB = 1 << 30

_MOST_GIB = 1 << 16
_Resources = dict[str, Annotated[float, Field(ge=0, le=1e9)]]


class AppArgs(BaseModel):
    """Options of one kvtide application. Times are seconds; sizes say their unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        "demo", min_length=1, description="'demo', a Hugging Face model id, a local folder, or a GGUF file."
    )
    served_name: str | None = Field(
        None, min_length=1, description="Name in the API; by default the model's own."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Compute and KV type; auto: the checkpoint's."
    )
    max_context: int | None = Field(
        None, ge=16, le=MAX_TOKENS, description="Tokens of context served; by default the model's own."
    )

    policy: str = Field("full", description="Default eviction policy of requests that name none.")
    budget: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Tokens (int) or fraction of the prompt (0-1) kept per kv head by the default policy.",
    )
    window: int | None = Field(
        None, ge=1, le=MAX_WINDOW, description="Last tokens whose queries score, default policy."
    )
    kernel: int | None = Field(
        None, ge=1, le=MAX_KERNEL, description="Pooling kernel of the default policy (odd)."
    )
    pool: Literal["avg", "max"] | None = Field(None, description="Pooling of the default policy.")
    sinks: int | None = Field(
        None, ge=0, le=MAX_SINKS, description="First tokens that the default policy keeps."
    )

    gateway_replicas: int = Field(1, ge=1, le=64, description="HTTP gateways.")
    prefill_replicas: int = Field(1, ge=1, le=1024, description="Replicas of the prefill pool.")
    decode_replicas: int = Field(1, ge=1, le=1024, description="Replicas of the decode pool.")
    threads: int | None = Field(
        None, ge=1, le=512, description="Compute threads per replica; by default the cores shared out evenly."
    )
    replica_cpus: float = Field(
        0,
        ge=0,
        le=1024,
        description="Ray CPUs that a replica asks for; 0: replicas share the node, threads are set by `threads`.",
    )
    prefill_resources: _Resources = Field(
        {}, description='Custom Ray resources of a prefill replica, e.g. {"prefill": 1}.'
    )
    decode_resources: _Resources = Field({}, description="Custom Ray resources of a decode replica.")

    chunk_tokens: int = Field(
        1024, ge=16, le=65536, description="Most prompt tokens computed in one prefill step."
    )
    workspace_gib: float = Field(
        4.0, gt=0, le=_MOST_GIB, description="Most full prompt KV in memory at once per prefill replica."
    )
    pool_gib: float = Field(2.0, gt=0, le=_MOST_GIB, description="Page pool of a decode replica.")
    max_sequences: int = Field(32, ge=1, le=1024, description="Sequences decoded at once per decode replica.")
    max_queued: int = Field(
        128,
        ge=1,
        le=100_000,
        description="Prompts a prefill replica takes at once, and requests that may wait per decode replica; then 429.",
    )
    staging_gib: float | None = Field(
        None,
        gt=0,
        le=_MOST_GIB,
        description="Transfer memory per replica; by default twice a full context, at least 256 MiB.",
    )
    waiting_gib: float = Field(
        2.0,
        gt=0,
        le=4096,
        description="Most survivors of requests between prefill and the batch per decode replica; others wait.",
    )
    transport: Literal["auto", "nixl", "local"] = Field(
        "auto",
        description="How survivors are shipped: pulled (nixl) or in the reply (local); auto: nixl if it exists.",
    )
    ticket_ttl_s: float = Field(30.0, gt=0, le=3600, description="Lifetime of a transfer ticket nobody ends.")
    attempts: int = Field(
        4, ge=1, le=20, description="Decode replicas tried per request, and prefills by each."
    )

    block_tokens: int = Field(16, ge=1, le=1024, description="Tokens per KV block in the tiers.")
    cpu_tier_gib: float = Field(1.0, ge=0, le=_MOST_GIB, description="CPU tier per node; 0: no prefix reuse.")
    cpu_tier_folder: str | None = Field(
        None, description="Folder of the CPU tier's memory file; default: /dev/shm."
    )

    deadline_s: float = Field(600.0, gt=0, le=86_400, description="Longest time from arrival to first token.")
    slow_reader_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="A client that takes nothing this long is cut off."
    )
    max_n: int = Field(16, ge=1, le=128, description="Largest n of a request; at most max_sequences.")
    api_key: SecretStr | None = Field(None, description="When set, /v1 needs `Authorization: Bearer <key>`.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least severe messages of ours in the replicas' logs."
    )

    @model_validator(mode="before")
    @classmethod
    def unknown_options_name_the_valid_ones(cls, given: object) -> object:
        unknown = sorted(set(given) - set(cls.model_fields)) if isinstance(given, dict) else []
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(unknown)}; valid options: {', '.join(cls.model_fields)}"
            )
        return given

    @field_validator("budget", mode="before")
    @classmethod
    def budget_is_whole_tokens_or_a_fraction(cls, given: object) -> object:
        """1 is one token and 1.0 the whole prompt, also when they come as text."""
        if given is None:
            return None
        value = given
        if isinstance(given, str):
            try:
                value = int(given) if given.strip().lstrip("+-").isdigit() else float(given)
            except ValueError:
                value = None
        whole = type(value) is int and 1 <= value <= MAX_TOKENS
        if not whole and not (isinstance(value, float) and 0 < value <= 1):
            raise ValueError(
                f"{given!r} is neither a whole number of tokens (1 to {MAX_TOKENS}) nor a fraction of the prompt"
                " (0 < f <= 1.0)"
            )
        return value

    @field_validator("prefill_resources", "decode_resources", mode="before")
    @classmethod
    def resources_may_come_as_json(cls, given: object) -> object:
        """`serve run` and `kvtide` hand every value over as text."""
        if not isinstance(given, str):
            return given
        try:
            return json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f'{given!r} is not a JSON object like {{"name": 1}}') from error

    @model_validator(mode="after")
    def default_recipe_is_valid(self) -> Self:
        try:
            _ = self.recipe
        except RecipeError as error:
            raise ValueError(f"{error.field}: {error}") from error
        return self

    @property
    def recipe(self) -> Recipe:
        """The recipe of requests without a `kv` field."""
        return make_recipe(
            policy=self.policy,
            budget=self.budget,
            window=self.window,
            kernel=self.kernel,
            pool=self.pool,
            sinks=self.sinks,
        )

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return (
            self.served_name or os.path.basename(self.model.rstrip("/")).removesuffix(".gguf") or self.model
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give: `name`, and the Hugging Face id where the model has one (owner/name)."""
        is_id = self.model.count("/") == 1 and not self.model.startswith(("/", ".", "~"))
        return (self.name, self.model) if is_id and self.model != self.name else (self.name,)

    def context_length(self, own: int) -> int:
        """Tokens of context served of a model that was made for `own`. ValueError when more is asked for."""
        if self.max_context is not None and self.max_context > own:
            raise ValueError(f"max_context: {self.max_context} is more than the model's own {own} tokens")
        return self.max_context or own

    def threads_per_replica(self, cores: int) -> int:
        """Compute threads of a prefill or decode replica on a machine of that many cores."""
        return self.threads or max(1, cores // (self.prefill_replicas + self.decode_replicas))

    def api_settings(self) -> ApiSettings:
        """The HTTP edge's part."""
        return ApiSettings(
            slow_reader_timeout_s=self.slow_reader_timeout_s,
            deadline_s=self.deadline_s,
            max_n=min(self.max_n, self.max_sequences),  # the choices of a request are decoded together
            api_key=self.api_key,
        )


class ResolvedConfig(BaseModel):
    """What the options come to on this machine: printed by `kvtide config`."""

    options: AppArgs
    default_recipe: str
    served_name: str
    cores: int
    threads_per_replica: int
    environment: dict[str, str]


def cluster_environment() -> dict[str, str]:
    """Environment that a local cluster is started with, unless the user has set it otherwise.

    Ray runs workers at niceness 15, which is right for batch jobs and wrong for a server. Its token authentication
    must be named explicitly, or commands that join the cluster later are refused. HAProxy and throughput mode are
    several times faster per streamed token.
    """
    defaults = {
        "RAY_AUTH_MODE": "token",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Answers between replicas go by gRPC, which drops what is larger; log-probabilities of a long prompt are.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def resolve(options: AppArgs) -> ResolvedConfig:
    """Resolve options on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ResolvedConfig(
        options=options,
        default_recipe=options.recipe.recipe_id,
        served_name=options.name,
        cores=cores,
        threads_per_replica=options.threads_per_replica(cores),
        environment=cluster_environment(),
    )
