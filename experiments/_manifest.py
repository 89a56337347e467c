"""What a checkpoint says about itself: names, shapes, types and fingerprints of its arrays."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._config import UserError
from experiments._fingerprint import fingerprints

FORMAT = 1
_SHOWN_DIFFERENCES = 3


def state_bytes(state: Any) -> int:
    """Bytes of all (global) arrays or `jax.ShapeDtypeStruct`s of a pytree."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state))


def named_arrays(state: Any) -> dict[str, jax.Array]:
    """Name to array; the name is the path in the pytree, joined by dots.

    Raises:
      TypeError: a leaf is not a floating, integer or bool `jax.Array`.
      ValueError: no leaf, or two of one name.
    """
    named: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"Checkpoints.save: leaves must be jax.Arrays; got {name} of {type(leaf).__name__}. "
                "Put plain Python values into meta."
            )
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise TypeError(
                f"Checkpoints.save: arrays must be floating, integer or bool; got {name} of {leaf.dtype}. "
                "Save the seed of a random key, or its jax.random.key_data."
            )
        if name in named:
            raise ValueError(f"Checkpoints.save: names must be unique; got {name} twice. Rename a dict key.")
        named[name] = leaf
    if not named:
        raise ValueError("Checkpoints.save: state must hold an array; got an empty pytree.")
    return named


def named_abstract(abstract_state: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The same names for what a state should be read into.

    Raises:
      TypeError: a leaf has no sharding.
    """
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if getattr(leaf, "sharding", None) is None:
            raise TypeError(
                f"Checkpoints.restore: leaves must be jax.ShapeDtypeStructs with a sharding; got {name} of "
                f"{type(leaf).__name__} without."
            )
        named[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return named


def make_manifest(arrays: Mapping[str, jax.Array], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document of a checkpoint; its checksum covers the rest of it.

    Raises:
      TypeError: `meta` does not come back from JSON as it was.
    """
    try:
        unchanged = json.loads(json.dumps(dict(meta), allow_nan=False)) == meta
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Checkpoints.save: meta must be JSON; {error}. Convert it to Python values."
        ) from error
    if not unchanged:
        raise TypeError(
            "Checkpoints.save: meta must come back from JSON unchanged; got tuples or keys that are not "
            "strings. Use lists and string keys."
        )
    found = fingerprints(arrays)
    entries = {
        name: {"dtype": str(value.dtype), "shape": list(value.shape), "fingerprint": found[name]}
        for name, value in arrays.items()
    }
    document = {"format": FORMAT, "meta": dict(meta), "arrays": entries}
    return {**document, "crc32": crc32(document)}


def crc32(document: Mapping[str, Any]) -> int:
    """The checksum of everything in a manifest but the checksum."""
    rest = {key: value for key, value in document.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def check_same_model(
    where: str, stored: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct], partial: bool
) -> None:
    """Compares the arrays of a manifest with those wanted, all of them or (`partial`) only those wanted.

    Raises:
      UserError: names, shapes or types differ; the first differences and their number.
    """
    here = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in wanted.items()}
    there = {name: f"{entry['dtype']}{entry['shape']}" for name, entry in stored.items()}
    names = list(here) if partial else list(dict.fromkeys([*here, *there]))
    differing = [
        f"{name} is {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in names
        if here.get(name) != there.get(name)
    ]
    if not differing:
        return
    more = len(differing) - _SHOWN_DIFFERENCES
    shown = "; ".join(differing[:_SHOWN_DIFFERENCES]) + (f"; {more} more" if more > 0 else "")
    raise UserError(
        f"checkpoint {where} is of another model, {len(differing)} of {len(names)} arrays differ: {shown}. "
        "Use the config it was made with, or another --workdir."
    )
