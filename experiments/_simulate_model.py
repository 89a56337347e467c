"""Modelled time of a training step on GPUs that are not here: blocks by the cost model, and what else is counted."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from experiments._aot_gpus import Gpu, Machines
from experiments._program import UserError
from solver import BalancePlan, CostModel, Links, Topology

# What linear layers reach of a GPU's peak unless told otherwise: 400 TFLOP/s of an H100, as plans are compared by.
REACHED = 400 / 989.4
_MOST_HEADS = 1024
# Passes of a step over a block: forward, backward (twice a forward's FLOPs; its exchanges once), and with
# rematerialisation the forward pass again.
_COMPUTE_PASSES = 3
_EXCHANGE_PASSES = 2
# AdamW and the moving average in float32: reads parameter, two moments, gradient, average; writes all but the gradient.
_OPTIMISER_BYTES = 9 * 4
# Of a sharded parameter: gathered in bfloat16 forward and backward, its gradient scattered in float32.
_PARAMETER_BYTES = 2 + 2 + 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """An MMDiT as far as its time depends on it.

    Attributes:
        width: d.
        num_heads: attention heads.
        double_blocks, single_blocks: blocks with and without weights of their own for text.
    """

    width: int
    num_heads: int
    double_blocks: int
    single_blocks: int

    @property
    def num_blocks(self) -> int:
        """Blocks a token passes; all cost the same."""
        return self.double_blocks + self.single_blocks

    @property
    def parameters(self) -> int:
        """Weights of the blocks: per stream 12 d^2 and modulation of 6 d^2; 12 d^2 and 3 d^2 in a single block."""
        return (36 * self.double_blocks + 15 * self.single_blocks) * self.width**2


FLUX = ModelShape(width=3072, num_heads=24, double_blocks=19, single_blocks=38)


def parse_shape(width: int, num_heads: int, blocks: str) -> ModelShape:
    """A shape from a command line's values; blocks are such as "19+38".

    Raises:
        UserError: naming the rule.
    """
    if not (1 <= num_heads <= _MOST_HEADS and width >= 1 and width % num_heads == 0):
        raise UserError(
            f"--width must be a multiple of --heads, which are in 1 .. {_MOST_HEADS}; got --width {width} and --heads"
            f" {num_heads}. FLUX has 3072 and 24."
        )
    found = re.fullmatch(r"([0-9]{1,4})\+([0-9]{1,4})", blocks)
    if not found or not int(found[1]) + int(found[2]):
        raise UserError(f"--blocks is DOUBLE+SINGLE, such as 19+38, with a block at least; got {blocks!r}.")
    return ModelShape(width, num_heads, int(found[1]), int(found[2]))


class ModelSeconds(NamedTuple):
    """Modelled seconds of a step, all blocks.

    Attributes:
        compute: of the fullest device, every device padded to the most tokens and the most attention.
        traffic: of attention's exchanges, of the device that sends most.
        parameters: gathers of sharded parameters and scatters of their gradients.
        optimiser: update of a device's share of the parameters.
    """

    compute: float
    traffic: float
    parameters: float
    optimiser: float

    @property
    def exposed(self) -> float:
        """Attention's traffic waits for compute and compute for it; only parameters travel under compute."""
        return max(self.compute, self.parameters) + self.traffic + self.optimiser

    @property
    def overlapped(self) -> float:
        """All traffic runs under compute, or compute under it."""
        return max(self.compute, self.parameters + self.traffic) + self.optimiser


@dataclass(frozen=True, slots=True)
class StepModel:
    """A model on machines, and how it is trained.

    Attributes:
        shape: of the model.
        gpu: the kind of device.
        machines: how many machines, of how many devices.
        flops_per_s: FLOP/s that a device reaches in linear layers.
        gamma: what a FLOP of attention costs relative to one of a linear layer.
        remat: whether the forward pass, exchanges included, runs again in the backward pass.
    """

    shape: ModelShape
    gpu: Gpu
    machines: Machines
    flops_per_s: float
    gamma: float
    remat: bool = True

    @property
    def cost(self) -> CostModel:
        """Cost of a block, in FLOP."""
        return CostModel(width=self.shape.width, gamma=self.gamma)

    @property
    def links(self) -> Links:
        """Speeds, which plans are also compared by."""
        return Links(self.flops_per_s, self.gpu.nvlink, self.gpu.network)

    @property
    def topology(self) -> Topology:
        """Machines of the devices."""
        return Topology(self.machines.count, self.machines.gpus)

    @property
    def compute_passes(self) -> int:
        """Forward passes that a step's compute amounts to."""
        return _COMPUTE_PASSES + self.remat

    @property
    def exchanged_bytes_per_row(self) -> float:
        """Bytes that a (token, head) row on another device makes its own send in a step, all blocks and passes."""
        row_s = self.links.row_seconds(self.shape.width / self.shape.num_heads)
        passes = (_EXCHANGE_PASSES + self.remat) / _EXCHANGE_PASSES
        return row_s * self.gpu.nvlink * self.shape.num_blocks * passes

    @property
    def peak_flops(self) -> float:
        """FLOP/s of all devices at their peak, bfloat16."""
        return self.gpu.flop_speed("bf16") * self.machines.num_devices

    def hardware_flops(self, lengths: Int[np.ndarray, " n"]) -> float:
        """FLOPs of a step over all devices, recomputation included, padding not.

        `(24 l d^2 + 4 l^2 d)` for each sequence, block and forward pass; gamma has no part in it.
        """
        tokens = lengths.astype(np.float64)
        width = float(self.shape.width)
        forward = 24 * width**2 * tokens.sum() + 4 * width * np.square(tokens).sum()
        return float(forward) * self.shape.num_blocks * self.compute_passes

    def seconds(self, plan: BalancePlan) -> ModelSeconds:
        """Modelled time of a step under a plan."""
        block = self.links.step_seconds(plan)
        blocks = self.shape.num_blocks
        return ModelSeconds(
            compute=block.compute * blocks * self.compute_passes / _COMPUTE_PASSES,
            traffic=block.traffic * blocks * (_EXCHANGE_PASSES + self.remat) / _EXCHANGE_PASSES,
            parameters=self._parameter_seconds(),
            optimiser=self.shape.parameters
            * _OPTIMISER_BYTES
            / self.machines.num_devices
            / self.gpu.memory_speed,
        )

    def _parameter_seconds(self) -> float:
        """Parameters sharded over all devices, as rings over all links: a machine's adapters share what leaves it."""
        devices = self.machines.num_devices
        sent = self.shape.parameters * _PARAMETER_BYTES * (devices - 1) / devices
        slowest = self.gpu.nvlink if self.machines.gpus > 1 else float("inf")
        if self.machines.count > 1:
            slowest = min(slowest, self.gpu.network * self.machines.gpus)
        return sent / slowest
