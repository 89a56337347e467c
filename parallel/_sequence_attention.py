"""The attention to call on a mesh of `sequence_mesh`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from parallel._check import flag, integer
from parallel._sequence_mesh import RING_AXES, ULYSSES_AXES
from parallel._torus_attention import torus_attention
from parallel._ulysses_attention import usp_attention


def sequence_attention(*, torus: bool = False, head_groups: int = 1) -> Callable[..., Any]:
    """`usp_attention` or `torus_attention` over the axes of `sequence_mesh`, whatever their sizes.

    Ulysses alone and a ring alone are `usp_attention` on a mesh whose other axes have size 1. Torus attention has no
    groups of heads. On meshes that are meant for it (`Placement.ULYSSES_ACROSS`, those of plans) Ulysses spans all
    machines of a sequence; where the ring spans some too, its steps cross machines.

    Args:
        torus: whether it is Torus attention.
        head_groups: as `usp_attention`.

    Returns:
        A function of q, k, v and the other keyword arguments of those two, to call inside `shard_map`.

    Raises:
        TypeError: if `torus` is no bool, or `head_groups` no integer.
        ValueError: for `head_groups` under 1, or for Torus attention not 1.

    Example:
        >>> import jax
        >>> from jax import P
        >>> from parallel._sequence_mesh import sequence_mesh
        >>> mesh = sequence_mesh(jax.devices()[:1], ulysses_degree=1)
        >>> rows = P(None, (*RING_AXES, *ULYSSES_AXES))
        >>> attend = jax.shard_map(sequence_attention(), mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
        >>> x = jax.numpy.ones((2, 16, 4, 8))
        >>> attend(x, x, x).shape
        (2, 16, 4, 8)
    """
    flag("sequence_attention", "torus", torus)
    advice = "1 exchanges all heads at once."
    head_groups = integer("sequence_attention", "head_groups", head_groups, least=1, advice=advice)
    if not torus:
        return partial(usp_attention, ulysses_axis=ULYSSES_AXES, ring_axis=RING_AXES, head_groups=head_groups)
    if head_groups != 1:
        raise ValueError(
            f"sequence_attention: head_groups is 1 for Torus attention; got head_groups={head_groups}. Its transfers"
            " run beside attention anyway; leave it out."
        )
    machines, inside = ULYSSES_AXES
    return partial(torus_attention, machine_axis=machines, ulysses_axis=inside, ring_axis=RING_AXES)
