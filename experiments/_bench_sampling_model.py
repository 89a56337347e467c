"""What `bench_sampling` samples: an MMDiT of random weights behind `jaxdit.sampling.Pipeline`; rows are not decoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, UInt8

from jaxdit.encoders import Grid
from jaxdit.models import MMDiT, MMDiTConfig
from jaxdit.sampling import Backbone, Conditions, Request, ShardedModule, TextDenoiser, with_defaults
from jaxdit.schedulers import FlowTimes, Scheduler

_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """What is measured.

    Attributes:
        grids: heights and widths in tokens of the pictures.
        mixed: heights and widths of a batch of several.
        text: tokens of every caption.
        width, num_heads, blocks: of the model: as many double as single blocks.
        evaluations: of the denoiser in a round, of which the first two are not counted.
        rounds: measurements of each program.
    """

    grids: tuple[tuple[int, int], ...] = ((16, 32), (32, 48), (48, 64))
    mixed: tuple[tuple[int, int], ...] = ((48, 64), (32, 48), (16, 32), (24, 16), (16, 8), (8, 16))
    text: int = 64
    width: int = 256
    num_heads: int = 8
    blocks: int = 2
    evaluations: int = 5
    rounds: int = 3


QUICK = BenchSizes(
    grids=((4, 4), (6, 8)),
    mixed=((6, 8), (4, 4), (2, 2)),
    text=8,
    width=64,
    num_heads=4,
    blocks=1,
    evaluations=3,
    rounds=1,
)


class BenchPipeline:
    """See `jaxdit.sampling.Pipeline`; a token is a pixel. Every device has all parameters.

    Args:
        sizes: of the model and its text.
    """

    def __init__(self, sizes: BenchSizes) -> None:
        self._sizes = sizes
        head_dim = sizes.width // sizes.num_heads
        self.config = MMDiTConfig(
            in_channels=_CHANNELS,
            text_channels=32,
            pooled_channels=16,
            width=sizes.width,
            num_heads=sizes.num_heads,
            num_double_blocks=sizes.blocks,
            num_single_blocks=sizes.blocks,
            axes_dim=(head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8),
            compute_dtype="float32",
        )
        module = nnx.eval_shape(self._made)
        self.backbone = Backbone(ShardedModule(module, jnp.float32, "one"), TextDenoiser())
        self.scheduler = Scheduler(FlowTimes())
        self.channels = _CHANNELS
        self.num_heads, self.head_dim = sizes.num_heads, head_dim
        self.largest_tokens = max(height * width for height, width in sizes.grids)

    def _made(self) -> nnx.Module:
        return MMDiT(self.config, rngs=nnx.Rngs(0))

    @cached_property
    def _params(self) -> Any:
        return nnx.to_pure_dict(nnx.state(self._made(), nnx.Param))

    def params(self, shardings: Any) -> Any:
        """Of the model."""
        return jax.device_put(self._params, shardings)

    def checked(self, request: Request) -> Request:
        """With as many steps as evaluations are measured; with guidance where `true_guidance` asks for it."""
        return with_defaults(request, steps=self._sizes.evaluations, guidance=request.true_guidance)

    def grid(self, request: Request) -> Grid:
        """A token for each pixel."""
        return Grid(request.frames, request.height, request.width)

    def is_guided(self, request: Request) -> bool:
        """Whether there are two branches."""
        return request.true_guidance != 1

    def conditions(self, requests: Sequence[Request], *, is_guided: bool) -> Conditions:
        """Random captions."""
        rng, shape = np.random.default_rng(0), (1 + is_guided, len(requests))
        text = rng.standard_normal((*shape, self._sizes.text, self.config.text_channels), np.float32)
        pooled = rng.standard_normal((*shape, self.config.pooled_channels), np.float32)
        lengths = np.full(shape, self._sizes.text, np.int32)
        return Conditions(text, lengths, pooled, None, None, np.full(len(requests), 2.0, np.float32))

    def decode(self, rows: Float[np.ndarray, "n c"], grid: Grid) -> UInt8[np.ndarray, "t h w 3"]:
        """Nothing to look at."""
        return np.zeros((*grid, 3), np.uint8)

    def about(self, request: Request) -> dict[str, Any]:
        """Nothing."""
        return {}


def request_of(grid: tuple[int, int], *, guided: bool = False, number: int = 0) -> Request:
    """A picture of so many tokens."""
    return Request("", *grid, true_guidance=2.0 if guided else 1.0, number=number)
