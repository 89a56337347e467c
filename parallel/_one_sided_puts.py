"""Who puts: the kernels behind one-sided sequence parallelism, by platform.

Pallas' modules for each are experimental, and loaded when used: no other part of the package needs them.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jax import lax
from jaxtyping import Array, Float

from parallel._block_attention import BlockAttention, check_block
from parallel._block_xla import XlaBlockAttention
from parallel._check import flag, implementation, integer
from parallel._online_softmax import Partial
from parallel._routes import AxisName


@runtime_checkable
class Puts(Protocol):
    """Kernels that write into peers' memory. Per device, inside `shard_map`; an implementation is hashable."""

    def exchange(self, parts: Float[Array, "p ..."], axis_name: AxisName) -> Float[Array, "p ..."]:
        """Part p to device p of the axis; part s of the result is what device s had for this one."""

    def ring(
        self,
        q: Float[Array, "b l_q h d"],
        kv: Float[Array, "2 b l_k h_kv d"],
        axis_name: AxisName,
        scale: float,
    ) -> Partial:
        """Attention of the device's queries to the keys of all, which go round meanwhile; float32."""


@dataclass(frozen=True, slots=True)
class SimulatedPuts:
    """One-sided kernels in Pallas' TPU interpret mode, on CPU devices. Experimental: for tests, and slow.

    Puts are asynchronous remote copies, which the simulator carries out as late as waits for them allow, or at once;
    both must give the same.

    Attributes:
        block: attention of one device's queries to one device's keys, inside the kernel: plain JAX.
        eager: puts are carried out when they start, not when they are waited for.
        detect_races: have the simulator follow what happens before what, and print "RACE DETECTED" for accesses of one
            place, one of them a write, that nothing orders.
    """

    block: BlockAttention = field(default_factory=XlaBlockAttention)
    eager: bool = False
    detect_races: bool = False

    def __post_init__(self) -> None:
        check_block("SimulatedPuts", "block", self.block)
        flag("SimulatedPuts", "eager", self.eager)
        flag("SimulatedPuts", "detect_races", self.detect_races)

    def exchange(self, parts: Float[Array, "p ..."], axis_name: AxisName) -> Float[Array, "p ..."]:
        """As `Puts.exchange`."""
        from parallel._one_sided_simulated import Simulator, exchange

        return exchange(parts, axis_name, Simulator(self.eager, self.detect_races))

    def ring(
        self,
        q: Float[Array, "b l_q h d"],
        kv: Float[Array, "2 b l_k h_kv d"],
        axis_name: AxisName,
        scale: float,
    ) -> Partial:
        """As `Puts.ring`."""
        from parallel._one_sided_simulated import Simulator, ring

        return ring(q, kv, axis_name, self.block, scale, Simulator(self.eager, self.detect_races))


@dataclass(frozen=True, slots=True)
class MosaicPuts:
    """One-sided kernels for NVIDIA GPUs of one machine, Hopper's, in Pallas for Mosaic GPU. Experimental.

    They have been compiled for 8 H100 without a GPU (`tests/aot/check_one_sided.py`), and never run: nobody knows yet
    whether they are right, or fast. One process has all devices of the program, and the mesh has them in order of their
    ids.

    Attributes:
        exchange_blocks: blocks that copy parts of an exchange.
        put_blocks: blocks of a ring that put keys.
        attention_blocks: blocks of a ring that attend. Those that put and those that attend are together at most the
            GPU's multiprocessors, or they would wait for blocks that cannot start.
    """

    exchange_blocks: int = 32
    put_blocks: int = 16
    attention_blocks: int = 116

    def __post_init__(self) -> None:
        for name in ("exchange_blocks", "put_blocks", "attention_blocks"):
            integer("MosaicPuts", name, getattr(self, name), least=1, advice="Leave it out for the default.")

    def exchange(self, parts: Float[Array, "p ..."], axis_name: AxisName) -> Float[Array, "p ..."]:
        """As `Puts.exchange`; any shape, padded to whole tiles of 8 KiB."""
        from parallel._one_sided_mosaic import exchange

        return exchange(parts, axis_name, self.exchange_blocks)

    def ring(
        self,
        q: Float[Array, "b l_q h d"],
        kv: Float[Array, "2 b l_k h_kv d"],
        axis_name: AxisName,
        scale: float,
    ) -> Partial:
        """As `Puts.ring`.

        Raises:
            NotImplementedError: for rows that are not of half precision, numbers of queries or keys that are not
                multiples of 64, and heads that are not of 64 or 128.
            ValueError: for a single device.
        """
        if q.dtype.itemsize != 2 or q.shape[1] % 64 or kv.shape[2] % 64 or q.shape[3] not in (64, 128):
            raise NotImplementedError(
                "MosaicPuts: rows are bfloat16 or float16, a device's queries and keys multiples of 64, heads of 64 or"
                f" 128; got {q.dtype}{list(q.shape)} and {kv.shape[2]} keys. Use ring_attention."
            )
        if lax.axis_size(axis_name) < 2:
            raise ValueError(
                f"MosaicPuts: a ring has at least 2 devices; got {axis_name!r} of 1. Use a block attention."
            )
        from parallel._one_sided_mosaic import Blocks, ring

        return ring(q, kv, axis_name, scale, Blocks(self.put_blocks, self.attention_blocks))


def check_puts(caller: str, puts: Any) -> None:
    """Raises TypeError if they are no `Puts`."""
    advice = "Give SimulatedPuts() on CPU devices, MosaicPuts() on GPUs."
    implementation(caller, "puts are an object with exchange and ring", puts, Puts, advice=advice)
