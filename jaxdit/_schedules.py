"""Times of training and sampling: flow time drawn and shifted, and the tables of a discrete diffusion.

Shifts take arrays of JAX, in training, and of NumPy, of which samplers make their tables in float64.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = [
    "DiffusionSchedule",
    "ResolutionShift",
    "SquareRootShift",
    "TimeShift",
    "diffusion_schedule",
    "diffusion_steps",
    "linear_schedule",
    "logit_normal_time",
    "shift_time",
]

AnyArray = jax.Array | np.ndarray


def _numpy_of(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def logit_normal_time(
    uniform: Float[Array, " s"], *, mean: float = 0.0, std: float = 1.0
) -> Float[Array, " s"]:
    """Turns uniform numbers into logit-normal times, sigmoid(mean + std * z) with z standard normal.

    Args:
        uniform: numbers in (0, 1), see `sequence_times`; they are themselves the uniform times.
        mean: location before the sigmoid; above 0 favours noise.
        std: scale before the sigmoid, positive.

    Returns:
        Times in (0, 1).

    Raises:
        ValueError: if `std` is not positive.

    Reference: Esser et al., arXiv 2403.03206, equation 19.
    """
    if std <= 0:
        raise ValueError(f"logit_normal_time: std must be positive; got std={std}. SD3 uses 1.")
    return jax.nn.sigmoid(mean + std * jax.scipy.special.ndtri(uniform))


def shift_time(time: Float[AnyArray, "*s"], mu: float | Float[AnyArray, "..."]) -> Float[AnyArray, "*s"]:
    """Moves times towards noise: t' = e^mu / (e^mu + 1 / t - 1), with 0 and 1 fixed.

    A constant shift by the factor a, a t / (1 + (a - 1) t), is the same with mu = log(a).

    Args:
        time: times in [0, 1].
        mu: logarithm of the shift, one for all or one per time (it may broadcast); 0 changes nothing.

    Returns:
        Shifted times.

    Reference: FLUX.1, `time_shift`; Esser et al., arXiv 2403.03206, equation 23.
    """
    factor = _numpy_of(time).exp(mu)
    return factor * time / (1 + (factor - 1) * time)


@runtime_checkable
class TimeShift(Protocol):
    """A shift of flow times by size, such as `ResolutionShift`."""

    def mu(self, num_tokens: Int[AnyArray, " s"]) -> Float[AnyArray, " s"]:
        """The logarithmic shift of sequences with so many image tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolutionShift:
    """mu of `shift_time` by a linear function of a sequence's image tokens; the defaults are FLUX.1's.

    Attributes:
        base_tokens: tokens at which mu is `base_mu`.
        max_tokens: tokens at which mu is `max_mu`; the line goes on beyond both.
        base_mu: see above.
        max_mu: see above.
        of_factor: whether the line is the factor e^mu instead (diffusers' time shift "linear"); it must be positive.

    Raises:
        ValueError: if the two token counts are equal.
    """

    base_tokens: int = 256
    max_tokens: int = 4096
    base_mu: float = 0.5
    max_mu: float = 1.15
    of_factor: bool = False

    def __post_init__(self) -> None:
        if self.base_tokens == self.max_tokens:
            raise ValueError(
                "ResolutionShift: base_tokens and max_tokens must differ; got "
                f"base_tokens={self.base_tokens}, max_tokens={self.max_tokens}. "
                "Give a constant mu to shift_time instead."
            )

    def mu(self, num_tokens: Int[AnyArray, " s"]) -> Float[AnyArray, " s"]:
        """The logarithmic shift of sequences with so many image tokens."""
        slope = (self.max_mu - self.base_mu) / (self.max_tokens - self.base_tokens)
        line = slope * (num_tokens - self.base_tokens) + self.base_mu
        return _numpy_of(num_tokens).log(line) if self.of_factor else line


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareRootShift:
    """mu of `shift_time` whose factor grows as the root of a sequence's image tokens.

    Neighbouring pixels of a picture drawn larger repeat each other, so their noise averages out: the same doubt about
    what is shown needs noise stronger by the root of the number of pixels.

    Attributes:
        base_tokens: tokens at which the factor is `base_factor`.
        base_factor: see above.

    Raises:
        ValueError: if either is not positive.

    Reference: Esser et al., arXiv 2403.03206, section 5.3.2.
    """

    base_tokens: int = 256
    base_factor: float = 1.0

    def __post_init__(self) -> None:
        if min(self.base_tokens, self.base_factor) <= 0:
            raise ValueError(
                "SquareRootShift: base_tokens and base_factor must be positive; got "
                f"base_tokens={self.base_tokens}, base_factor={self.base_factor}. A factor of 1 changes nothing."
            )

    def mu(self, num_tokens: Int[AnyArray, " s"]) -> Float[AnyArray, " s"]:
        """The logarithmic shift of sequences with so many image tokens (0 for one without)."""
        xp = _numpy_of(num_tokens)
        mu = math.log(self.base_factor) + 0.5 * xp.log(xp.maximum(num_tokens, 1) / self.base_tokens)
        return xp.where(num_tokens > 0, mu, 0.0)


@dataclass(frozen=True, slots=True)
class DiffusionSchedule:
    """Tables of a discrete diffusion with T steps, indexed by step 0 .. T - 1 (0 = least noise), float64.

    Attributes:
        betas: variance added by a step.
        alphas_cumprod: share of the data's variance left after a step.
    """

    betas: np.ndarray
    alphas_cumprod: np.ndarray

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.betas)

    @property
    def alphas_cumprod_before(self) -> np.ndarray:
        """`alphas_cumprod` of the step before, 1 at step 0."""
        return np.append(1.0, self.alphas_cumprod[:-1])

    @property
    def posterior_variance(self) -> np.ndarray:
        """Variance of q(x_{k-1} | x_k, x_0); 0 at step 0."""
        return self.betas * (1 - self.alphas_cumprod_before) / (1 - self.alphas_cumprod)


def diffusion_schedule(betas: Float[np.ndarray, " t"]) -> DiffusionSchedule:
    """The tables of a diffusion whose steps add these variances, below 1 (the last may be 1: it leaves no data)."""
    betas = np.asarray(betas, np.float64)
    return DiffusionSchedule(betas=betas, alphas_cumprod=np.cumprod(1 - betas))


def linear_schedule(num_steps: int = 1000) -> DiffusionSchedule:
    """Linear betas from 1e-4 to 0.02 (at 1000 steps; scaled by 1000 / num_steps otherwise), as DiT's.

    Args:
        num_steps: T, at least 21, so that betas stay below 1.

    Returns:
        The tables.

    Raises:
        ValueError: for fewer steps.

    Reference: Ho et al., arXiv 2006.11239; Nichol & Dhariwal, arXiv 2102.09672.
    """
    if num_steps < 21:
        raise ValueError(
            "linear_schedule: num_steps must be at least 21, or a beta reaches 1; got "
            f"num_steps={num_steps}. Train with 1000 and sample with fewer."
        )
    scale = 1000 / num_steps
    return diffusion_schedule(np.linspace(scale * 1e-4, scale * 0.02, num_steps))


def diffusion_steps(uniform: Float[Array, " s"], num_steps: int) -> Int[Array, " s"]:
    """Turns uniform numbers in (0, 1) into steps 0 .. num_steps - 1; the model's time is step / num_steps."""
    return jnp.minimum((uniform * num_steps).astype(jnp.int32), num_steps - 1)
