"""Test session set-up: eight virtual CPU devices, and shapes in signatures checked at run time."""

import os

# Many steps in flight dead-lock XLA's CPU collectives unless its thread pool is larger than the machine.
os.environ.setdefault("NPROC", "32")

import jax

# Must come before any device is touched; wins over XLA_FLAGS.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

from jaxtyping import install_import_hook

import tests.typechecker  # the hook names it below, and looks no deeper than what is imported

assert tests.typechecker
install_import_hook(["parallel", "jaxdit"], "tests.typechecker.checked")
