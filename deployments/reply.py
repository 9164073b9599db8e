"""What prefill answers to decode."""

from dataclasses import dataclass

from engine.request import PromptEvent
from engine.sampler import Sampled, SamplingError


@dataclass(frozen=True)
class PrefillReply:
    """First token of each choice, what the prompt cost, and the ticket (`Ticket.to_bytes`) to pull survivors with.

    `ticket` is None when every choice ends with its first token: then nothing was staged.
    """

    prompt: PromptEvent
    first: tuple[Sampled | SamplingError, ...]
    ticket: bytes | None
