"""Checks that both model configurations make."""

from collections.abc import Mapping

COMPUTE_DTYPES = ("bfloat16", "float32")


def check_positive(owner: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError naming the first size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{owner}: {name} must be at least 1; got {name}={value}. Give a positive size.")


def check_heads(owner: str, width: int, num_heads: int) -> None:
    """Raises ValueError unless heads of an even size divide the width."""
    if width % num_heads or (width // num_heads) % 2:
        raise ValueError(
            f"{owner}: width / num_heads must be an even whole number; got width={width}, "
            f"num_heads={num_heads}. Change one of them."
        )


def check_compute_dtype(owner: str, compute_dtype: str) -> None:
    """Raises ValueError for a dtype that the models do not compute in."""
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"{owner}: compute_dtype must be one of {', '.join(COMPUTE_DTYPES)}; got "
            f"compute_dtype={compute_dtype!r}. Parameters are float32 either way."
        )
