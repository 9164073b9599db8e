"""What tests of the directory share: keys, places, and short forms of its calls."""

from __future__ import annotations

from kv_tiers.directory import Outcome, Place
from kv_tiers.keys import Fingerprint, block_keys

LEASE_S = 10.0
CHAIN = block_keys(Fingerprint(bytes(32)), range(50), 1)
KEYS = [key.digest for key in CHAIN]
N1, N2, N3 = (Place(name, "cpu") for name in ("n1", "n2", "n3"))
DISK = Place("n1", "nvme")
REDIS = Place("", "redis")


def pack(keys):
    """Keys or digests, one after another."""
    return b"".join(getattr(key, "digest", key) for key in keys)


def join(directory, place, keys, incarnation=1, now=0.0):
    assert directory.register(place, incarnation, now) is Outcome.OK
    assert directory.announce(place, incarnation, 1, pack(keys), b"") is Outcome.OK


def run(directory, keys=KEYS):
    return directory.locate(pack(keys)).run


def resync(directory, place, seq, keys, incarnation=1):
    """A manifest in one part."""
    return directory.resync(place, incarnation, seq, pack(keys), True, True)
