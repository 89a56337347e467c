"""Compiling for GPUs that are not here: what the environment must have, and the compiler's mesh of devices."""

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

from experiments._aot_gpus import Gpu, Machines
from experiments._program import UserError

_INSTALL = "pip install 'jaxdit[aot]'"
# jaxlib ends the process when it meets a flag that it does not know, so another process tries them first.
_TRY_FLAGS = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
_UNKNOWN_FLAGS = re.compile(r"Unknown flags? in XLA_FLAGS: *(.*)")


def check_xla_flags() -> None:
    """Refuse flags in XLA_FLAGS that this jaxlib does not know; starts no backend in this process.

    Raises:
        UserError: naming them.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not flags:
        return
    tried = subprocess.run([sys.executable, "-c", _TRY_FLAGS], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return
    found = _UNKNOWN_FLAGS.search(tried.stderr)
    unknown = found[1].strip() if found else flags
    raise UserError(
        f"XLA_FLAGS must be flags that this jaxlib knows; it refuses {unknown}. Take them out; options of a run's own"
        " programs are set by the programs."
    )


def check_cuda_compiler() -> None:
    """Refuse an environment without the CUDA compiler; imports nothing of it.

    Raises:
        UserError: with the command that installs it.
    """
    for version in (12, 13):
        if importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None:
            return
    raise UserError(
        f"compiling for GPUs needs JAX's CUDA wheels (no GPU), which are not installed here: {_INSTALL}, or make aot,"
        " which has an environment of its own."
    )


def target_devices(gpu: Gpu, machines: Machines) -> list[Any]:
    """Devices that the compiler takes for those of the machines, one process a machine.

    Raises:
        UserError: if this JAX cannot compile for them.
    """
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            gpu.name, platform="cuda", target_config=gpu.description, topology=f"1x{machines}"
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"this JAX cannot compile for {gpu.title}: {text:.200}. {_INSTALL}.") from error
    return list(topology.devices)
