"""Prometheus metrics of the edge in a registry of their own, and one log line per request.

Not `ray.util.metrics`: its histograms estimate `_sum` and its gauges vanish. One registry belongs to one
application object, so several can live in one process.

What is counted here is this gateway's: `kvtide_request…` and the histograms. What replicas report (`source=…`) is the
whole application's and the same at every gateway.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from math import isnan

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from deployments.api.answer import UsageTally
from deployments.api.backend import TIERS
from deployments.api.errors import Outcome
from deployments.api.plan import Plan
from engine.report import SelectionReport
from engine.request import Event, PromptEvent, TokenEvent
from kv_tiers.at_rest import AtRest

_log = logging.getLogger("kvtide.api.access")

TIER_GAUGES = {
    "blocks": "Blocks that can be read.",
    "capacity": "Most blocks.",
    "pinned": "Blocks that users or readers hold.",
    "hits": "Blocks that were asked for and read, since the node's agent started.",
    "misses": "Blocks that were asked for and not there.",
    "evicted": "Blocks that had to make room.",
    "failures": "Blocks that could not be read or written, or were not whole.",
    "refused": "Blocks that found no room.",
    "bytes_read": "Bytes read.",
    "bytes_written": "Bytes written.",
    "open": "1 while the tier is left alone because it failed.",
    "read_latency_s": "Seconds that a load is expected to take beside its bytes, as measured of late.",
    "read_bytes_per_s": "Bytes per second that a load is expected to come at, as measured of late.",
    "codec": f"How blocks lie there: {', '.join(f'{codec.value} {codec.label}' for codec in AtRest)}.",
}
"""Figures that a node agent tells of each of its tiers, with their help; as gauges `<tier>_tier_<figure>`."""

GAUGES = {
    **{f"{tier}_tier_{name}": f"{tier} tier: {text}" for tier in TIERS for name, text in TIER_GAUGES.items()},
    "remote_blocks_read": "Blocks read from other nodes' CPU tiers.",
    "spill_queue": "Blocks that wait for their write-down.",
    "spill_written": "Blocks written down to lower tiers.",
    "spill_refused": "Blocks that a lower tier did not take.",
    "spill_unworthy": "Blocks that admission found not worth a write-down.",
    "quarantined_slots": "Slots of the CPU tier that a transfer might still write to.",
    "directory_nodes": "Nodes that the directory knows.",
    "directory_blocks": "Blocks that the directory can find.",
    **{f"directory_{tier}_entries": f"Blocks that the directory knows in the {tier} tier." for tier in TIERS},
    "queue": "Requests waiting for admission.",
    "running": "Sequences in the batch.",
    "pages_used": "Pages of the decode pool that hold KV.",
    "pages_total": "Pages of the decode pool.",
    "tickets_open": "Transfer tickets not yet ended.",
    "pages_owed": "Pages promised to transfers that have not ended.",
    "kept_tokens": "Prompt tokens kept per kv head, summed over requests being decoded.",
    "shipped_bytes": "Bytes of survivors pulled since the replica started.",
    "staged_bytes": "Transfer memory of tickets not yet ended.",
    "landing_bytes": "Transfer memory of survivors that have landed and are not in pages yet.",
    "snapshot_bytes_waiting": "Host memory of survivors that wait for pages.",
    "recomputes": "Prompts prefilled again because their survivors could not be fetched.",
}
"""Gauges that replicas report, with their help; other names are passed on without help."""

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180, 600)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800)


class ReplicaGauges(Collector):
    """Renders the last report: source to gauge to value. A source that is not reported is not shown."""

    def __init__(self) -> None:
        self.report: Mapping[str, Mapping[str, float]] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family per gauge name, one sample per source."""
        families: dict[str, GaugeMetricFamily] = {}
        for source, gauges in sorted(self.report.items()):
            for name, value in sorted(gauges.items()):
                clean = _NOT_IN_NAMES.sub("_", name)
                if clean not in families:
                    help_text = GAUGES.get(clean, "Reported by replicas.")
                    families[clean] = GaugeMetricFamily(f"kvtide_{clean}", help_text, labels=["source"])
                families[clean].add_metric([source], value)
        yield from families.values()


class ApiMetrics:
    """All series of one application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self.replicas = ReplicaGauges()
        self.registry.register(self.replicas)
        r = self.registry
        self.requests = Counter(
            "kvtide_requests", "Requests by how they ended.", ["endpoint", "outcome"], registry=r
        )
        self.in_flight = Gauge("kvtide_requests_in_flight", "HTTP requests being answered.", registry=r)
        self.ttft = Histogram(
            "kvtide_time_to_first_token_seconds", "Arrival to the first token.", registry=r, buckets=_TTFT_S
        )
        self.gap = Histogram(
            "kvtide_inter_token_seconds",
            "Time per token after a choice's first; tokens that arrive together share their gap.",
            registry=r,
            buckets=_GAP_S,
        )
        self.e2e = Histogram(
            "kvtide_request_seconds",
            "Arrival to the end of the answer.",
            ["endpoint"],
            registry=r,
            buckets=_E2E_S,
        )
        # Replicas report some of these too, under names of theirs; one name cannot be a counter and a gauge.
        self.prompt_tokens = Counter("kvtide_request_prompt_tokens", "Prompt tokens.", registry=r)
        self.generated_tokens = Counter("kvtide_request_generated_tokens", "Generated tokens.", registry=r)
        self.cached_tokens = Counter(
            "kvtide_request_cached_tokens", "Prompt tokens whose KV was loaded.", registry=r
        )
        self.kept_tokens = Counter(
            "kvtide_request_kept_tokens", "Prompt tokens that selection kept.", registry=r
        )
        self.shipped_bytes = Counter(
            "kvtide_request_shipped_bytes", "Bytes pulled from prefill to decode.", registry=r
        )
        self.stats_failures = Counter(
            "kvtide_stats_failures", "Scrapes without the replicas' gauges.", registry=r
        )
        self.policies = PolicyMetrics(r)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class PolicyMetrics:
    """What selection did, per eviction policy."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by = ["policy"]
        self.prompts = Counter("kvtide_policy_prompts", "Prompts served.", by, registry=registry)
        self.evicted_tokens = Counter(
            "kvtide_policy_evicted_tokens",
            "Prompt tokens dropped, counted in the kv head that kept most.",
            by,
            registry=registry,
        )
        self.kept_mass = Histogram(
            "kvtide_kept_attention_mass",
            "Share of the last queries' attention that survivors hold, mean over layers; of requests with kv.report "
            "and of prompts that stay whole.",
            by,
            registry=registry,
            buckets=_SHARES,
        )
        self.entropy = Histogram(
            "kvtide_budget_entropy",
            "Entropy of the tokens kept over layers and heads, 1 where all keep the same.",
            by,
            registry=registry,
            buckets=_SHARES,
        )

    def observe(self, policy: str, event: PromptEvent) -> None:
        """One prompt is done."""
        self.prompts.labels(policy).inc()
        self.evicted_tokens.labels(policy).inc(max(0, event.prompt_tokens - event.kept_tokens))
        if event.report is not None:
            self._observe_report(policy, event.report)

    def _observe_report(self, policy: str, report: SelectionReport) -> None:
        self.entropy.labels(policy).observe(report.entropy)
        known = [mass for mass in report.kept_mass or () if not isnan(mass)]
        if known:
            self.kept_mass.labels(policy).observe(sum(known) / len(known))


class RequestMeter:
    """Times and counts one HTTP request; `finish` is called exactly once."""

    def __init__(self, metrics: ApiMetrics, endpoint: str, request_id: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._request_id = request_id
        self._start = metrics.clock()
        self._first_token_s: float | None = None
        self._last: dict[tuple[int, int], float] = {}
        self._usage = UsageTally()
        self.plan: Plan | None = None
        metrics.in_flight.inc()

    def observe(self, prompt: int, events: list[Event]) -> None:
        """One batch arrived from the backend."""
        now = self._metrics.clock()
        new: dict[int, int] = {}
        for event in events:
            self._usage.add(event)
            if isinstance(event, TokenEvent):
                new[event.choice] = new.get(event.choice, 0) + 1
            else:
                self._metrics.prompt_tokens.inc(event.prompt_tokens)
                self._metrics.cached_tokens.inc(event.cached_tokens)
                self._metrics.kept_tokens.inc(event.kept_tokens)
                self._metrics.shipped_bytes.inc(event.shipped_bytes)
                if self.plan is not None:
                    self._metrics.policies.observe(self.plan.requests[prompt].recipe.policy, event)
        for choice, count in new.items():
            self._metrics.generated_tokens.inc(count)
            self._observe_tokens((prompt, choice), count, now)

    def _observe_tokens(self, key: tuple[int, int], count: int, now: float) -> None:
        if key not in self._last:
            if key[1] == 0:  # one time to first token per prompt, not per choice
                self._metrics.ttft.observe(now - self._start)
            if self._first_token_s is None:
                self._first_token_s = now - self._start
            self._last[key] = now
            return
        gap = (now - self._last[key]) / count
        for _ in range(count):
            self._metrics.gap.observe(gap)
        self._last[key] = now

    def finish(self, outcome: Outcome) -> None:
        """The request ended."""
        took = self._metrics.clock() - self._start
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(self._endpoint, outcome.value).inc()
        self._metrics.e2e.labels(self._endpoint).observe(took)
        usage = self._usage
        record = {
            "event": "request",
            "request_id": self._request_id,
            "answer_id": self.plan.answer_id if self.plan else None,
            "endpoint": self._endpoint,
            "outcome": outcome.value,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "lossy_tokens": usage.lossy_tokens,
            "kept_tokens": usage.kept_tokens,
            "completion_tokens": usage.completion_tokens,
            "shipped_bytes": usage.shipped_bytes,
            "recipe": usage.recipe_id,
            "first_token_s": None if self._first_token_s is None else round(self._first_token_s, 6),
            "total_s": round(took, 6),
        }
        _log.info("%s", json.dumps(record))
