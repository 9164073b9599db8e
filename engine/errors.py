"""The one exception tree for what other people's input and machines can do to us.

The gateway maps each type to an HTTP status in one place (`deployments/api/errors.py`). Our own mistakes are
`assert`s, and lost KV is no error at all: it is a recompute, counted.
"""

from __future__ import annotations


class KvtideError(Exception):
    """Base of every error that kvtide raises on purpose."""


class InvalidRequest(KvtideError):
    """The request cannot be served as asked; `field` names the offending parameter (dotted path) if there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str | None]]:
        # Crosses process borders inside Ray; the default reduce would drop `field`.
        return (type(self), (self.message, self.field))


class ContextOverflow(InvalidRequest):
    """Prompt, or prompt plus `max_tokens`, does not fit the context; the message names both numbers."""


class Overloaded(KvtideError):
    """No room now; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return (type(self), (self.message, self.retry_after_s))


class RequestAborted(KvtideError):
    """The request was cancelled by its client or superseded by a newer attempt."""


class UnsupportedModel(KvtideError):
    """The model needs something that is not built; the message names it."""


class ModelUnavailable(KvtideError):
    """Weights cannot be found or read; the message says where we looked and what to do."""


class ReplicaLost(KvtideError):
    """A replica died while it worked for this request and no attempt was left."""


class GenerationFailed(KvtideError):
    """The engine could not go on with this request (logits without a usable token, a failed step)."""
