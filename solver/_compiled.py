"""Inner loops of the planners: compiled where Numba is installed, plain Python where it is not, with the same result.

The same source runs both ways: 64-bit integers, and floats added in a fixed order, so a host with Numba and one without
it make the same plan.
"""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

try:
    from numba import njit
except ImportError as error:
    HAS_NUMBA = False
    if not isinstance(error, ModuleNotFoundError):
        logging.getLogger(__name__).warning("plans are made without Numba, which cannot be loaded: %s", error)
else:
    HAS_NUMBA = True

_P = ParamSpec("_P")
_T = TypeVar("_T")


def compiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: compile with Numba at the first call, and keep the machine code on disk where that can be.

    Compiled functions release the GIL.
    """
    if not HAS_NUMBA:
        return function
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nowhere to write
        return njit(nogil=True)(function)
