"""Sampling with the layouts of training: any mixture of sizes in one program, on all devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from parallel import DATA_AXES, exchange
from solver import BalancePlan, BalanceProblem, StepCapacity, plan_from_slices

from .._random import token_noise
from .._sharding import param_specs
from ._objectives import SamplingContexts
from ._rows import image_route, to_token_layout
from ._step import DeviceModel, TrainProgram


class SampleInputs(NamedTuple):
    """A batch to sample; arrays have the axes (devices, ...), sharded over devices.

    Attributes:
        rows: `HomeRows`: captions or labels, and image rows whose values are ignored.
        tables: `StepTables` of the batch's plan.
        tables_without_text: tables of `plan_without_text`, for the unconditional branch.
        sampling: `SamplingTable` of the objective's scheduler, a column for each sequence, replicated.
        num_image_tokens: (sequences,) replicated.
        noise_ids: (sequences,) replicated; names each sequence's noise, so that a picture does not depend on its batch.
    """

    rows: Any
    tables: Any
    tables_without_text: Any
    sampling: Any
    num_image_tokens: Any
    noise_ids: Any


def plan_without_text(plan: BalancePlan) -> BalancePlan:
    """The plan whose image tokens and heads lie where `plan` has them, all text removed.

    Image rows have the same places in token layout, so predictions of both branches of guidance add up row by row.
    """
    text = np.asarray(plan.text_lengths, np.int64)
    lengths = np.asarray(plan.lengths, np.int64) - text
    tokens = np.array(plan.token_slices, np.int64)
    tokens[:, 1:3] = np.maximum(tokens[:, 1:3] - text[tokens[:, 0], None], 0)
    heads = np.array(plan.head_slices, np.int64)
    heads[:, 3:5] = np.maximum(heads[:, 3:5] - text[heads[:, 0], None], 0)
    problem = BalanceProblem(lengths, 0 * text, plan.home, plan.num_heads, plan.topology, plan.cost)
    return plan_from_slices(
        problem,
        tokens[tokens[:, 2] > tokens[:, 1]],
        heads[heads[:, 4] > heads[:, 3]],
        lower_bounds=(0.0, 0.0),
    )


def make_sample_step(
    program: TrainProgram, capacity: StepCapacity, *, guidance_scale: float = 1.0
) -> Callable[[Any, SampleInputs, Any], Float[Array, "d n c"]]:
    """The jitted sampling program for one capacity.

    Args:
        program: the run's program.
        capacity: sizes of the batch's arrays.
        guidance_scale: classifier-free guidance; 1 for none.

    Returns:
        `sample(params, inputs, key)` to image rows in home layout, (devices, home rows, channels), sharded over
        devices.
    """
    device_model = DeviceModel(program, capacity)

    def device_sample(params: Any, inputs: SampleInputs, key: Any) -> Array:
        home, tables, without = jax.tree.map(
            lambda x: x[0], (inputs.rows, inputs.tables, inputs.tables_without_text)
        )
        rows = to_token_layout(home, tables, capacity, inputs.num_image_tokens, DATA_AXES)
        names = jnp.concatenate([jnp.zeros(1, jnp.int32), inputs.noise_ids + 1])[rows.img_segment_ids]
        noise = token_noise(0, names, rows.img_token_index, rows.img.shape[1], key=key)
        contexts = SamplingContexts(
            table=inputs.sampling,
            conditional=device_model.context(tables, 0, key),
            unconditional=device_model.context(without, 0, key),
        )
        module = device_model.module(params)
        sampled = program.objective.sample(module, rows, noise, contexts, guidance_scale)
        back = image_route(tables, capacity).reversed
        return exchange(sampled, back, axis_name=DATA_AXES)[None]

    by_device = P(DATA_AXES)
    return program.jit(
        jax.shard_map(
            device_sample,
            mesh=program.mesh,
            in_specs=(
                param_specs(device_model.axes),
                SampleInputs(by_device, by_device, by_device, P(), P(), P()),
                P(),
            ),
            out_specs=by_device,
            check_vma=False,
        )
    )
