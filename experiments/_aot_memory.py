"""Memory of a device by what it holds: by hand, from shapes alone, and as the compiler lays it out."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from experiments._aot_program import AbstractRun, device_bytes
from experiments._run_pipeline import backbone_params
from experiments.hlo import Buffer, Module
from jaxdit.training import STACKS, DeviceModel, input_specs, param_specs


@dataclass(frozen=True, slots=True)
class HandSum:
    """Bytes on a device by hand: shapes and shardings, and what must exist at the same time in the backward pass.

    An evaluation in sampling has no backward pass; it takes the backbone's moving average (and frozen parameters).

    Attributes:
        parameters, ema, optimizer: the program's arguments.
        inputs: its data.
        gradients: float32, one array like the parameters.
        kept: what the forward pass keeps for the backward pass: inputs of layers, or what the policy says.
        whole_layers: of sharded layers besides those that are kept: parameters that are being gathered, whole gradients
            of two layers, and the float32 form of those that are being scattered. In sampling, two layers and what is
            outside of layers, which is gathered before the first step.
        attention: rows of q, k, v in both layouts, their float32 gradients, output and its gradient.
        block: one block's activations and their gradients while it is differentiated; where attention and MLP run one
            after the other, and not side by side, what the MLP takes beyond the rows of attention. In sampling also the
            rows that are sent and come back.
    """

    parameters: int
    ema: int
    optimizer: int
    inputs: int
    gradients: int
    kept: int
    whole_layers: int
    attention: int
    block: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(dataclasses.astuple(self))

    def with_tokens(self, factor: float) -> "HandSum":
        """The sum with so many times the tokens on a device."""
        scaled = ("inputs", "kept", "attention", "block")
        return dataclasses.replace(self, **{name: int(getattr(self, name) * factor) for name in scaled})


def hand_sum(run: AbstractRun) -> HandSum:
    """The sum for a run's training step, or for its sampling program."""
    state = run.state
    settings, capacity = run.requested.settings, run.requested.plans.capacity
    model = settings.model
    itemsize = np.dtype(model.dtype).itemsize
    rows = capacity.text + capacity.image
    head_rows = (2 * capacity.key_rows + capacity.query_rows) * (model.width // model.num_heads)
    head_rows *= min(capacity.head_groups, 2)  # while one group is computed, the next one's rows arrive
    trains = not run.requested.forward_only
    # Forward: sent, received, and both joined with what stays. Backward: float32 gradients besides.
    attention = head_rows * (2 * itemsize + trains * (2 * itemsize + 4))
    # q, k, v (3), the MLP's hidden rows before and after its nonlinearity (4 + 4), norms and residuals (2); and a
    # gradient of each.
    block = rows * model.width * itemsize * (13 * (1 + trains))
    if not _has_parallel_blocks(state.params):
        block = max(block - attention, 0)
    inputs, kept = device_bytes(run.inputs if trains else run.sampled), 0
    if trains:
        kept, whole_layers = _at_the_peak(run, kept_bytes(run))
    else:
        whole_layers = max(_whole_layers(run, 2 * itemsize)) + _unstacked(run)
        # Float32 rows of latents on their way to where they are evaluated, and predictions on their way back.
        block += 2 * (capacity.image + capacity.home_image) * 4 * model.channels
    return HandSum(
        parameters=device_bytes(state.all_params if trains else backbone_params(settings, state.frozen)),
        ema=device_bytes(state.ema if trains else backbone_params(settings, state.ema)),
        optimizer=trains * device_bytes(state.opt_state),
        inputs=inputs,
        gradients=trains * device_bytes(state.params),
        kept=kept,
        whole_layers=whole_layers,
        attention=attention,
        block=block,
    )


def _has_parallel_blocks(params: Any) -> bool:
    """Whether attention and MLP of a block take the same input, as in FLUX.1's single blocks."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(params))
    return any(getattr(key, "key", None) == "single_blocks" for path in paths for key in path)


def _whole_layers(run: AbstractRun, bytes_of_element: int) -> list[int]:
    """Bytes of one whole layer of each sharded stack, in the order in which the stacks run."""
    totals: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.state.all_params):
        for key in path:
            if getattr(key, "key", None) in STACKS:
                totals[key.key] = totals.get(key.key, 0) + math.prod(leaf.shape[1:])
    sharded = run.requested.settings.shards > 1
    # Double blocks run before single ones, which is the order of their names.
    return [sharded * totals[name] * bytes_of_element for name in sorted(totals)]


def _unstacked(run: AbstractRun) -> int:
    """Bytes of the sharded parameters outside of layers when they are whole."""
    leaves = jax.tree_util.tree_leaves_with_path(backbone_params(run.requested.settings, run.state.all_ema))
    outside = [x for path, x in leaves if not any(getattr(key, "key", None) in STACKS for key in path)]
    return sum(x.size * x.dtype.itemsize for x in outside if not x.sharding.is_fully_replicated)


def _at_the_peak(run: AbstractRun, kept: int) -> tuple[int, int]:
    """(kept, whole layers) in the backward pass of the stack in which they are most.

    The last stack starts with all that the forward pass kept; the ones before it find the inputs of its layers gone.
    """
    model, capacity = run.requested.settings.model, run.requested.plans.capacity
    itemsize = np.dtype(model.dtype).itemsize
    row_bytes = (capacity.text + capacity.image) * model.width * itemsize
    layers = _whole_layers(run, 3 * itemsize + 4)
    depths = _depths(run.state.all_params)
    options = [(kept - row_bytes * sum(depths[i + 1 :]), layer) for i, layer in enumerate(layers)]
    return max(options, key=sum)


def _depths(params: Any) -> list[int]:
    """Layers of each stack, in the order in which they run."""
    found: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for key in path:
            if getattr(key, "key", None) in STACKS:
                found[key.key] = leaf.shape[0]
    return [found[name] for name in sorted(found)]


def kept_bytes(run: AbstractRun) -> int:
    """Bytes that a device's forward pass keeps for its backward pass, parameters aside; traced, not compiled."""
    program, capacity = run.program, run.requested.plans.capacity
    sizes: list[int] = []

    def device_loss(params: Any, inputs: Any, key: Any) -> jax.Array:
        model = DeviceModel(program, capacity)
        loss = model.prepare(inputs, 0, 0, key)
        total, backward, _ = jax.vjp(loss, params, has_aux=True)
        arguments = {id(x) for x in jax.tree.leaves(params)}
        kept = {id(x): x for x in jax.tree.leaves(backward) if id(x) not in arguments}
        sizes.append(sum(x.size * x.dtype.itemsize for x in kept.values() if hasattr(x, "size")))
        return total

    key = jax.eval_shape(partial(jax.random.key, impl="threefry2x32"), 0)
    specs = (param_specs(program.axes), input_specs(), P())
    jax.eval_shape(
        jax.shard_map(device_loss, mesh=run.mesh, in_specs=specs, out_specs=P(), check_vma=False),
        run.state.all_params,
        run.inputs,
        key,
    )
    return sizes[-1]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Dimensions by which a temporary is recognised.

    Attributes:
        layers: lengths of the stacks of layers; none where nothing is kept of them.
        shards: dims of parameters on a device; none where there are no gradients.
        wholes: dims of parameters of one layer, gathered, and of those outside of layers.
        attention_rows: rows of the attention layout.
    """

    layers: frozenset[int]
    shards: frozenset[tuple[int, ...]]
    wholes: frozenset[tuple[int, ...]]
    attention_rows: frozenset[int]


def shapes_of(run: AbstractRun) -> Shapes:
    """How temporaries of a run's programs are recognised."""
    layers, shards, wholes = set(), set(), set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.state.all_params):
        stacked = any(getattr(key, "key", None) in STACKS for key in path)
        shards.add(tuple(leaf.sharding.shard_shape(leaf.shape)))
        wholes.add(tuple(leaf.shape[1:] if stacked else leaf.shape))
        if stacked:
            layers.add(leaf.shape[0])
    capacity = run.requested.plans.capacity
    rows = frozenset({capacity.query_rows, capacity.key_rows})
    if run.requested.forward_only:  # neither gradients nor anything kept
        layers, shards = set(), set()
    return Shapes(frozenset(layers), frozenset(shards), frozenset(wholes), rows)


def temporaries_by_what(
    buffers: Sequence[Buffer], module: Module, shapes: Shapes
) -> list[tuple[str, int, list[Buffer]]]:
    """Temporaries that are live at the peak, put together by what they are; largest first."""
    op_names = {i.name: i.op_name for _, _, i in module.walk()}
    groups: dict[str, list[Buffer]] = {}
    for buffer in buffers:
        groups.setdefault(_what(buffer, op_names.get(buffer.instruction, ""), shapes), []).append(buffer)
    found = [(what, sum(b.num_bytes for b in members), members) for what, members in groups.items()]
    return sorted(found, key=lambda item: -item[1])


def _what(buffer: Buffer, op_name: str, shapes: Shapes) -> str:
    dims = () if buffer.shape is None else buffer.shape.dims
    if dims in shapes.shards and len(dims) > 1:
        return "gradients"
    if dims and dims[0] in shapes.layers and len(dims) > 2:
        return "kept for the backward pass"
    if dims in shapes.wholes or tuple(reversed(dims)) in shapes.wholes or "all_gather" in op_name:
        return "whole layers: parameters and gradients"
    # As rows, or cut into blocks.
    if any(rows in dims or math.prod(dims[:2]) == rows for rows in shapes.attention_rows):
        return "attention rows"
    return "activations of a block, and the rest"
