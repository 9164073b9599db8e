"""Builds the Serve application: `serve run deployments:app model=… policy=…`.

No `from __future__ import annotations` here: Serve validates `key=value` against the annotation itself.
"""

from ray import serve
from ray.serve import Application

from deployments.config import AppArgs
from deployments.environment import prepare_environment
from deployments.replicas import Decode, Gateway, Prefill

# Every request that waits in a replica's own queue counts as ongoing; the services refuse beyond their bounds. So Serve
# queues only what finds no live replica, `max_queued_requests` per caller: as much as the pool takes at once, for a
# burst passes through that queue too.
_ONGOING = 4096


def _replica_options(args: AppArgs, resources: dict[str, float]) -> dict[str, object]:
    # Spinning OpenMP threads of replicas that share cores stall each other by milliseconds per call.
    environment = {"env_vars": {"GOMP_SPINCOUNT": "0"}}
    return {"num_cpus": args.replica_cpus, "resources": resources, "runtime_env": environment}


def app(args: AppArgs) -> Application:
    """The application of one model: gateway → decode pool → prefill pool."""
    prepare_environment()
    prefill = serve.deployment(
        Prefill,
        name="Prefill",
        num_replicas=args.prefill_replicas,
        max_ongoing_requests=_ONGOING,
        max_queued_requests=args.prefill_replicas * args.max_queued,
        ray_actor_options=_replica_options(args, args.prefill_resources),
        health_check_period_s=2,
        health_check_timeout_s=30,
    ).bind(args)
    decode = serve.deployment(
        Decode,
        name="Decode",
        num_replicas=args.decode_replicas,
        max_ongoing_requests=_ONGOING,
        max_queued_requests=args.decode_replicas * (args.max_sequences + args.max_queued),
        ray_actor_options=_replica_options(args, args.decode_resources),
        health_check_period_s=2,
        health_check_timeout_s=30,
    ).bind(args, prefill)
    return serve.deployment(
        Gateway,
        name="Gateway",
        num_replicas=args.gateway_replicas,
        max_ongoing_requests=_ONGOING,
        ray_actor_options={"num_cpus": 0},
    ).bind(args, decode)
