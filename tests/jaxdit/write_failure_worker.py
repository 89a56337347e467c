"""Process `i` of two, over gloo: saves parameters that both hold a part of, where the first process cannot write.

python -m tests.jaxdit.write_failure_worker PORT PROCESS FOLDER
"""

import resource
import sys
from pathlib import Path

import jax


def main(port: str, process: str, folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    import numpy as np

    from jaxdit.models import DiTConfig
    from jaxdit.training import param_shardings, shard_axes
    from jaxdit.weights import SaveFormat, WeightsError, abstract_params, save_params
    from parallel import data_mesh

    config = DiTConfig(width=32, depth=3, num_heads=2, patch_size=2, num_classes=5, time_frequency_shift=1)
    shapes = abstract_params(config)
    shardings = param_shardings(shard_axes(shapes, 2), data_mesh(jax.devices(), shards=2))
    params = jax.tree.map(
        lambda x, where: jax.make_array_from_callback(
            x.shape, where, lambda index: np.full(x.shape, 3, np.float32)[index]
        ),
        shapes,
        shardings,
    )

    def attempt(name: str) -> None:
        try:
            save_params(folder / name, params, config, SaveFormat(sample_size=8, max_file_bytes=20_000))
            outcome = "saved"
        except (WeightsError, OSError) as error:
            outcome = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"{name} {outcome}\n")
        sys.stdout.flush()

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process == "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, unlimited[1]))
    attempt("full")
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    attempt("file/inside")
    attempt("taken")
    attempt("good")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
