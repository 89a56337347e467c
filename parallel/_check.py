"""What callers may give: checks that name the rule, the value and the way out, when a program is traced."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def integer(caller: str, name: str, value: Any, *, least: int | None = None, advice: str) -> int:
    """The value as a Python integer.

    Raises:
        TypeError: if it is no integer, or traced.
        ValueError: if it is below `least`.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{caller}: {name} is an integer; got {kind(value)}. {advice}")
    if least is not None and value < least:
        raise ValueError(f"{caller}: {name} is at least {least}; got {name}={_short(value)}. {advice}")
    return int(value)


def flag(caller: str, name: str, value: Any) -> bool:
    """The value as a Python bool.

    Raises:
        TypeError: if it is none, or traced.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{caller}: {name} is True or False, known when the program is traced; got {kind(value)}. Give a bool, as a"
            " static argument where jax.jit has it."
        )
    return bool(value)


def static_scale(caller: str, value: Any, head_dim: int) -> float:
    """Factor on the logits, a Python number: d ** -0.5 for None.

    NumPy's of 64 bits would widen float32 logits under x64, and kernels capture no arrays.

    Raises:
        TypeError: if it is no real number, or traced.
        ValueError: if it is not finite, or float32, in which logits are, makes infinity or 0 of it.
    """
    if value is None:
        return head_dim**-0.5
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{caller}: scale is a static number; got a traced one. Multiply q by it, and give scale=1."
        )
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic)) and not value.shape
    if isinstance(value, bool) or not (
        isinstance(value, (int, float)) or (is_array and _is_real(value.dtype))
    ):
        raise TypeError(
            f"{caller}: scale is a number; got a {kind(value)}. Leave it out for head_dim ** -0.5."
        )
    try:
        scale = float(value)
    except OverflowError:  # an integer past float64
        scale = math.inf if value > 0 else -math.inf
    else:
        if not math.isfinite(scale):
            raise ValueError(
                f"{caller}: scale is finite; got scale={scale}. Leave it out for head_dim ** -0.5."
            )
    least, most = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    if scale and not least <= abs(scale) <= most:
        shown = _short(value) if isinstance(value, int) else scale
        raise ValueError(
            f"{caller}: scale is 0 or of a size that float32 holds, {least:.1e} to {most:.1e}; got"
            f" scale={shown}. Leave it out for head_dim ** -0.5."
        )
    return scale


def array(caller: str, name: str, value: Any, *, advice: str) -> Array:
    """The value as an array of JAX.

    Raises:
        TypeError: if it is no array, or one of strings or objects.
    """
    check_array(caller, name, value, advice=advice)
    return jnp.asarray(value)


def check_array(caller: str, name: str, value: Any, *, advice: str) -> None:
    """Raises TypeError unless the value is an array of numbers; it may be NumPy's."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"{caller}: {name} is an array; got {kind(value)}. {advice}")
    if not (jnp.issubdtype(value.dtype, np.number) or value.dtype == np.bool_):
        raise TypeError(f"{caller}: {name} is an array of numbers; got {value.dtype}. {advice}")


def int32_ids(caller: str, name: str, ids: Any) -> Array:
    """Segment ids, an array of signed integers, as int32, in which none of them wraps around.

    Raises:
        TypeError: if they are no array, no signed integers, or of 64 bits where values are not at hand.
        ValueError: for an id past int32.
    """
    check_array(caller, name, ids, advice="Give int32, (batch, length).")
    if not jnp.issubdtype(ids.dtype, jnp.signedinteger):
        raise TypeError(f"{caller}: {name} are signed integers; got {ids.dtype}. Use int32.")
    if ids.dtype.itemsize > 4:
        if isinstance(ids, jax.Array):
            raise TypeError(
                f"{caller}: {name} have at most 32 bits; got {ids.dtype}, whose ids might wrap around. Number segments"
                " from 1, and use int32."
            )
        limits = np.iinfo(np.int32)
        if ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max:
            raise ValueError(
                f"{caller}: {name} fit in int32; got {ids.dtype} with larger ones. Number segments from 1."
            )
        ids = ids.astype(np.int32)
    return jnp.asarray(ids).astype(jnp.int32)


def implementation(caller: str, rule: str, value: Any, protocol: type, *, advice: str) -> None:
    """Raises TypeError by `rule` unless the value is an object, no class, that has what the protocol asks for."""
    if isinstance(value, type) or not isinstance(value, protocol):
        raise TypeError(f"{caller}: {rule} ({protocol.__name__}); got a {kind(value)}. {advice}")


def device_list(caller: str, devices: Any) -> list[Any]:
    """The devices, by default all, in a list.

    Raises:
        TypeError: if they are no sequence, or have entries that are no devices.
        ValueError: if there are none, or one is given twice.
    """
    devices = jax.devices() if devices is None else devices
    listed = list(devices) if isinstance(devices, Iterable) else [None]
    # A row of an array is one too, and has no id.
    strangers = [d for d in listed if not (hasattr(d, "process_index") and hasattr(d, "id"))]
    if strangers:
        found = kind(devices) if strangers == [None] else f"{kind(devices)} with {kind(strangers[0])}"
        raise TypeError(
            f"{caller}: devices is a sequence of devices; got {found}. Give jax.devices() or a part of it; an array of"
            " them flattened, a single one in a list."
        )
    if not listed or len(set(listed)) != len(listed):
        raise ValueError(
            f"{caller}: devices, at least one and each once; got {len(listed)}, {len(set(listed))} of them different."
            " Leave them out for all there are."
        )
    return listed


def kind(value: Any) -> str:
    """What a value is, in the words of an error; never an array's contents."""
    if isinstance(value, jax.core.Tracer):
        return "a traced one"
    name = type(value).__name__
    return f"{name} {_short(value)}" if isinstance(value, (bool, int, float)) else name


def _short(value: Any) -> str:
    is_long = isinstance(value, int) and value.bit_length() > 128
    return "a number of more than 128 bits" if is_long else str(value)


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.floating)
