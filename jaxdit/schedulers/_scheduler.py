"""A scheduler makes the table of a sampler; `advance` takes one evaluation of it, `integrate` all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..models import rows_of_sequences
from ._methods import PREDICTIONS, Method, SamplingTable, euler
from ._times import NoiseTimes

__all__ = [
    "Denoise",
    "SamplerState",
    "Scheduler",
    "advance",
    "classifier_free_guidance",
    "initial_state",
    "integrate",
]

Denoise = Callable[[Any, Any], Any]
"""`denoise(rows (n, c) float32, time (S,) float32) -> prediction (n, c)`."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Noise levels, the method that steps through them, and what the model predicts.

    Attributes:
        times: which levels, such as `FlowTimes`.
        method: `euler` (of a diffusion: DDIM), `heun` or `DPMSolver()`.
        prediction: of rows s D + d E with data D and noise E: "velocity" E - D, "epsilon" E, "sample" D, or
            "v_prediction" s E - d D.

    Raises:
        ValueError: for another prediction.

    >>> import numpy as np
    >>> from jaxdit import ResolutionShift
    >>> from jaxdit.schedulers import FlowTimes, Scheduler
    >>> flux = Scheduler(FlowTimes(shift=ResolutionShift()))
    >>> table = flux.table(4, np.array([256, 4096]))  # two pictures; larger ones stay noisy for longer
    >>> table.time.round(3).tolist()
    [[1.0, 1.0], [0.832, 0.905], [0.622, 0.76], [0.355, 0.513]]
    """

    times: NoiseTimes
    method: Method = euler
    prediction: str = "velocity"

    def __post_init__(self) -> None:
        if self.prediction not in PREDICTIONS:
            raise ValueError(
                f"Scheduler: prediction must be one of {', '.join(PREDICTIONS)}; got prediction={self.prediction!r}."
                " FLUX.1 predicts the velocity, DiT epsilon."
            )

    def table(self, num_steps: int, num_tokens: Int[np.ndarray, " s"]) -> SamplingTable:
        """Makes the table, on the host.

        Args:
            num_steps: steps; `heun` asks the model twice in each but the last.
            num_tokens: image tokens of each sequence.

        Returns:
            Float32 and int32 arrays.

        Raises:
            ValueError: for steps or sizes that the times or the method refuse, or a model that cannot be asked at one
                of these levels.
        """
        levels = self.times.levels(num_steps, num_tokens)
        with np.errstate(divide="ignore", invalid="ignore"):
            data = PREDICTIONS[self.prediction](levels.signal, levels.deviation)
            table = self.method(levels, data)
        if not np.all(np.isfinite(table.coefficients)):
            raise ValueError(
                f"Scheduler: rows of pure noise, without signal, do not tell a model that predicts"
                f" {self.prediction} the data. Start at less noise, or with a model of another prediction, such as"
                " v_prediction."
            )
        return SamplingTable(
            table.time.astype(np.float32), table.coefficients.astype(np.float32), table.step.astype(np.int32)
        )


class SamplerState(NamedTuple):
    """What a sampler carries, float32 (per device inside shard_map).

    Attributes:
        rows: at the level reached.
        memory: what the method remembers. Of `euler` and `DPMSolver` it is the data that the last prediction means.
    """

    rows: Float[Array, "n c"]
    memory: Float[Array, "n c"]


def initial_state(noise: Float[Array, "n c"]) -> SamplerState:
    """The state before the first evaluation, from rows at the first level: standard normal noise."""
    rows = noise.astype(jnp.float32)
    return SamplerState(rows, jnp.zeros_like(rows))


def advance(
    state: SamplerState,
    prediction: Float[Array, "n c"],
    coefficients: Float[Array, "s 2 3"],
    segment_ids: Int[Array, " n"],
) -> SamplerState:
    """The state after one evaluation.

    Per device, without communication. All arguments are data: a jitted call serves every evaluation of every table.

    Args:
        state: before it.
        prediction: of the model, for `state.rows` and the evaluation's times.
        coefficients: of the evaluation, `table.coefficients[e]`.
        segment_ids: sequence of each row, 0 = padding; padding rows stay as they are.

    Returns:
        The state after it.
    """
    per_row = rows_of_sequences(coefficients.reshape(-1, 6), segment_ids)
    terms = (state.rows, prediction.astype(jnp.float32), state.memory)
    rows, memory = (
        sum(per_row[:, i + k, None] * term for k, term in enumerate(terms)) for i in range(0, 6, len(terms))
    )
    real = segment_ids[:, None] > 0
    return SamplerState(jnp.where(real, rows, state.rows), jnp.where(real, memory, state.memory))


def integrate(
    denoise: Denoise, noise: Float[Array, "n c"], table: SamplingTable, segment_ids: Int[Array, " n"]
) -> Float[Array, "n c"]:
    """Samples along a whole table: one `lax.scan` with one copy of the model, under jit and in `shard_map`.

    Args:
        denoise: asks the model.
        noise: rows at the first level.
        table: from `Scheduler.table`.
        segment_ids: sequence of each row, 0 = padding; padding rows stay as they are.

    Returns:
        Float32 rows at the last level.
    """

    def evaluate(state: SamplerState, evaluation: Any) -> tuple[SamplerState, None]:
        time, coefficients = evaluation
        return advance(state, denoise(state.rows, time), coefficients, segment_ids), None

    evaluations = (jnp.asarray(table.time), jnp.asarray(table.coefficients))
    return jax.lax.scan(evaluate, initial_state(noise), evaluations)[0].rows


def classifier_free_guidance(conditional: Denoise, unconditional: Denoise, scale: float) -> Denoise:
    """Guides by unconditional + scale * (conditional - unconditional).

    Two functions rather than one doubled batch: the unconditional branch has no caption, so its rows, plan
    and attention differ. With scale 1 the unconditional branch is not run at all. It is the same whatever the model
    predicts.

    Args:
        conditional: denoises with the condition.
        unconditional: denoises the same rows without.
        scale: 1 for none, more for stronger.

    Returns:
        The guided function.

    Reference: Ho & Salimans, arXiv 2207.12598.
    """
    if scale == 1:
        return conditional

    def guided(rows: Array, time: Array) -> Array:
        without = unconditional(rows, time).astype(jnp.float32)
        return without + scale * (conditional(rows, time).astype(jnp.float32) - without)

    return guided
