"""Inner loops of the planners: compiled where Numba is installed, plain Python where it is not, with the same result.

The same source runs both ways: 64-bit integers, and floats added in a fixed order, so a host with Numba and one without
it make the same plan.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

try:
    HAS_NUMBA = find_spec("numba") is not None
except ValueError:  # a stand-in that says it is not there
    HAS_NUMBA = False

_P = ParamSpec("_P")
_T = TypeVar("_T")


def compiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: compile with Numba at the first call, and keep the machine code on disk where that can be.

    Compiled functions release the GIL.
    """
    if not HAS_NUMBA:
        return function
    from numba import njit

    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nowhere to write
        return njit(nogil=True)(function)
