"""Stateless hashing: the same value for the same coordinates, on every process and in any order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float64, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mix(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014); arithmetic wraps modulo 2^64."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


def hash_uniform(seed: int, *coordinates: np.ndarray) -> Float64[np.ndarray, " n"]:
    """Numbers in [0, 1) that depend on (seed, coordinates) only; coordinates are integer arrays (n,)."""
    state = np.full(coordinates[0].shape, seed % 2**64, np.uint64)
    for coordinate in coordinates:
        state = _mix(state ^ _mix(coordinate.astype(np.uint64)))
    # 53 bits: what a float64 holds exactly.
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


def name_uniform(seed: int, name: str) -> float:
    """A number in [0, 1) that depends on (seed, name) only."""
    raw = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") / 2.0**64


def digest_of(parts: Iterable[str | bytes]) -> str:
    """Hex digest of a sequence of strings; lengths are hashed too, so parts cannot run into one another."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.hexdigest()
