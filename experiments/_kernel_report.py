"""What the attention kernels take of a GPU, compiled without one: registers, spills, shared memory, instructions.

`python -m experiments._kernel_report --target h100.txtpb [--json FILE]`: needs JAX's CUDA wheels (whose `ptxas` and
compiler it runs) and a description of the GPU as XLA's compiler takes it; no GPU.
"""

import argparse
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments._program import UserError, log_to_stderr, run_program, write_report

_LOG = logging.getLogger(__name__)

# Long enough that tiles of every size divide it; kernels do not depend on it.
_ROWS = 4096
_INSTALL = "pip install 'jaxdit[cuda12]'"
_WGMMA = re.compile(r"\bwgmma\.mma_async")
_MMA = re.compile(r"\bmma\.sync")
_SHARED = re.compile(r"shared_memory: (\d+) bytes")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One kernel of the tile table as the compiler left it.

    Attributes:
        head_dim, dtype, direction: its entry; direction is a field of `parallel.KernelTiles`.
        queries, keys, num_warps, num_stages: its tiles.
        registers: of a thread.
        spill_bytes: stored and loaded again by a thread for want of registers.
        shared_bytes: of a program.
        wgmma, mma: matrix instructions for warpgroups and for warps, as written (not as often as they run).
    """

    head_dim: int
    dtype: str
    direction: str
    queries: int
    keys: int
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int


def find_ptxas() -> Path:
    """The assembler of the CUDA wheels.

    Raises:
        UserError: where they are not installed.
    """
    places = [("nvidia.cuda_nvcc", "bin/ptxas"), ("nvidia.cu13", "bin/ptxas")]
    for module, name in places:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (Path(folder) / name).is_file():
                return Path(folder) / name
    raise UserError(
        f"the kernel report needs JAX's CUDA wheels (no GPU), which are not installed here. Try: {_INSTALL}."
    )


def kernel_report(target: str) -> list[KernelFigures]:
    """Compile every kernel of the tile table.

    The compiler leaves its files in a folder that XLA_FLAGS names when JAX starts, so each kernel is compiled in a
    process of its own.

    Args:
        target: the GPU, as a text proto for XLA's compiler.

    Raises:
        UserError: where the CUDA wheels are missing, or do not compile for the target.
    """
    from parallel import KernelTiles
    from parallel._tiles import TILE_TABLE

    ptxas = find_ptxas()
    figures = []
    for (head_dim, dtype), tiles in TILE_TABLE.items():
        for direction in KernelTiles.__dataclass_fields__:
            with tempfile.TemporaryDirectory() as folder:
                _compile_elsewhere(head_dim, dtype, direction, target, Path(folder))
                measured = read_dump(Path(folder), ptxas)
            entry = asdict(getattr(tiles, direction))
            figures.append(
                KernelFigures(head_dim=head_dim, dtype=dtype, direction=direction, **entry, **measured)
            )
            _LOG.info("%s", figures[-1])
    return figures


def _compile_elsewhere(head_dim: int, dtype: str, direction: str, target: str, folder: Path) -> None:
    description = folder / "target.txtpb"
    description.write_text(target)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()
    code = "import sys; from experiments._kernel_report import compile_kernel; compile_kernel(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(head_dim), dtype, direction, str(description)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"the {direction} kernel for {dtype} heads of {head_dim} does not compile: {last:.300}. Check that JAX's"
            f" CUDA wheels are those of its version ({_INSTALL}) and that --target describes a GPU."
        )


def compile_kernel(head_dim: str, dtype: str, direction: str, target: str) -> None:
    """Compile one kernel of the table for the GPU that the file `target` describes, in this process."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    topology = topologies.get_topology_desc(
        "gpu", platform="cuda", target_config=Path(target).read_text(), topology="1x1x1"
    )
    sharding = NamedSharding(Mesh(np.array(topology.devices), ("x",)), P())
    call, args = kernel_call(int(head_dim), dtype, direction)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    jax.jit(call).lower(*placed).compile()


def kernel_call(head_dim: int, dtype: str, direction: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One kernel without what is prepared for it in plain JAX, and the shapes of its arguments."""
    import jax

    from parallel._pallas_backward import GradientRows, grad_keys_call, grad_queries_call
    from parallel._pallas_forward import ForwardRows, forward_call
    from parallel._tiles import TILE_TABLE

    tiles = getattr(TILE_TABLE[head_dim, dtype], direction)

    def shaped(kind: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, kind)

    rows = shaped(dtype, _ROWS, head_dim)
    ids, numbers = shaped("int32", _ROWS), shaped("float32", _ROWS)
    read: Any = GradientRows(rows, rows, numbers, numbers, ids, rows, rows, ids)
    call: Any = grad_queries_call if direction == "grad_queries" else grad_keys_call
    if direction == "forward":
        read = ForwardRows(rows, ids, rows, rows, ids, numbers, shaped("float32", _ROWS // tiles.keys))
        call = forward_call
    own = tiles.keys if direction == "grad_keys" else tiles.queries
    visits = shaped("int32", _ROWS // own, 5)

    def run(visits: Any, read: Any) -> Any:
        return call(visits, read, tiles=tiles, scale=head_dim**-0.5, interpret=False)

    return run, (visits, read)


def read_dump(folder: Path, ptxas: Path) -> dict[str, int]:
    """Figures of the one kernel whose files XLA's compiler left in a folder.

    Raises:
        UserError: if there is not one kernel.
    """
    # One of the files is a stub without code.
    found = [p for p in folder.glob("*.ptx") if ".entry" in p.read_text()]
    schedule = "".join(p.read_text() for p in folder.glob("*thunk_sequence.txt"))
    shared = _SHARED.findall(schedule)
    if len(found) != 1 or len(shared) != 1:
        raise UserError(
            f"XLA's dump must hold one kernel; got {len(found)} PTX files and {len(shared)} launches. This jaxlib"
            " writes its files in another form."
        )
    code = found[0].read_text()
    target = re.search(r"^\.target (\w+)", code, re.MULTILINE)
    assert target is not None, "PTX names its target"
    command = [str(ptxas), "-v", "-arch", target[1], str(found[0]), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = _REGISTERS.search(said), _SPILLS.search(said)
    assert registers is not None, said
    assert spills is not None, said
    return {
        "registers": int(registers[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "shared_bytes": int(shared[0]),
        "wgmma": len(_WGMMA.findall(code)),
        "mma": len(_MMA.findall(code)),
    }


def main(argv: Sequence[str]) -> int:
    """Compile all, write JSON. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments._kernel_report", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="description of the GPU, a text proto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there and not to standard output")
    args = parser.parse_args(argv)
    log_to_stderr()
    if not args.target.is_file():
        raise UserError(f"--target must be a file; got {args.target}. XLA's sources have one of each GPU.")
    text = json.dumps([asdict(x) for x in kernel_report(args.target.read_text())], indent=1) + "\n"
    if args.json is None:
        write_report(text)
    else:
        args.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
