"""Floating-point operations and bytes of instructions, counted from the program."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from experiments.hlo._bytes import moved_bytes
from experiments.hlo._counts import called_computations, trip_count
from experiments.hlo._text import Computation, Instruction, Module

FlopRule = Callable[[Computation, Instruction], float | None]

# Instructions that move nothing: names for what is there, and the two ends of transfers.
FREE = frozenset(
    {
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "add-dependency",
    }
)


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does, once or summed.

    Attributes:
        flops: of matrix products and convolutions by dtype of their operands; elementwise work is not counted.
        num_bytes: read and written in the device's memory; see `moved_bytes`.
        unknown: custom calls without a rule, with how often they run.
    """

    flops: Mapping[str, float]
    num_bytes: float
    unknown: Mapping[str, float]

    @property
    def total_flops(self) -> float:
        """Of all dtypes."""
        return sum(self.flops.values())


NO_WORK = Work({}, 0.0, {})


def add_work(parts: list[tuple[float, Work]]) -> Work:
    """The sum of works, each times a factor."""
    flops: dict[str, float] = {}
    unknown: dict[str, float] = {}
    for factor, part in parts:
        for total, more in ((flops, part.flops), (unknown, part.unknown)):
            for name, value in more.items():
                total[name] = total.get(name, 0.0) + factor * value
    return Work(flops, sum(factor * part.num_bytes for factor, part in parts), unknown)


def dot_flops(computation: Computation, instruction: Instruction) -> float:
    """2 x elements of the result x length of the contracted dimensions."""
    lhs = computation.operand_shapes(instruction)[0][0]
    contracted = _numbers(instruction.attribute("lhs_contracting_dims", "{", "}"))
    return 2.0 * instruction.shapes[0].size * math.prod(lhs.dims[i] for i in contracted)


def convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """2 x elements of the result x elements of the kernel that meet in one of them."""
    kernel = computation.operand_shapes(instruction)[1][0]
    labels = instruction.attribute("dim_labels")
    # Input, kernel, output, such as bf01_oi01->bf01: every kernel dimension but "o" is summed over.
    of_kernel = re.split(r"_|->", labels)[1]
    return 2.0 * instruction.shapes[0].size * kernel.size / kernel.dims[of_kernel.index("o")]


def _gemm_call_flops(computation: Computation, instruction: Instruction) -> float | None:
    """Of a call of cuBLAS, from the product's dimension numbers."""
    config = instruction.backend_config.get("gemm_backend_config")
    if config is None:
        return None
    lhs = computation.operand_shapes(instruction)[0][0]
    contracted = config["dot_dimension_numbers"]["lhs_contracting_dimensions"]
    return 2.0 * instruction.shapes[0].size * math.prod(lhs.dims[int(i)] for i in contracted)


def _nothing(computation: Computation, instruction: Instruction) -> float:
    return 0.0


# Products of queries and keys (of 2 d FLOPs a pair) in each kernel of packed attention, by its name.
_ATTENTION_PRODUCTS = {
    "packed_attention_forward": 2,
    "packed_attention_grad_queries": 3,
    "packed_attention_grad_keys": 4,
}


def attention_rules(keys_per_query: float) -> Mapping[str, FlopRule]:
    """FLOPs of packed attention's Triton kernels, whose loops turn as often as the data say.

    Args:
        keys_per_query: keys that a row of queries meets, on average over rows with padding.
    """

    def rule(computation: Computation, instruction: Instruction) -> float | None:
        products = [n for name, n in _ATTENTION_PRODUCTS.items() if name in instruction.op_name]
        if not products:
            return None
        rows, dim = computation.operand_shapes(instruction)[1][0].dims  # after the table of visits
        return products[0] * 2.0 * rows * keys_per_query * dim

    return {"__gpu$xla.gpu.triton": rule}


# Rules by `custom_call_target`, for calls whose work cannot be read from the instruction itself.
DEFAULT_RULES: Mapping[str, FlopRule] = {
    "__cublas$gemm": _gemm_call_flops,
    "__cublas$lt$matmul": _gemm_call_flops,
    "__cub$DeviceRadixSort": _nothing,
    "Sharding": _nothing,
}


class WorkCounter:
    """Counts work of instructions and computations; what a computation does is counted once and remembered.

    Args:
        module: the program.
        data_dependent_trips: turns, on average, of loops whose number of turns depends on data.
        rules: FLOPs of custom calls by target, besides `DEFAULT_RULES`; a rule may answer None: unknown.
    """

    def __init__(
        self,
        module: Module,
        *,
        data_dependent_trips: float = 1.0,
        rules: Mapping[str, FlopRule] | None = None,
    ) -> None:
        self._module, self._trips = module, data_dependent_trips
        self._rules = {**DEFAULT_RULES, **(rules or {})}
        self._of: dict[tuple[str, bool], Work] = {}

    def of_program(self) -> Work:
        """Work of one run."""
        return self.of_computation(self._module.entry)

    def of_computation(self, name: str, *, fused: bool = False) -> Work:
        """Work of one run of a computation; the instructions of a fusion move no bytes of their own."""
        key = (name, fused)
        if key not in self._of:
            computation = self._module.computations[name]
            parts = [(1.0, self.of(computation, i, fused=fused)) for i in computation.instructions]
            self._of[key] = add_work(parts)
        return self._of[key]

    def of(self, computation: Computation, instruction: Instruction, *, fused: bool = False) -> Work:
        """Work of one run of an instruction, with all that it runs."""
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(("-start", "-done", "-update")):
            return NO_WORK
        if opcode == "while":
            known = trip_count(instruction)
            factor = self._trips if known is None else float(known)
            return add_work(
                [(factor, self.of_computation(name)) for name in called_computations(instruction)]
            )
        if opcode in ("call", "conditional"):
            return add_work([(1.0, self.of_computation(name)) for name in called_computations(instruction)])
        own = Work(
            self._own_flops(computation, instruction),
            0.0 if fused else moved_bytes(self._module, computation, instruction),
            self._own_unknown(computation, instruction),
        )
        if opcode != "fusion":
            return own
        inner = [(1.0, self.of_computation(name, fused=True)) for name in called_computations(instruction)]
        return add_work([(1.0, own), *inner])

    def _own_flops(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        if instruction.opcode == "dot":
            flops: float | None = dot_flops(computation, instruction)
        elif instruction.opcode == "convolution":
            flops = convolution_flops(computation, instruction)
        elif instruction.opcode == "custom-call":
            flops = self._custom_flops(computation, instruction)
        else:
            return {}
        found = [shape.dtype for shapes in computation.operand_shapes(instruction) for shape in shapes]
        dtype = next((dtype for dtype in found if dtype.startswith(("f", "bf"))), "f32")
        return {dtype: flops} if flops else {}

    def _own_unknown(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        is_known = instruction.opcode != "custom-call" or (
            self._custom_flops(computation, instruction) is not None
        )
        return {} if is_known else {custom_call_name(instruction): 1.0}

    def _custom_flops(self, computation: Computation, instruction: Instruction) -> float | None:
        rule = self._rules.get(custom_call_name(instruction)) or self._rules.get(
            instruction.attribute("custom_call_target", '"', '"')
        )
        return None if rule is None else rule(computation, instruction)


def custom_call_name(instruction: Instruction) -> str:
    """The name under which a custom call's rule is looked for first: that of its kernel, or its target."""
    kernel = instruction.backend_config.get("name")
    return str(kernel) if kernel else instruction.attribute("custom_call_target", '"', '"')


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]
