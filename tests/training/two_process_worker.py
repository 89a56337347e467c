"""Process `i` of two, four CPU devices each, over gloo: runs the case and saves what it did."""

import json
import sys
from pathlib import Path

import jax


def main(port: str, process: str, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)  # as in the tests that it is compared with
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    import numpy as np

    from tests.training_case import Case, shared_capacity

    bags = "g1n2+g2n1+g4n1"
    trace = Case(8, 8, shared_capacity(8, [bags])).run(bags)
    if process == "0":
        leaves = jax.tree.leaves(trace.gradients)
        names = [f"g{i}" for i in range(len(leaves))]
        np.savez(Path(folder) / "trace.npz", losses=trace.losses, **dict(zip(names, leaves, strict=True)))
        (Path(folder) / "names.json").write_text(json.dumps(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
