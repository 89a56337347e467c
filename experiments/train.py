"""Train a model: `python -m experiments.train --config experiments/configs/quickstart.gin`.

The same command in the same workdir goes on from the last checkpoint.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments._config import config_text, load_config, versions
from experiments._program import UserError, checking, log_to_stderr, run_program


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.train", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="gin file, or the name of a shipped config")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.PARAMETER=VALUE", dest="bindings")
    parser.add_argument("--workdir", help="folder of the run (default: runs/NAME OF THE CONFIG)")
    parser.add_argument("--profile", type=int, nargs="?", const=3, default=0, metavar="STEPS", help="trace a few steps")
    parser.add_argument("--cluster", action="store_true", help="several processes, found from SLURM, Kubernetes or MPI")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="several processes, given by hand")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    return parser


def main(argv: Sequence[str]) -> int:
    """Check everything, then train. Returns the exit code."""
    args = _parser().parse_args(argv)
    log_to_stderr()
    # Imported here: configurables register on import, and `--help` should not load JAX.
    from experiments import _components, _platform

    config = load_config(args.config, args.bindings)
    with checking():
        settings = _components.train()
    workdir = Path(args.workdir or Path("runs") / config.stem)
    processes = _platform.ProcessSettings(args.coordinator, args.num_processes, args.process_id, args.cluster)
    _platform.prepare_platform(settings.num_devices, processes)

    from experiments._checkpoint import Checkpoints
    from experiments._disk import check_disk_space
    from experiments._loop import Profile, Trainer
    from experiments._manifest import state_bytes
    from experiments._run import Run, open_data

    mesh = _platform.make_mesh(settings.num_devices, settings.shards)
    run = Run.make(settings, mesh, open_data(settings))
    check_prompts(run)
    with Checkpoints(workdir, keep=settings.keep) as checkpoints:
        check_disk_space(workdir, state_bytes(run.abstract_state), settings.keep)
        _describe(run, workdir)
        Trainer(run, workdir, Profile(args.profile)).train(checkpoints)
    return 0


def check_prompts(run: "object") -> None:
    """Refuse sample prompts the model cannot make, before the run and not at its first grid."""
    from experiments._sampling import check_request, parse_request

    for i, text in enumerate(run.settings.sample_prompts):
        check_request(parse_request(text, i), run)


def _describe(run: "object", workdir: Path) -> None:
    """Save what the run is, and say it."""
    import jax

    devices = run.mesh.devices
    about = {
        "versions": versions(),
        "mesh": {name: int(size) for name, size in run.mesh.shape.items()},
        "devices": [str(device) for device in devices.flat],
        "parameters": run.num_params,
        "data": run.data.train.digest,
    }
    logging.info(
        "%s parameters, %d x %s, %d shard(s), bags %s, workdir %s",
        f"{run.num_params:,}",
        devices.size,
        devices.flat[0].device_kind,
        run.mesh.shape["shard"],
        run.settings.bags,
        workdir,
    )
    if jax.process_index() == 0:
        try:
            (workdir / "config.gin").write_text(config_text(), encoding="utf-8")
            (workdir / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write to {workdir}: {error.strerror}. Choose another --workdir.") from error


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
