"""Global arrays on the host, with one process or several."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["on_host"]


def on_host(x: jax.Array) -> np.ndarray:
    """The whole of a global array; with several processes all of them call it, and all get it."""
    if x.is_fully_addressable:
        return np.asarray(x)
    gathered: Any = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(gathered)
