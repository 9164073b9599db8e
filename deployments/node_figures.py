"""A node's tiers in numbers: for the API, per tier, and for the directory's reports."""

from collections.abc import Container

from kv_tiers.at_rest import AtRest
from kv_tiers.store import TieredStore
from kv_tiers.store_ports import CPU, SourceCounters, StoreStats
from kv_tiers.tier import TierStats

_NOTHING = TierStats(*(0,) * 14)


def tier_figures(
    store: TieredStore, slot_bytes: int, failed: Container[str] = ()
) -> dict[str, dict[str, float]]:
    """Tier → figure → value, as `deployments/api/metrics.py: TIER_GAUGES` names them, and `slot_bytes`.

    `failed`: tiers that are wanted and cannot start. Only running tiers below the slab have speeds.
    """
    stats = store.stats()
    kept = {tier.name: (tier.at_rest, getattr(tier, "stored_bytes", slot_bytes)) for tier in store.lower}
    figures = {
        name: _figures(
            tier, _reads(name, tier, stats, slot_bytes), *kept.get(name, (AtRest.EXACT, slot_bytes))
        )
        for name, tier in stats.tiers.items()
    }
    for tier in store.lower:
        speed = stats.speeds[tier.name]
        figures[tier.name] |= {
            "open": float(tier.left_alone),
            "read_latency_s": speed.latency_s,
            "read_bytes_per_s": speed.bytes_per_s,
        }
    for name in ("nvme", "redis"):
        if name in failed:
            figures[name] = _figures(_NOTHING, SourceCounters(), AtRest.EXACT, slot_bytes) | {"open": 1.0}
    return figures


def gauges(store: TieredStore) -> dict[str, float]:
    """What the agent reports of itself, under names of `deployments/api/metrics.py: GAUGES`."""
    stats = store.stats()
    slot_bytes = store.slot_bytes
    told = {
        f"{name}_tier_{figure}": value
        for name, figures in tier_figures(store, slot_bytes).items()
        for figure, value in figures.items()
        if figure != "slot_bytes"
    }
    remote = [source for kind, source in stats.sources.items() if kind.startswith("peer")]
    return {
        **told,
        "remote_blocks_read": float(sum(source.hits for source in remote)),
        "spill_queue": float(stats.queued),
        "spill_written": float(stats.spill.written),
        "spill_refused": float(stats.spill.refused + stats.spill.failed),
        "spill_unworthy": float(stats.spill.unworthy),
        "quarantined_slots": float(stats.unattended),
    }


def _reads(name: str, tier: TierStats, stats: StoreStats, slot_bytes: int) -> SourceCounters:
    """What was asked of the tier and found."""
    if name == CPU:
        return SourceCounters(
            blocks=stats.asked,
            hits=stats.here,
            missing=stats.asked - stats.here,
            nbytes=tier.blocks_read * slot_bytes,
        )
    return stats.sources.get(name, SourceCounters())


def _figures(tier: TierStats, reads: SourceCounters, at_rest: AtRest, slot_bytes: int) -> dict[str, float]:
    """`slot_bytes`: as blocks lie in the tier."""
    return {
        "blocks": float(tier.visible),
        "capacity": float(tier.capacity),
        "pinned": float(tier.pinned),
        "hits": float(reads.hits),
        "misses": float(reads.missing),
        "evicted": float(tier.blocks_evicted),
        "failures": float(reads.failed + reads.corrupt),
        "refused": float(tier.blocks_refused),
        "bytes_read": float(reads.nbytes if at_rest is AtRest.EXACT else reads.hits * slot_bytes),
        "bytes_written": float(tier.blocks_written * slot_bytes),
        "open": 0.0,
        "codec": float(at_rest),
        "slot_bytes": float(slot_bytes),
    }
