"""Limits and time bounds of the HTTP edge, as checked data."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class ApiSettings(BaseModel):
    """What one gateway allows. Times are seconds. Every field has a default that suits one node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: int = Field(default=32 * 2**20, ge=1, description="Largest request body; beyond it 413.")
    max_n: int = Field(default=16, ge=1, le=128, description="Largest `n`.")
    max_choices: int = Field(default=128, ge=1, description="Largest prompts x n of one completions request.")
    stream_buffer_events: int = Field(
        default=256,
        ge=1,
        description="Events held for one client that reads slowly; then the backend's stream is not read.",
    )
    slow_reader_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="A client whose buffer stays full, or that takes no byte, this long is cut off.",
    )
    keepalive_after_s: float = Field(
        default=10.0,
        gt=0,
        description="Silence before the first event after which a stream answers 200 and sends comments. "
        "Until then an error has its own HTTP status; afterwards it is an error event.",
    )
    keepalive_interval_s: float = Field(
        default=15.0, gt=0, description="Silence between two comments of an open stream."
    )
    deadline_s: float = Field(
        default=600.0, gt=0, description="Bound on queueing plus prefill, handed to the engine."
    )
    deadline_grace_s: float = Field(
        default=10.0, ge=0, description="Time past the deadline after which the gateway itself gives up."
    )
    idle_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest silence of a backend stream between two batches; then it is closed.",
    )
    probe_timeout_s: float = Field(
        default=5.0, gt=0, description="Bound on asking the backend for readiness or gauges."
    )
    at_rest: tuple[str, ...] = Field(
        default=("exact",), description="How tiers keep blocks: what a request's kv.at_rest may name."
    )
    api_key: SecretStr | None = Field(
        default=None, description="When set, /v1 needs `Authorization: Bearer <key>`."
    )
