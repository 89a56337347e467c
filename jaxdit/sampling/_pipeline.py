"""What an engine samples: a backbone, its conditions, its scheduler, and how rows become pictures."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from ..encoders import Grid
from ..schedulers import Scheduler
from ._backbone import Backbone
from ._denoiser import Conditions
from ._request import Request


@runtime_checkable
class Pipeline(Protocol):
    """A model with all that surrounds it.

    Attributes:
        backbone: what is evaluated.
        scheduler: noise levels and method.
        channels: of a row of latents.
        num_heads, head_dim: of attention.
        largest_tokens: most image tokens of a request.
    """

    backbone: Backbone
    scheduler: Scheduler
    channels: int
    num_heads: int
    head_dim: int
    largest_tokens: int

    def checked(self, request: Request) -> Request:
        """The request with defaults filled in.

        Raises:
            ValueError: naming the rule, the value and the way out, for what cannot be made.
        """
        ...

    def grid(self, request: Request) -> Grid:
        """Its image tokens along time, height and width."""
        ...

    def is_guided(self, request: Request) -> bool:
        """Whether it needs the second branch of classifier-free guidance."""
        ...

    def conditions(self, requests: Sequence[Request], *, is_guided: bool) -> Conditions:
        """Of requests, with `text_lengths` on the host; those without guidance have scale 1 where others have some."""
        ...

    def params(self, shardings: Any) -> Any:
        """The backbone's parameters, placed."""
        ...

    def decode(self, rows: Float[np.ndarray, "n c"], grid: Grid) -> UInt8[np.ndarray, "t h w 3"]:
        """Frames of finished latents."""
        ...

    def about(self, request: Request) -> dict[str, Any]:
        """Settings for a file's metadata."""
        ...
