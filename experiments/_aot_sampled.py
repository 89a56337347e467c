"""An evaluation of a run's model as the engine samples a batch of the data's sizes, for GPUs that are not here."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._aot_plans import Plans, placed, plans_of
from experiments._components import RunSettings
from experiments._feed import Planner
from experiments._run_data import Data
from experiments._run_pipeline import run_backbone
from experiments.data import StepIndex
from jaxdit.models import MMDiTConfig
from jaxdit.sampling import Conditions
from jaxdit.sampling.programs import (
    Batch,
    EvaluationInputs,
    PackedLayout,
    SamplingState,
    make_evaluation,
    make_start,
)
from jaxdit.training import TrainProgram
from solver import StepLayout, capacity_for, step_tables


class SampledInputs(NamedTuple):
    """Arguments of an evaluation beside the parameters, as placed shapes."""

    state: SamplingState
    inputs: EvaluationInputs
    conditions: Conditions
    batch: Batch


def is_guided(settings: RunSettings) -> bool:
    """Whether sampling is guided: by a second branch, without text or label."""
    return settings.sampler.guidance_scale != 1


def sampling_plans(settings: RunSettings, data: Data, planner: Planner) -> Plans:
    """Those of a batch as large as the first micro-batch, in arrays that hold all that a run looks ahead at."""
    count = min(settings.lookahead, settings.steps) * settings.micro_batches
    indices = [data.train.step(t) for t in range(count)]
    requests = 1 << (max(index.num_sequences for index in indices) - 1).bit_length()
    layouts = [_layout(index, requests, 1 + is_guided(settings), planner) for index in indices]
    capacity = capacity_for(planner.needs(layout) for layout in layouts)
    tables = step_tables(layouts[0], capacity, list(range(settings.num_devices)))
    # Tables do not depend on the mesh.
    packed = PackedLayout(AbstractMesh((), ()), capacity, requests, 1 + is_guided(settings))
    return plans_of(layouts[0], capacity, tables, packed.tables(layouts[0], [0]), requests)


def _layout(index: StepIndex, requests: int, branches: int, planner: Planner) -> StepLayout:
    """The layout of all branches of guidance of a batch, with room for so many requests; no text but in the first."""
    missing = requests - index.num_sequences
    image, text, home = (
        np.pad(x, (0, missing))
        for x in (index.image_lengths, index.text_lengths, index.home(planner.num_devices))
    )
    texts = np.concatenate([text, *[0 * text] * (branches - 1)])
    images, homes = np.tile(image, branches), np.tile(home, branches)
    return StepLayout(planner.plan_lengths(images + texts, texts, homes, planner.bags), planner.block)


def _packed(settings: RunSettings, program: TrainProgram, plans: Plans) -> PackedLayout:
    return PackedLayout(program.mesh, plans.capacity, plans.requests, 1 + is_guided(settings))


def sampled_inputs(
    settings: RunSettings, program: TrainProgram, plans: Plans, sources: Sequence[Any]
) -> SampledInputs:
    """Shapes of the arguments of an evaluation."""
    layout = _packed(settings, program, plans)
    by_device, replicated = (NamedSharding(program.mesh, spec) for spec in (P(layout.axes), P()))
    requests, branches = layout.requests, layout.branches

    def shape(*dims: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=replicated)

    num_devices = program.mesh.size
    tables = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape[1:]), x.dtype, sharding=by_device), plans.tables
    )
    batch = Batch(shape(requests, 3, dtype=np.int32), tables)
    start = make_start(layout, _backbone(settings, program), settings.model.channels)
    keys, names = shape(requests, 2, dtype=np.uint32), shape(requests, dtype=np.int32)
    state = jax.tree.map(lambda x: placed(x, by_device), jax.eval_shape(start, keys, names, batch))
    inputs = EvaluationInputs(shape(requests), shape(requests, 2, 3), shape(dtype=np.bool_))
    model = settings.model
    labels = text = pooled = None
    if model.uses_labels:
        labels = shape(branches, requests, dtype=np.int32)
    elif isinstance(model.config, MMDiTConfig):
        longest = max(int(source.text_lengths.max(initial=1)) for source in sources)
        # Features of bytes are float32, those of T5 as it computes.
        dtype = model.dtype if model.max_text is None else np.float32
        text = shape(branches, requests, longest, model.config.text_channels, dtype=dtype)
        pooled = shape(branches, requests, model.config.pooled_channels)
    given = Conditions(
        text=text,
        text_lengths=shape(branches, requests, dtype=np.int32),
        pooled=pooled,
        labels=labels,
        embedded_guidance=shape(branches, requests) if model.guidance_embed else None,
        scale=shape(requests),
    )
    return SampledInputs(state, inputs, given, batch)


def _backbone(settings: RunSettings, program: TrainProgram) -> Any:
    """With parameters divided as in training."""
    return run_backbone(settings, program, ("shard",))


def traced_evaluation(
    settings: RunSettings, program: TrainProgram, plans: Plans, params: Any, inputs: SampledInputs
) -> Any:
    """The evaluation before it is lowered.

    Args:
        settings, program, plans: of the run.
        params: of its backbone, as placed shapes.
        inputs: see `sampled_inputs`.
    """
    layout = _packed(settings, program, plans)
    evaluation: Any = make_evaluation(layout, _backbone(settings, program), program.compiler_options)
    return evaluation.trace(params, *inputs)
