"""A node's tiers in numbers: for the API, per tier, and for the directory's reports."""

from collections.abc import Container

from kv_tiers.store import TieredStore
from kv_tiers.store_ports import CPU, SourceCounters, StoreStats
from kv_tiers.tier import TierStats

_NOTHING = TierStats(*(0,) * 14)


def tier_figures(
    store: TieredStore, slot_bytes: int, failed: Container[str] = ()
) -> dict[str, dict[str, float]]:
    """Tier → figure → value, as `deployments/api/metrics.py: TIER_GAUGES` names them, and `slot_bytes`.

    `failed`: tiers that are wanted and cannot start.
    """
    stats = store.stats()
    figures = {
        name: _figures(tier, _reads(name, tier, stats, slot_bytes), slot_bytes)
        for name, tier in stats.tiers.items()
    }
    for tier in store.lower:
        if getattr(tier, "incarnation", None) == 0:  # a shared store that was not reached yet
            figures[tier.name]["open"] = 1.0
    for name in ("nvme", "redis"):
        if name in failed:
            figures[name] = _figures(_NOTHING, SourceCounters(), slot_bytes) | {"open": 1.0}
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


def _figures(tier: TierStats, reads: SourceCounters, slot_bytes: int) -> dict[str, float]:
    return {
        "blocks": float(tier.visible),
        "capacity": float(tier.capacity),
        "pinned": float(tier.pinned),
        "hits": float(reads.hits),
        "misses": float(reads.missing),
        "evicted": float(tier.blocks_evicted),
        "failures": float(reads.failed + reads.corrupt),
        "refused": float(tier.blocks_refused),
        "bytes_read": float(reads.nbytes),
        "bytes_written": float(tier.blocks_written * slot_bytes),
        "open": 0.0,
        "slot_bytes": float(slot_bytes),
    }
