"""What a user asks for, and what comes of it."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8


@dataclass(frozen=True, slots=True)
class Request:
    """A picture or clip to make.

    Attributes:
        prompt: what it shows; the number of its class for a class-conditional model.
        height, width: in pixels.
        frames: of a clip; 1 makes a picture.
        steps: of the sampler; the pipeline's default if None.
        guidance: guidance scale, distilled or classifier-free, whichever the model has; the pipeline's default if None.
        negative_prompt: what classifier-free guidance leads away from; empty text if None.
        true_guidance: scale of classifier-free guidance for a model whose guidance is distilled; 1 for none.
        seed: of the noise: the same seed, number and size give the same picture in any batch, on any devices.
        number: tells pictures of one seed apart.
        noise: the noise itself, rows (tokens, channels), instead of a seed's.
    """

    prompt: str
    height: int
    width: int
    frames: int = 1
    steps: int | None = None
    guidance: float | None = None
    negative_prompt: str | None = None
    true_guidance: float = 1.0
    seed: int = 0
    number: int = 0
    noise: Float[np.ndarray, "n c"] | None = field(default=None, compare=False, repr=False)


class NonFiniteError(RuntimeError):
    """A request whose latents became NaN or infinite; the others of its batch go on."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of a request.

    Attributes:
        request: what was asked for, defaults filled in.
        frames: (frames, height, width, 3) RGB; None if it failed.
        error: why it failed; None if it did not.
        about: settings, for a file's metadata.
    """

    request: Request
    frames: UInt8[np.ndarray, "t h w 3"] | None
    error: Exception | None
    about: dict[str, Any]


def with_defaults(request: Request, **defaults: Any) -> Request:
    """The request with what it leaves open."""
    missing = {name: value for name, value in defaults.items() if getattr(request, name) is None}
    return dataclasses.replace(request, **missing)


# More steps than any sampler gains by.
_MOST_STEPS = 1000


def check_request(
    request: Request, *, unit: int, most_pixels: int, channels: int, most_side: int | None = None
) -> None:
    """Refuse what no model of this kind can make.

    Args:
        request: with defaults filled in.
        unit: pixels along the edge of a token.
        most_pixels: of a frame.
        channels: of a row of latents.
        most_side: largest height and width; any if None.

    Raises:
        ValueError: naming the rule, the value and the way out.
    """
    for name in ("height", "width"):
        value = getattr(request, name)
        if value < unit or value % unit:
            nearest = max(round(value / unit), 1) * unit
            raise ValueError(f"{name}: a positive multiple of {unit}; got {name}={value}. Try {nearest}.")
    if most_side is not None and max(request.height, request.width) > most_side:
        raise ValueError(
            f"height, width: at most {most_side:,} each; got {request.height} x {request.width}. Make it less long."
        )
    if request.height * request.width > most_pixels:
        raise ValueError(
            f"height, width: at most {most_pixels:,} pixels; got {request.height} x {request.width}. Make it smaller."
        )
    if request.frames < 1:
        raise ValueError(f"frames: at least 1; got frames={request.frames}.")
    if request.steps is None or not 1 <= request.steps <= _MOST_STEPS:
        raise ValueError(f"steps: 1 to {_MOST_STEPS}; got steps={request.steps}. 28 is a good number.")
    for name in ("guidance", "true_guidance"):
        value = getattr(request, name)
        if value is None or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}: finite and not negative; got {name}={value}. 1 is none.")
    if not 0 <= request.seed < 1 << 63:
        raise ValueError(f"seed: 0 to 2^63 - 1; got seed={request.seed}.")
    if not 0 <= request.number < 1 << 30:
        raise ValueError(f"number: 0 to 2^30 - 1; got number={request.number}.")
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        if text is not None and text.encode(errors="replace").decode() != text:
            raise ValueError(f"{name}: valid Unicode; got {text!a}.")
    if request.noise is not None:
        tokens = request.frames * (request.height // unit) * (request.width // unit)
        if np.shape(request.noise) != (tokens, channels):
            raise ValueError(
                f"noise: one row for each of {tokens} tokens, of {channels} channels; got {np.shape(request.noise)}."
            )
