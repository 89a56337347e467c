"""One small training problem, run on any mesh and plan: the common ground of the tests that compare them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments._feed import Planner, StepAssembler
from experiments._platform import compiler_options
from experiments.data import StepReader, StepSampler, SyntheticCodes, SyntheticRows
from jaxdit import SquareRootShift
from jaxdit.encoders import ByteTextEncoder
from jaxdit.models import MMDiT, MMDiTConfig
from jaxdit.training import (
    FlowMatching,
    TextToImage,
    TrainProgram,
    TrainState,
    make_eval_step,
    make_train_step,
)
from parallel import data_mesh
from solver import CostModel, StepCapacity, capacity_for

NUM_HEADS = 4
NUM_STEPS = 20
BLOCK = 32
# Sequences of 16 to about 260 image tokens and 0 to 24 text tokens, spread unevenly over four ranks.
CODES = "g2b3i64f1s0,g1b2i128f1s0,g1b1i256f1s0"
ALL_BAGS = (None, "g1n8", "g2n4", "g8n1", "g1n2+g2n1+g4n1", "auto")

CONFIG = MMDiTConfig(
    in_channels=12,
    text_channels=16,
    pooled_channels=16,
    width=32,
    num_heads=NUM_HEADS,
    num_double_blocks=1,
    num_single_blocks=2,
    axes_dim=(2, 2, 4),
    compute_dtype="float32",
)


def make_module() -> nnx.Module:
    """The module; its zero-initialised layers get values, so that every gradient is there to be compared."""
    rngs = nnx.Rngs(0)
    encoder = ByteTextEncoder(text_channels=16, pooled_channels=16, max_length=32, rngs=rngs)
    module = TextToImage(MMDiT(CONFIG, rngs=rngs), encoder)
    state = nnx.state(module, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    # Drawn at once: every random array is a program of its own to compile.
    stops = np.cumsum([x.size for x in leaves])
    noise = jnp.split(0.05 * jax.random.normal(jax.random.key(7), stops[-1:]), stops[:-1])
    noisy = [x + n.reshape(x.shape) for x, n in zip(leaves, noise, strict=True)]
    nnx.update(module, jax.tree.unflatten(tree, noisy))
    return module


def make_sampler() -> StepSampler:
    """The data."""
    rows = SyntheticRows(channels=12, max_text=24)
    return StepSampler([SyntheticCodes(CODES, rows=rows, num_steps=NUM_STEPS)], seed=0, caption_dropout=0.2)


def make_planner(num_devices: int, bags: str | None, block: int = BLOCK) -> Planner:
    """The planner."""
    cost = CostModel(width=CONFIG.width, gamma=0.4)
    return Planner(num_devices=num_devices, num_heads=NUM_HEADS, bags=bags, cost=cost, block=block)


def shared_capacity(num_devices: int, all_bags: Sequence[str | None]) -> StepCapacity:
    """A capacity that holds every step under every one of the bag specs."""
    sampler = make_sampler()
    planners = [make_planner(num_devices, bags) for bags in all_bags]
    return capacity_for(p.needs(p.layout(sampler.step(t))) for p in planners for t in range(NUM_STEPS))


@dataclass(frozen=True)
class Trace:
    """What a run did: losses of all steps, gradients of the first (nested dict, global), compiled programs."""

    losses: np.ndarray
    gradients: Any
    num_compiled: int


class Case:
    """The problem on a mesh, with one program for all plans.

    Args:
        num_devices, shards: the mesh.
        capacity: sizes of the program.
        micro_batches: of each step.
        initial: a state of another case on the same mesh to start from; by default one is made.
    """

    def __init__(
        self,
        num_devices: int,
        shards: int,
        capacity: StepCapacity,
        *,
        micro_batches: int = 1,
        initial: TrainState | None = None,
    ) -> None:
        self.mesh = data_mesh(jax.devices()[:num_devices], shards=shards)
        self.capacity, self.micro_batches = capacity, micro_batches
        self.program = TrainProgram(
            module=nnx.eval_shape(make_module),
            objective=FlowMatching(
                prediction="sample", shift=SquareRootShift(base_tokens=16, base_factor=1.5)
            ),
            optimizer=optax.adamw(1e-3, b1=0.9),
            mesh=self.mesh,
            num_heads=NUM_HEADS,
            remat="full" if shards > 1 else "none",
            compiler_options=compiler_options(self.mesh),
        )
        self.step = make_train_step(self.program, capacity)
        self.initial = self.program.init_state(make_module) if initial is None else initial

    def evaluate(self, steps: Sequence[int]) -> float:
        """The loss of the given steps together, at the initial parameters, without balancing."""
        planner = make_planner(self.mesh.devices.size, None)
        assembler = StepAssembler(planner, self.mesh, self.capacity)
        reader = StepReader(
            make_sampler(), local_devices=assembler.local_devices, num_devices=planner.num_devices
        )
        evaluate = make_eval_step(self.program, self.capacity)
        key = jax.random.key(3, impl="threefry2x32")
        parts = [
            evaluate(self.initial.params, assembler.assemble(t, [reader.read(t)]).inputs, np.int32(t), key)
            for t in steps
        ]
        total, weight = np.sum(jax.device_get(parts), axis=0)
        return float(total / weight)

    def run(self, bags: str | None, num_steps: int = NUM_STEPS) -> Trace:
        """Train from scratch under a bag spec."""
        planner = make_planner(self.mesh.devices.size, bags)
        assembler = StepAssembler(planner, self.mesh, self.capacity)
        reader = StepReader(
            make_sampler(), local_devices=assembler.local_devices, num_devices=planner.num_devices
        )
        key = jax.random.key(3, impl="threefry2x32")
        state = jax.tree.map(jnp.copy, self.initial)  # a step donates its state
        losses, gradients = [], None
        for t in range(num_steps // self.micro_batches):
            data = [reader.read(t * self.micro_batches + i) for i in range(self.micro_batches)]
            item = assembler.assemble(t, data)
            assert item.capacity == self.capacity, "the shared capacity must hold every step"
            state, metrics = self.step(state, item.inputs, key)
            assert metrics.plans_agree
            assert metrics.finite
            losses.append(float(metrics.loss))
            if t == 0:
                # Adam's first moment after one step is a tenth of the gradient.
                moments = optax.tree.get(state.opt_state, "mu")
                gradients = jax.tree.map(lambda m: _whole(m) * 10, moments)
        return Trace(np.array(losses), gradients, self.step._cache_size())


def _whole(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def assert_same_run(got: Trace, want: Trace) -> None:
    """First loss and every gradient to 1e-5, losses of all steps to 1e-4, relative."""
    np.testing.assert_allclose(got.losses[0], want.losses[0], rtol=1e-5)
    flat_got = jax.tree_util.tree_leaves_with_path(got.gradients)
    flat_want = jax.tree_util.tree_leaves_with_path(want.gradients)
    largest = max(np.abs(g).max() for _, g in flat_want)
    for (path, a), (_, b) in zip(flat_got, flat_want, strict=True):
        # A gradient that is zero by construction (a text bias nothing reads) has rounding for its only content.
        floor = 1e-7 * largest
        error = np.abs(a - b).max()
        assert error <= 1e-5 * np.abs(b).max() + floor, (jax.tree_util.keystr(path), error, np.abs(b).max())
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-4)
