"""Exception type to HTTP status and OpenAI error shape, in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from engine.errors import (
    ContextOverflow,
    InvalidRequest,
    KvtideError,
    ModelUnavailable,
    Overloaded,
    ReplicaLost,
    RequestAborted,
    UnsupportedModel,
)


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""


class BodyTooLarge(InvalidRequest):
    """The request body is longer than the server reads."""


class NotAuthorized(InvalidRequest):
    """The API key is missing or wrong."""


class BrokenStream(KvtideError):
    """The backend's events do not make whole choices: a gap, a repeat, or an early end."""


class BackendFailed(KvtideError):
    """The backend raised something outside our error tree; the log has it, the client gets no detail."""


class BackendStalled(KvtideError):
    """The backend said nothing within the time that a request may take."""


class SlowReader(KvtideError):
    """The client did not read its stream for too long."""


class ClientDisconnected(KvtideError):
    """The client left; nobody is there to read an answer."""


class Outcome(StrEnum):
    """How a request ended, for metrics and the log."""

    OK = "ok"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    FAILED = "failed"
    DISCONNECTED = "disconnected"
    SLOW_READER = "slow_reader"


@dataclass(frozen=True)
class ApiError:
    """One error as the client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    outcome: Outcome = Outcome.FAILED
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The OpenAI error object, for a response body or an error event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class _Row:
    """Status, wording and outcome of one exception type; `text` None takes the exception's own message."""

    status: int
    type: str
    code: str | None
    outcome: Outcome
    text: str | None = None
    retry: bool = False


_RETRY = "please send the request again"
# Most specific first: the first type that fits an exception decides.
_TABLE: dict[type[KvtideError], _Row] = {
    ModelNotFound: _Row(404, "invalid_request_error", "model_not_found", Outcome.INVALID),
    BodyTooLarge: _Row(413, "invalid_request_error", "request_too_large", Outcome.INVALID),
    NotAuthorized: _Row(401, "invalid_request_error", "invalid_api_key", Outcome.INVALID),
    ContextOverflow: _Row(400, "invalid_request_error", "context_length_exceeded", Outcome.INVALID),
    InvalidRequest: _Row(400, "invalid_request_error", "invalid_value", Outcome.INVALID),
    Overloaded: _Row(429, "overloaded_error", "overloaded", Outcome.OVERLOADED, retry=True),
    RequestAborted: _Row(
        503, "server_error", "aborted", Outcome.FAILED, f"The request was aborted; {_RETRY}.", retry=True
    ),
    ReplicaLost: _Row(
        502, "server_error", "replica_lost", Outcome.FAILED, f"A replica died on this request; {_RETRY}."
    ),
    ModelUnavailable: _Row(
        503,
        "server_error",
        "model_unavailable",
        Outcome.FAILED,
        "The model is not available now.",
        retry=True,
    ),
    UnsupportedModel: _Row(
        501,
        "server_error",
        "unsupported_model",
        Outcome.FAILED,
        "The model needs something that is not built.",
    ),
    BrokenStream: _Row(
        502, "server_error", "incomplete_stream", Outcome.FAILED, f"The answer broke off; {_RETRY}."
    ),
    BackendStalled: _Row(504, "server_error", "timeout", Outcome.FAILED, f"No answer in time; {_RETRY}."),
    SlowReader: _Row(
        408,
        "invalid_request_error",
        "slow_reader",
        Outcome.SLOW_READER,
        "The stream was not read for too long.",
    ),
    ClientDisconnected: _Row(
        499, "invalid_request_error", "client_disconnected", Outcome.DISCONNECTED, "The client left."
    ),
}
_INTERNAL = _Row(
    500, "server_error", "internal_error", Outcome.FAILED, "Internal error; the server's log has it."
)


def api_error(raised: BaseException) -> ApiError:
    """Word `raised` for the client. Types outside our tree become a 500 without detail."""
    row = next((row for kind, row in _TABLE.items() if isinstance(raised, kind)), _INTERNAL)
    text = row.text
    if text is None:
        assert isinstance(raised, InvalidRequest | Overloaded)
        text = raised.message
    headers: dict[str, str] = {}
    if row.retry:
        wait = raised.retry_after_s if isinstance(raised, Overloaded) else 1.0
        headers["Retry-After"] = str(max(1, math.ceil(wait)))
    if row.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    param = raised.field if isinstance(raised, InvalidRequest) else None
    return ApiError(row.status, text, row.type, param, row.code, row.outcome, headers)


def http_error(status: int, detail: str) -> ApiError:
    """Word an error of the HTTP layer itself (no such path, wrong method)."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(status, detail, kind, outcome=Outcome.INVALID if status < 500 else Outcome.FAILED)
