"""What prefill answers to decode."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import PromptEvent
from engine.sampler import Sampled, SamplingError


@dataclass(frozen=True)
class PackedSnapshot:
    """Survivors inside the reply itself (transport `local`): `payload` uint8 [nbytes], read-only for its receiver.

    `checksum` is `payload_checksum` of it, `fingerprint` the model's digest.
    """

    fingerprint: bytes
    checksum: int
    payload: NDArray[np.uint8]


@dataclass(frozen=True)
class PrefillReply:
    """First token of each choice, what the prompt cost, and where its survivors are.

    At most one of `ticket` (`Ticket.to_bytes`, to pull them with) and `snapshot` is set; neither when every choice ends
    with its first token: then nothing was staged.
    """

    prompt: PromptEvent
    first: tuple[Sampled | SamplingError, ...]
    ticket: bytes | None = None
    snapshot: PackedSnapshot | None = None
