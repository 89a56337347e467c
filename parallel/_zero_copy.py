"""Collectives of XLA without the copies between its buffers and NCCL's."""

from parallel._check import flag


def zero_copy_options(*, symmetric: bool = True) -> dict[str, bool]:
    """Compiler options with which NCCL sends from, and receives into, the program's own buffers. Experimental.

        step = jax.jit(step, compiler_options=parallel.zero_copy_options())

    By default NCCL copies what it sends into buffers of its own, and out of them where it arrives. With these options
    XLA allocates the operands and results of collectives in collective memory, which is registered with NCCL: the
    compiled program shows them in memory space S(1). Nothing else about the program changes, and none of these options
    does anything on other platforms than CUDA.

    Collective memory is a pool beside the main one (environment variable XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB) and
    not shared with other temporaries: a program needs as much more as its largest exchange sends and receives, for
    Ulysses attention twice a device's q, k and v.

    It has been compiled for H100 (`tests/aot/check_one_sided.py`: every buffer of every all-to-all and permute of
    Ulysses, ring and Torus attention and of their gradients is in S(1), and there are no more copies), and not run:
    what it gains is not known here. The library uses it nowhere by itself.

    Args:
        symmetric: as symmetric memory, one address range on all devices, which NCCL 2.27 and later can also read and
            write directly over NVLink; without it as registered user buffers, which older releases know too.

    Returns:
        For `jax.jit(..., compiler_options=...)` or `Lowered.compile(compiler_options=...)`.

    Raises:
        TypeError: if `symmetric` is no bool.
    """
    return {
        "xla_gpu_enable_nccl_user_buffers": True,
        "xla_gpu_experimental_enable_nccl_symmetric_buffers": flag(
            "zero_copy_options", "symmetric", symmetric
        ),
    }
