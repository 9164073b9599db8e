"""Which blocks go next, tier-wide and per tenant, and how many slots each tenant is charged for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kv_tiers.keys import BlockKey
from kv_tiers.ranking import Ranking
from policies.tiering import EvictionPolicy, Lru


class Quotas:
    """The tier's `Ranking` and, where a tenant may hold only a share of the slots, one per tenant.

    A tenant gives up its own least recently used blocks (no policy is asked: it ranks the tier's blocks, and finding
    one tenant's among them would take a search). Slots of nobody (tenant None) are charged, but not bounded.
    """

    def __init__(self, slots: int, policy: EvictionPolicy[BlockKey], tenant_share: float) -> None:
        if not 0 < tenant_share <= 1:
            raise ValueError(f"a tenant's share lies in (0, 1], not {tenant_share}")
        self.all = Ranking(policy)
        self._slots = slots
        self._most = max(1, int(tenant_share * slots)) if tenant_share < 1 else None
        self._own: dict[str, Ranking] = {}
        self._charged: dict[str | None, int] = {}

    @property
    def bounded(self) -> bool:
        """Whether tenants have rankings of their own now."""
        return bool(self._own)

    def charge(self, tenant: str | None) -> None:
        """One more slot is the tenant's. Before its block enters `rankings`."""
        self._charged[tenant] = self._charged.get(tenant, 0) + 1
        if tenant is not None and self._most is not None:
            self._own.setdefault(tenant, Ranking(Lru()))

    def refund(self, tenant: str | None) -> None:
        """One less is."""
        self._charged[tenant] -= 1
        if not self._charged[tenant]:
            del self._charged[tenant]
            if tenant is not None:
                self._own.pop(tenant, None)

    def charged(self) -> dict[str | None, int]:
        """Slots per tenant."""
        return dict(self._charged)

    def room(self, tenant: str | None) -> int:
        """Slots that the tenant may still get; negative where it has too many."""
        if tenant is None or self._most is None:
            return self._slots
        return self._most - self._charged.get(tenant, 0)

    def lowest_own(
        self, tenant: str | None, count: int, now: float, spare: Collection[BlockKey] = frozenset()
    ) -> list[BlockKey]:
        """Up to `count` idle keys of a bounded tenant, those that go first."""
        own = self._own_of(tenant)
        return [] if own is None else own.lowest(count, now, spare)

    def accessed(self, chain: Sequence[BlockKey], tenants: Collection[str | None], now: float) -> None:
        """A request had this chain, of blocks that are charged to these tenants."""
        self.all.accessed(chain, now)
        for tenant in tenants:
            if (own := self._own_of(tenant)) is not None:
                own.accessed(chain, now)

    def rankings(self, tenant: str | None) -> tuple[Ranking, ...]:
        """Those that a block of the tenant is in."""
        own = self._own_of(tenant)
        return (self.all,) if own is None else (self.all, own)

    def check(
        self,
        idle: Mapping[BlockKey, str | None],
        all_keys: Collection[BlockKey],
        charged: dict[str | None, int],
        now: float,
    ) -> None:
        """Assert that every ranking offers exactly its idle keys, and that charges are as counted by the caller."""
        assert self._charged == charged
        self.all.check(idle, all_keys, now)
        assert self._own.keys() <= self._charged.keys()
        for tenant, own in self._own.items():
            own.check([key for key, whose in idle.items() if whose == tenant], all_keys, now)

    def _own_of(self, tenant: str | None) -> Ranking | None:
        return None if tenant is None else self._own.get(tenant)
