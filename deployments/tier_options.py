"""What the options of the tiers come to: checks of their form, and the plan that `kvtide config` prints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pydantic import BaseModel, SecretStr

from deployments.slabs import slab_folder
from engine.weights import default_cache
from kv_tiers.at_rest import AtRest
from kv_tiers.redis_address import RedisAddress

_GIB = 1 << 30

CodecName = Literal["exact", "fp8", "int8", "int4"]
"""`AtRest` as options say it."""

_URLS = "redis://host:port/db, rediss://… (TLS), unix:///path or redis+cluster://host"


class TierOptions(Protocol):
    """The part of `AppArgs` that is read here."""

    @property
    def cpu_tier_gib(self) -> float: ...
    @property
    def cpu_tier_folder(self) -> str | None: ...
    @property
    def nvme_tier_gib(self) -> float: ...
    @property
    def nvme_tier_folder(self) -> str | None: ...
    @property
    def nvme_tier_codec(self) -> CodecName: ...
    @property
    def redis_tier_codec(self) -> CodecName: ...
    @property
    def redis_url(self) -> SecretStr | None: ...
    @property
    def redis_tier_gib(self) -> float: ...
    @property
    def model_fields_set(self) -> set[str]: ...


class TierPlan(BaseModel):
    """One tier of a node: at most so many bytes, where they lie and how. Of a URL only what is no secret."""

    tier: str
    gib: float
    where: str
    codec: CodecName = "exact"


def check_redis_url(url: str) -> None:
    """ValueError, without any part of the URL's text (it may hold a password), where it names no Redis server."""
    problem = _url_problem(url)
    if problem is None:
        try:
            RedisAddress.parse(url)
        except ValueError as error:
            problem = str(error)
        except OSError:  # files that TLS options name, which may be on other machines
            return
    if problem is not None:
        raise ValueError(f"{problem}; valid: {_URLS}, user:password@ before the host where it needs them")


def _url_problem(url: str) -> str | None:
    """What would be said with the URL's text in it further down."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # computed from text, with a ValueError of its own
    except ValueError:
        return "the URL's host or port cannot be read"
    if parts.scheme.startswith("redis"):
        if not parts.hostname:
            return "the URL has no host"
        if not (parts.path.strip("/") or "0").isdecimal():
            return "the URL's path is no database number"
    numbers = [value for name, value in parse_qsl(parts.query) if name == "db"]
    return None if all(number.isdecimal() for number in numbers) else "the URL's db is no database number"


def plain_url(url: str) -> str:
    """The URL without user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return SplitResult(parts.scheme, host, parts.path, "", "").geturl()


def plan_tiers(options: TierOptions) -> tuple[tuple[TierPlan, ...], tuple[str, ...]]:
    """The tiers that each node gets, as on this machine, and what the user should know about them."""
    plans: list[TierPlan] = []
    warnings: list[str] = []
    if options.cpu_tier_gib:
        folder = slab_folder(options.cpu_tier_folder, int(options.cpu_tier_gib * _GIB))
        plans.append(TierPlan(tier="cpu", gib=options.cpu_tier_gib, where=str(folder)))
        warnings += _room("cpu_tier_gib", folder, options.cpu_tier_gib)
    if options.nvme_tier_gib:
        folder = Path(options.nvme_tier_folder or default_cache())
        codec = options.nvme_tier_codec
        plans.append(TierPlan(tier="nvme", gib=options.nvme_tier_gib, where=str(folder), codec=codec))
        warnings += _room("nvme_tier_gib", folder, options.nvme_tier_gib)
    if options.redis_url is not None:
        where = plain_url(options.redis_url.get_secret_value())
        codec = options.redis_tier_codec
        plans.append(TierPlan(tier="redis", gib=options.redis_tier_gib, where=where, codec=codec))
    return tuple(plans), (*warnings, *without_effect(options))


def codecs_at_rest(options: TierOptions) -> tuple[str, ...]:
    """How the tiers keep blocks: exact ones always, and the lossy codecs of tiers that there are."""
    kept = [AtRest.EXACT]
    if options.nvme_tier_gib:
        kept.append(AtRest.named(options.nvme_tier_codec))
    if options.redis_url is not None:
        kept.append(AtRest.named(options.redis_tier_codec))
    return tuple(codec.label for codec in sorted(set(kept)))


def _room(option: str, folder: Path, gib: float) -> list[str]:
    """A tier whose file is there already takes what is free and itself, so this only warns."""
    there = next((each for each in (folder, *folder.parents) if each.is_dir()), None)
    if there is None:
        return [f"{option}: the folder {folder} does not exist and cannot be made here"]
    free = shutil.disk_usage(there).free / _GIB
    return [f"{option}: {gib:g} GiB asked for, {free:.1f} GiB free in {there}"] if free < gib else []


def without_effect(options: TierOptions) -> list[str]:
    """Options that were given and are about tiers that there are not. No error: a tier may be off for a while."""
    nvme, redis = options.nvme_tier_gib > 0, options.redis_url is not None
    about = {
        "nvme_tier_folder": (nvme, "nvme_tier_gib is 0"),
        "nvme_tier_codec": (nvme, "nvme_tier_gib is 0"),
        "redis_tier_gib": (redis, "there is no redis_url"),
        "redis_tier_packing": (redis, "there is no redis_url"),
        "redis_tier_codec": (redis, "there is no redis_url"),
        "admission": (nvme or redis, "there is no tier below the CPU tier; see nvme_tier_gib and redis_url"),
    }
    return [
        f"{name} has no effect: {why}"
        for name, (there, why) in about.items()
        if not there and name in options.model_fields_set
    ]
