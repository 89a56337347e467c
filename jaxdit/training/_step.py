"""The training and evaluation steps: one SPMD program each, compiled once per capacity.

A step takes rows in home layout and the tables of its plan. On each device it moves the rows to token layout, runs the
model with attention in a layout of its own, differentiates, and adds up. The tables are data: another plan of the same
capacity runs in the same program.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from parallel import DATA_AXES, PackedKernel, expand_attention, make_balanced_attention
from solver import StepCapacity, StepTables

from .._sharding import (
    AnyMesh,
    gather_unstacked,
    layer_scan_for,
    merged,
    module_params,
    optimizer_shardings,
    param_shardings,
    param_specs,
    picked,
    shard_axes,
    sum_gradients,
    without,
)
from ._objectives import Context, Objective
from ._rows import HomeRows, to_token_layout


class TrainState(NamedTuple):
    """Everything a run must keep; global arrays (or, in their places, shapes or shardings).

    Attributes:
        step: int32 scalar, optimiser steps taken, skipped ones included.
        params, ema: parameters and their moving average, float32.
        opt_state: the optimiser's state.
        skipped: int32 scalar, steps whose loss, gradient or update was not finite; they changed nothing else.
        frozen: parameters that are not trained; empty where all are. They stay what they were, and no checkpoint of a
            run needs them.
    """

    step: Any
    params: Any
    ema: Any
    opt_state: Any
    skipped: Any
    frozen: Any = {}  # noqa: RUF012 (an empty pytree, never changed)

    @property
    def all_params(self) -> Any:
        """Trained and frozen parameters."""
        return merged(self.frozen, self.params)

    @property
    def all_ema(self) -> Any:
        """The moving average of trained parameters, and the frozen ones."""
        return merged(self.frozen, self.ema)


class StepInputs(NamedTuple):
    """A step's data; arrays have the axes (devices, micro-batches, ...), sharded over devices. Partition specs or
    shardings may stand in their places.

    Attributes:
        rows: `HomeRows`, rows in home layout.
        tables: `StepTables` of each micro-batch's plan.
        num_image_tokens: (micro-batches, sequences), replicated.
        plan_digest: (devices, micro-batches) a number made of the plan by the device's process; all must agree.
    """

    rows: Any
    tables: Any
    num_image_tokens: Any
    plan_digest: Any


class StepMetrics(NamedTuple):
    """Scalars of a step, replicated.

    Attributes:
        loss: mean over weighted elements of the whole step.
        grad_norm: global norm before clipping.
        finite: whether the update was applied.
        plans_agree: whether all processes computed the same plan.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    finite: Array
    plans_agree: Array


@dataclass(frozen=True, eq=False)
class TrainProgram:
    """What all programs of a run share.

    Attributes:
        module: the module, or its abstract form (`nnx.eval_shape`); only its structure is used.
        objective: what it is trained for.
        optimizer: the optimiser.
        mesh: from `parallel.data_mesh`; an abstract mesh of its axes is enough for tracing.
        num_heads: attention heads of the backbone.
        remat: rematerialisation policy of the layer scan; sharded parameters need "full".
        dtype: dtype in which sharded parameters of layers travel.
        ema_decay: decay of the moving average per step, reached after a warm-up: (1 + t) / (10 + t) at step t if less.
        kernel: block computation of packed attention; chosen by platform if None.
        compiler_options: as `jax.jit` takes them; None for the defaults.
        trained: kind of the parameters that are trained: `nnx.Param` for all, `nnx.LoRAParam` for adapters beside
            parameters that are frozen.
        frozen_dtype: dtype in which frozen parameters are kept.
    """

    module: nnx.Module
    objective: Objective
    optimizer: optax.GradientTransformation
    mesh: AnyMesh
    num_heads: int
    remat: str = "full"
    dtype: Any = jnp.float32
    ema_decay: float = 0.999
    kernel: PackedKernel | None = None
    compiler_options: Mapping[str, Any] | None = None
    trained: Any = nnx.Param
    frozen_dtype: Any = jnp.float32

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """`jax.jit` with the run's compiler options."""
        compiler_options = None if self.compiler_options is None else dict(self.compiler_options)
        return jax.jit(function, compiler_options=compiler_options, **options)

    @property
    def axes(self) -> Any:
        """The sharded axis of every parameter, trained or not."""
        return shard_axes(module_params(self.module), self.mesh.shape["shard"])

    @property
    def trained_params(self) -> Any:
        """Trained parameters, as the module has them (perhaps as shapes)."""
        return module_params(self.module, self.trained)

    @property
    def trained_axes(self) -> Any:
        """The sharded axis of every trained parameter."""
        return picked(self.axes, self.trained_params)

    @property
    def frozen_axes(self) -> Any:
        """The sharded axis of every frozen parameter."""
        return without(self.axes, self.trained_params)

    def state_shardings(self) -> TrainState:
        """Shardings of a `TrainState`."""
        params = self.trained_params
        shardings = param_shardings(self.trained_axes, self.mesh)
        replicated = NamedSharding(self.mesh, P())
        return TrainState(
            step=replicated,
            params=shardings,
            ema=shardings,
            opt_state=optimizer_shardings(self.optimizer, params, shardings, self.mesh),
            skipped=replicated,
            frozen=param_shardings(self.frozen_axes, self.mesh),
        )

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a `TrainState`."""
        state = jax.eval_shape(partial(self._state, {}), module_params(self.module))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            self.state_shardings(),
        )

    def _state(self, loaded: Any, params: Any) -> TrainState:
        params = merged(params, loaded)
        trained = picked(params, self.trained_params)
        frozen = jax.tree.map(lambda x: x.astype(self.frozen_dtype), without(params, trained))
        zero = jnp.zeros((), jnp.int32)
        copy = jax.tree.map(jnp.copy, trained)
        return TrainState(zero, trained, copy, self.optimizer.init(trained), zero, frozen)

    def init_state(self, make_module: Callable[[], nnx.Module], loaded: Any = None) -> TrainState:
        """A fresh state, made shard by shard: no device holds all parameters unless they are replicated.

        Args:
            make_module: makes the module; traced.
            loaded: parameters to start from instead, nested dicts of some or all of them, with the shardings of the
                state; donated.
        """

        def make(loaded: Any) -> TrainState:
            return self._state(loaded, module_params(make_module()))

        make_state = jax.jit(make, donate_argnums=0, out_shardings=self.state_shardings())
        return make_state({} if loaded is None else loaded)

    def input_shardings(self) -> StepInputs:
        """Shardings of `StepInputs`, as a prefix pytree."""
        by_device = NamedSharding(self.mesh, P(DATA_AXES))
        return StepInputs(by_device, by_device, NamedSharding(self.mesh, P()), by_device)


def input_specs() -> StepInputs:
    return StepInputs(P(DATA_AXES), P(DATA_AXES), P(), P(DATA_AXES))


def _micro_batch(inputs: StepInputs, index: Any) -> tuple[HomeRows, StepTables, Array]:
    """This device's micro-batch `index` of inputs that still have their device axis, of size 1."""
    rows, tables = jax.tree.map(lambda x: x[0, index], (inputs.rows, inputs.tables))
    return rows, tables, inputs.num_image_tokens[index]


class DeviceModel:
    """What the programs of a run have in common on one device, for one capacity; used inside `shard_map`.

    Args:
        program, capacity: of the run.
        sum_replicas: whether the layer scan adds up gradients over replicas as well.
    """

    def __init__(self, program: TrainProgram, capacity: StepCapacity, *, sum_replicas: bool = False) -> None:
        self.graph = nnx.graphdef(program.module)
        self.program, self.capacity, self.axes = program, capacity, program.axes
        self.layer_scan = layer_scan_for(
            self.axes,
            program.mesh,
            remat=program.remat,
            dtype=program.dtype,
            sum_replicas=sum_replicas,
            trained=merged(
                jax.tree.map(lambda _: False, self.axes),
                jax.tree.map(lambda _: True, program.trained_params),
            ),
        )

    def module(self, shards: Any) -> Any:
        return nnx.merge(self.graph, gather_unstacked(shards, self.axes))

    def context(self, tables: StepTables, step: Any, key: Any) -> Context:
        layout = expand_attention(tables, self.capacity, num_heads=self.program.num_heads)
        return Context(
            attention=make_balanced_attention(layout, axis_name=DATA_AXES, kernel=self.program.kernel),
            layer_scan=self.layer_scan,
            reduce=lambda sums: lax.psum(sums, DATA_AXES),
            key=key,
            step=step,
        )

    def prepare(
        self, inputs: StepInputs, index: Any, step: Any, key: Any, frozen: Any = None
    ) -> Callable[[Any], Any]:
        home, tables, num_image_tokens = _micro_batch(inputs, index)
        rows = to_token_layout(home, tables, self.capacity, num_image_tokens, DATA_AXES)
        context = self.context(tables, step, key)

        def loss(shards: Any) -> tuple[Array, Array]:
            module = self.module(shards if frozen is None else merged(frozen, shards))
            sums = self.program.objective.loss(module, rows, context)
            return sums.total, sums.weight

        return loss


def _plans_agree(digest: Int[Array, "1 m"]) -> Array:
    return jnp.all(lax.pmax(digest, DATA_AXES) == lax.pmin(digest, DATA_AXES))


def make_train_step(
    program: TrainProgram, capacity: StepCapacity
) -> Callable[[TrainState, StepInputs, Any], tuple[TrainState, StepMetrics]]:
    """The jitted training step for one capacity; donates its state.

    Args:
        program: the run's program.
        capacity: sizes of the step's arrays.

    Returns:
        `step(state, inputs, key) -> (state, metrics)`. Gradients of all micro-batches are summed in float32 and divided
        once by the global sum of loss weights. An update that is not finite is not applied.
    """
    specs, axes = param_specs(program.trained_axes), program.trained_axes
    sharded = program.mesh.shape["shard"] > 1

    def device_gradients(
        params: Any, frozen: Any, inputs: StepInputs, step: Array, key: Any
    ) -> tuple[Any, Array, Array]:
        num_micro = inputs.num_image_tokens.shape[0]
        # Under the layers' backward while there is one of each; gradients of several micro-batches cross once, summed.
        summed = sharded and num_micro == 1
        device_model = DeviceModel(program, capacity, sum_replicas=summed)

        def add(carry: Any, index: Any) -> tuple[Any, None]:
            loss = device_model.prepare(inputs, index, step * num_micro + index, key, frozen)
            (total, weight), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return jax.tree.map(jnp.add, carry, (grads, total, weight)), None

        zero = jnp.zeros((), jnp.float32)
        start = (jax.tree.map(jnp.zeros_like, params), zero, zero)
        if num_micro == 1:
            sums, _ = add(start, 0)
        else:
            sums, _ = lax.scan(add, start, jnp.arange(num_micro))
        grads, total, weight = sums
        total, weight = lax.psum((total, weight), DATA_AXES)
        scale = 1.0 / jnp.maximum(weight, 1.0)
        grads = jax.tree.map(lambda g: g * scale, sum_gradients(grads, axes, summed_replicas=summed))
        return grads, total * scale, _plans_agree(inputs.plan_digest)

    gradients = jax.shard_map(
        device_gradients,
        mesh=program.mesh,
        in_specs=(specs, param_specs(program.frozen_axes), input_specs(), P(), P()),
        out_specs=(specs, P(), P()),
        check_vma=False,  # custom gradients and integer tables defeat the replication checker
    )

    def step(state: TrainState, inputs: StepInputs, key: Any) -> tuple[TrainState, StepMetrics]:
        grads, loss, agree = gradients(state.params, state.frozen, inputs, state.step, key)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        new_state, finite = _updated(program, state, grads, finite)
        return new_state, StepMetrics(loss, norm, finite, agree)

    shardings = program.state_shardings()
    return program.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def _updated(program: TrainProgram, state: TrainState, grads: Any, finite: Array) -> tuple[TrainState, Array]:
    """The state after the update, or the one before if anything in it is not finite; and which of the two."""
    updates, opt_state = program.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    # Early parameters are far from where they end: the average forgets them faster at first.
    count = state.step.astype(jnp.float32)
    decay = jnp.minimum(program.ema_decay, (1 + count) / (10 + count))
    ema = jax.tree.map(lambda e, p: e * decay + p * (1 - decay), state.ema, params)
    finite &= jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda p: jnp.all(jnp.isfinite(p)), params))

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(partial(jnp.where, finite), new, old)

    new_state = TrainState(
        step=state.step + 1,
        params=keep(params, state.params),
        ema=keep(ema, state.ema),
        opt_state=keep(opt_state, state.opt_state),
        skipped=state.skipped + jnp.where(finite, 0, 1),
        frozen=state.frozen,
    )
    return new_state, finite


def make_eval_step(
    program: TrainProgram, capacity: StepCapacity
) -> Callable[[Any, StepInputs, Any, Any], tuple[Array, Array]]:
    """The jitted evaluation step for one capacity.

    Returns:
        `step(params, inputs, index, key) -> (total, weight)`: of all parameters, frozen ones included, the summed loss
        and summed weights of micro-batch 0 over all devices; `index` names its random draws. Dividing the totals of all
        batches by their weights is safe with unequal batches.
    """
    device_model = DeviceModel(program, capacity)

    def device_loss(params: Any, inputs: StepInputs, index: Array, key: Any) -> tuple[Array, Array]:
        return lax.psum(device_model.prepare(inputs, 0, index, key)(params), DATA_AXES)

    return program.jit(
        jax.shard_map(
            device_loss,
            mesh=program.mesh,
            in_specs=(param_specs(device_model.axes), input_specs(), P(), P()),
            out_specs=(P(), P()),
            check_vma=False,
        )
    )
