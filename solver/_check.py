"""What callers may give: checks that name the rule, the value and the way out, before any work."""

import math
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

# Tables of who sends what to whom have num_devices^2 entries: half a GB of them.
MOST_DEVICES = 1 << 13
MOST_HEADS = 1 << 16
# Rows and tokens are int32 on the devices.
INT32_MAX = int(np.iinfo(np.int32).max)


def integer(caller: str, name: str, value: Any, *, most: int, least: int = 1, advice: str) -> int:
    """The value as a Python integer (NumPy's would make compiled loops be compiled again).

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is below `least` or above `most`.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{caller}: {name} is an integer; got {_seen(value)}. {advice}")
    if value < least:
        raise ValueError(f"{caller}: {name} >= {least}; got {name}={_short(value)}. {advice}")
    if value > most:
        raise ValueError(f"{caller}: {name} <= {most}; got {name}={_short(value)}. {advice}")
    return int(value)


def number(caller: str, name: str, value: Any, *, advice: str) -> float:
    """The value as a Python float.

    Raises:
        TypeError: if it is no real number.
    """
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not real:
        raise TypeError(f"{caller}: {name} is a number; got {_seen(value)}. {advice}")
    try:
        return float(value)
    except OverflowError:  # an integer past float64
        return math.inf if value > 0 else -math.inf


def flag(caller: str, name: str, value: Any, *, advice: str) -> bool:
    """The value as a Python bool.

    Raises:
        TypeError: if it is none.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{caller}: {name} is True or False; got {_seen(value)}. {advice}")
    return bool(value)


def instance(caller: str, name: str, value: Any, kind: type, *, advice: str) -> None:
    """Raises TypeError if the value is of another kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{caller}: {name} is a {kind.__name__}; got {_seen(value)}. {advice}")


def _short(value: Any) -> str:
    return str(value) if abs(int(value)).bit_length() <= 64 else "a number of more than 64 bits"


def _seen(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} {value}" if isinstance(value, (bool, float)) else kind


def integers(
    caller: str, name: str, values: ArrayLike, *, most: int, each: str = "sequence", advice: str
) -> Int[np.ndarray, " n"]:
    """The values as an int64 array of one dimension.

    Raises:
        ValueError: if they are not integers in 0..most, one for each `each`.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{caller}: {name} has no mask; got a masked array. Give its compressed().")
    if isinstance(values, list | tuple) and {bool, np.bool_} & set(map(type, values)):
        raise ValueError(f"{caller}: {name} are integers; got a bool. Convert them, rounding as you mean.")
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of lists of several lengths
        raise ValueError(
            f"{caller}: {name} is one-dimensional; got entries of different shapes. One entry per {each}."
        ) from error
    if array.ndim != 1:
        found = f"shape {array.shape}" if array.ndim else _seen(values)
        raise ValueError(f"{caller}: {name} is one-dimensional; got {found}. One entry per {each}.")
    if array.size and array.dtype.kind not in "iu":
        listed: Any = values
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in listed):
            raise ValueError(
                f"{caller}: {name} are integers; got dtype={array.dtype}. Convert them, rounding as you mean."
            )
        array = np.array(listed, object)  # past 64 bits, where NumPy makes floats of them
    bad = np.flatnonzero((array < 0) | (array > most))
    if len(bad):
        raise ValueError(
            f"{caller}: {name} in 0..{most}; got {name}={_short(array[bad[0]])} at {each} {bad[0]}. {advice}"
        )
    return array.astype(np.int64)
