"""What differs between devices, as `shard_map(check_vma=True)` knows it in types; without it there are no such types.

Loops, conditionals and barriers give what passes them the types of one another, and loops refuse that for their carry.
The rule here: whatever meets rows of a device varies as these rows do, be it positions, zeros or a kernel's results.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array


def varying_axes(*trees: Any) -> frozenset:
    """Mesh axes over which some of the arrays in these trees are known to differ."""
    return frozenset().union(*(_axes_of(jax.typeof(x)) for x in jax.tree.leaves(trees)))


def as_varying(x: Array, axes: Iterable[Any]) -> Array:
    """The array, marked as one that may differ over these axes too."""
    known = varying_axes(x)
    missing = tuple(axis for axis in axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_like(x: Array, *trees: Any) -> Array:
    """The array, marked as one that may differ where some array in these trees does."""
    return as_varying(x, varying_axes(*trees))


def _axes_of(kind: Any) -> Iterable[Any]:
    manual = getattr(kind, "manual_axis_type", None)  # `vma` in some releases
    return getattr(kind, "vma", ()) if manual is None else manual.varying
