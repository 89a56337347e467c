"""GPUs and machines that are not here: descriptions for the compiler, peak speeds, and shapes of clusters."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiments._program import UserError

GPU_DIR = Path(__file__).parent / "gpus"
_SPEEDS = "speeds.toml"
_MOST_DEVICES = 4096
# What JAX takes of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
DEFAULT_POOL = 0.75


@dataclass(frozen=True)
class Gpu:
    """A GPU by its description.

    Attributes:
        name: of the description.
        title: for people.
        description: text proto that XLA's compiler takes as target.
        flops: peak of matrix products per second, by element type of the operands.
        memory_speed: bytes a second of its own memory.
        nvlink: bytes a second that it sends inside its machine.
        network: bytes a second that it sends to other machines.
    """

    name: str
    title: str
    description: str
    flops: Mapping[str, float]
    memory_speed: float
    nvlink: float
    network: float

    @cached_property
    def memory_bytes(self) -> int:
        """Memory of the GPU."""
        found = re.search(r"device_memory_size: (\d+)", self.description)
        assert found is not None, f"{self.name}.txtpb has no device_memory_size"
        return int(found[1])

    def flop_speed(self, dtype: str) -> float:
        """Peak of products of a dtype; types without a figure of their own count as float32."""
        return self.flops.get(dtype, self.flops["f32"])


def gpu_names() -> list[str]:
    """Names of the GPUs that are described."""
    return sorted(path.stem for path in GPU_DIR.glob("*.txtpb"))


def load_gpu(name: str) -> Gpu:
    """A GPU by name.

    Raises:
        UserError: for one that is not described.
    """
    if name not in gpu_names():
        raise UserError(f"--gpu must be one of {', '.join(gpu_names())}; got {name!r}.")
    speeds = tomllib.loads((GPU_DIR / _SPEEDS).read_text(encoding="utf-8"))[name]
    return Gpu(
        name=name,
        title=speeds["title"],
        description=(GPU_DIR / f"{name}.txtpb").read_text(encoding="utf-8"),
        flops=speeds["flops"],
        memory_speed=speeds["memory"],
        nvlink=speeds["nvlink"],
        network=speeds["network"],
    )


@dataclass(frozen=True, slots=True)
class Machines:
    """So many machines of so many GPUs, one process a machine."""

    count: int
    gpus: int

    @property
    def num_devices(self) -> int:
        """GPUs in all."""
        return self.count * self.gpus

    def __str__(self) -> str:
        return f"{self.count}x{self.gpus}"


def parse_machines(text: str) -> Machines:
    """Machines from a text such as "4x8".

    Raises:
        UserError: for another form.
    """
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    machines = Machines(int(found[1]), int(found[2])) if found else Machines(0, 0)
    if not 1 <= machines.num_devices <= _MOST_DEVICES:
        raise UserError(
            f"--topology is MACHINESxGPUS, such as 4x8, with at most {_MOST_DEVICES} GPUs in all; got {text!r}."
        )
    return machines


def check_machines(machines: Machines, num_devices: int, devices_per_machine: int | None) -> None:
    """Refuse machines that are not those of a config.

    Raises:
        UserError: naming the setting.
    """
    if machines.num_devices != num_devices:
        raise UserError(
            f"--topology must have the config's train.num_devices={num_devices} GPUs; got {machines}, which are"
            f" {machines.num_devices}. Set train.num_devices (and train.bags and train.shards, which divide it)."
        )
    if devices_per_machine is not None and devices_per_machine != machines.gpus:
        raise UserError(
            f"--topology must have the config's train.devices_per_machine={devices_per_machine} GPUs a machine; got"
            f" {machines}. Set one or the other."
        )
