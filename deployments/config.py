"""Everything a user can set, as one checked model. `kvtide config` prints it resolved.

`serve run deployments:app key=value …` validates these fields; so do `kvtide serve` and `serve.yaml` (`args:`).
"""

import json
import os
from contextlib import suppress
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from deployments.api.recipes import AUTO, RecipeBook, make_book
from deployments.api.settings import ApiSettings
from deployments.tier_options import CodecName, TierPlan, check_redis_url, codecs_at_rest, plan_tiers
from policies import load_policy
from policies.recipe import RecipeError
from policies.recipe_checks import MAX_KERNEL, MAX_SINKS, MAX_TOKENS, MAX_WINDOW
from policies.recipe_checks import budget as checked_budget

GIB = 1 << 30

_MOST_GIB = 1 << 16
_Resources = dict[str, Annotated[float, Field(ge=0, le=1e9)]]


class AppArgs(BaseModel):
    """Options of one kvtide application. Times are seconds; sizes say their unit."""

    # An error's text must not show what was given: keys and passwords are in it.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

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

    recipe: str = Field(
        AUTO, min_length=1, description="Recipe of requests that name none: a name in /v1/kv/recipes."
    )
    policy: str | None = Field(
        None, description="Policy of requests that name none; over `recipe`, or instead of its default, auto."
    )
    budget: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | Annotated[float, Field(gt=0, le=1)] | str | None = (
        Field(
            None,
            description="Kept by default: tokens per kv head, fraction of the prompt (0-1), or bytes in all (64MiB).",
        )
    )
    window: int | None = Field(
        None, ge=1, le=MAX_WINDOW, description="Last tokens whose queries score by default."
    )
    kernel: int | None = Field(None, ge=1, le=MAX_KERNEL, description="Default pooling kernel (odd).")
    pool: Literal["avg", "max"] | None = Field(None, description="Default pooling.")
    sinks: int | None = Field(None, ge=0, le=MAX_SINKS, description="First tokens kept by default.")
    kv: dict[str, object] = Field(
        {}, description='Any further recipe fields of the default, e.g. {"heads": "ada", "decode": "h2o"}.'
    )
    recipes: dict[str, dict[str, object]] = Field(
        {},
        description='Recipes by name: fields over a preset\'s or a new one\'s, e.g. {"qa": {"budget": 0.1}}.',
    )
    scorers: list[str] = Field(
        [],
        description='Policies of your own, "package.module:Class", importable on every node; may be named then.',
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
    nvme_tier_gib: float = Field(
        0,
        ge=0,
        le=_MOST_GIB,
        description="NVMe tier per node: one file of this size, kept over restarts; 0: none.",
    )
    nvme_tier_folder: str | None = Field(
        None, description="Folder of the NVMe tier's file; default: kvtide's cache folder."
    )
    nvme_tier_codec: CodecName = Field(
        "exact",
        description="How blocks lie in NVMe; lossily they take half or less, and serve requests with kv.at_rest only.",
    )
    redis_url: SecretStr | None = Field(
        None,
        description="Redis tier shared by all nodes: redis://, rediss:// (TLS) or unix://; cluster=1 in the query.",
    )
    redis_tier_gib: float = Field(
        1.0, gt=0, le=_MOST_GIB, description="Most Redis memory that a node's blocks take, metadata included."
    )
    redis_tier_packing: Literal["none", "zstd"] = Field(
        "none", description="Lossless packing of blocks in Redis: less memory, slower."
    )
    redis_tier_codec: CodecName = Field(
        "exact", description="How blocks lie in Redis; as nvme_tier_codec. Nodes of one Redis have the same."
    )
    tier_policy: Literal["reuse", "lru"] = Field(
        "reuse",
        description="What tiers give up first: by learned chance of reuse, or the least recently used.",
    )
    admission: Literal["auto", "always", "second_use", "never"] = Field(
        "auto",
        description="Which blocks are written to the NVMe and Redis tiers; auto: what is worth the write.",
    )
    tier_ttl_s: float | None = Field(
        None, gt=0, le=1e9, description="Blocks that nobody used for so long leave the tiers; default: never."
    )
    tenant_share: float = Field(
        1.0, gt=0, le=1, description="Most of a tier that one tenant (`cache_salt`) may hold, as a fraction."
    )
    directory_shards: int = Field(1, ge=1, le=64, description="Directory actors that share the blocks' keys.")

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
    def budget_is_tokens_a_fraction_or_bytes(cls, given: object) -> object:
        """1 is one token and 1.0 the whole prompt, also when they come as text."""
        if given is None:
            return None
        value = given
        if isinstance(given, str):
            with suppress(ValueError):  # a size, perhaps
                value = int(given) if given.strip().lstrip("+-").isdigit() else float(given)
        try:
            return checked_budget("budget", value)
        except RecipeError as error:
            raise ValueError(f"{error.problem}; valid: {error.valid}") from error

    @field_validator("prefill_resources", "decode_resources", "kv", "recipes", mode="before")
    @classmethod
    def objects_may_come_as_json(cls, given: object) -> object:
        """`serve run` and `kvtide` hand every value over as text."""
        return _from_json(given, 'object like {"name": 1}')

    @field_validator("scorers", mode="before")
    @classmethod
    def one_scorer_may_come_alone(cls, given: object) -> object:
        if isinstance(given, str) and not given.lstrip().startswith("["):
            return [given]
        return _from_json(given, 'list like ["package.module:Class"]')

    @field_validator("scorers")
    @classmethod
    def scorers_can_be_loaded(cls, given: list[str]) -> list[str]:
        _load(given)
        return given

    @field_validator("cpu_tier_folder", "nvme_tier_folder")
    @classmethod
    def folders_are_absolute(cls, given: str | None) -> str | None:
        """Replicas and node agents run in folders of Ray's."""
        if given is not None and not os.path.isabs(given):
            raise ValueError(f"{given!r} is not an absolute path")
        return given

    @field_validator("redis_url")
    @classmethod
    def redis_url_names_a_server(cls, given: SecretStr | None) -> SecretStr | None:
        if given is not None:
            check_redis_url(given.get_secret_value())
        return given

    @model_validator(mode="after")
    def lower_tiers_have_a_cpu_tier_above_them(self) -> Self:
        """Blocks come into a node, and out of it, through its CPU tier."""
        below = [name for name in ("nvme_tier_gib", "redis_url") if getattr(self, name)]
        if below and not self.cpu_tier_gib:
            raise ValueError(
                f"{' and '.join(below)}: blocks pass through the CPU tier, and cpu_tier_gib is 0; "
                "valid: cpu_tier_gib above 0"
            )
        return self

    @model_validator(mode="after")
    def no_field_of_the_default_is_set_twice(self) -> Self:
        wrong = [name for name in self.kv if name == "recipe" or getattr(self, name, None) is not None]
        if wrong := sorted({"recipe", *_ALONE}.intersection(wrong)):
            raise ValueError(f"kv: {', '.join(wrong)} set as an option of its own; leave it out of kv")
        return self

    @model_validator(mode="after")
    def recipes_are_valid(self) -> Self:
        try:
            _ = self.recipe_book
        except RecipeError as error:
            raise ValueError(f"{error.field}: {error}") from error
        return self

    @property
    def recipe_book(self) -> RecipeBook:
        """The named recipes, and that of requests without a `kv` field."""
        self.load_scorers()
        alone = {name: getattr(self, name) for name in _ALONE if getattr(self, name) is not None}
        return make_book(self.recipe, {**self.kv, **alone}, self.recipes)

    def load_scorers(self) -> None:
        """Make the user's own policies known in this process."""
        _load(self.scorers)

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
            at_rest=codecs_at_rest(self),
        )


_ALONE = ("policy", "budget", "window", "kernel", "pool", "sinks")
"""Recipe fields that are options of their own."""


def _load(scorers: list[str]) -> None:
    for path in scorers:
        try:
            load_policy(path)
        except RecipeError as error:
            raise ValueError(f"{error.problem}; valid: {error.valid}") from error


def _from_json(given: object, wanted: str) -> object:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except json.JSONDecodeError as error:
        raise ValueError(f"{given!r} is not a JSON {wanted}") from error


class ResolvedConfig(BaseModel):
    """What the options come to on this machine: printed by `kvtide config`."""

    options: AppArgs
    default_recipe: str
    recipe_warnings: tuple[str, ...]
    served_name: str
    tiers: tuple[TierPlan, ...]
    tier_warnings: tuple[str, ...]
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
    book = options.recipe_book
    tiers, tier_warnings = plan_tiers(options)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ResolvedConfig(
        options=options,
        default_recipe=book.label,
        recipe_warnings=book.warnings,
        served_name=options.name,
        tiers=tiers,
        tier_warnings=tier_warnings,
        cores=cores,
        threads_per_replica=options.threads_per_replica(cores),
        environment=cluster_environment(),
    )
