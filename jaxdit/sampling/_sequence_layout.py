"""Requests of one size, each divided among all devices: sequence-parallel attention, as planned."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from parallel import RING_AXES, SEQUENCE_DATA_AXIS, ULYSSES_AXES

from ._backbone import Evaluate
from ._denoiser import Conditions, DenoiserRows
from ._home import HomeRows, positions
from ._step_cache import CacheState

SEQUENCE_AXES = (*RING_AXES, *ULYSSES_AXES)


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Rows of a device are an equal part of every request's image tokens, filled up, one request after another.

    With branches apart the mesh's data axis has two halves, one for each branch of guidance, with the same latents.

    Attributes:
        mesh: from `parallel.sequence_mesh`; its data axis has size 1, or 2 for branches apart.
        attend: attention of (b, l_loc, h, d) with `segment_ids`.
        image, text: tokens of a request on a device.
        requests: requests.
        branches: of guidance.
        is_exact: whether nothing is filled up.
    """

    mesh: Mesh
    attend: Callable[..., Array]
    image: int
    text: int
    requests: int
    branches: int
    is_exact: bool

    @property
    def are_branches_apart(self) -> bool:
        """Whether a half of the devices computes each branch."""
        return self.mesh.shape[SEQUENCE_DATA_AXIS] == 2

    @property
    def rows(self) -> int:
        """Rows of a device."""
        return self.requests * self.image

    @property
    def sequences(self) -> int:
        """Sequences that a device evaluates: a half of the devices all of one branch, or all of them those of all."""
        return self.requests if self.are_branches_apart else self.branches * self.requests

    @property
    def evaluated_rows(self) -> int:
        """Image rows that a device evaluates."""
        return self.sequences * self.image

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which devices are numbered, all of them."""
        return SEQUENCE_DATA_AXIS, *SEQUENCE_AXES

    @property
    def table_specs(self) -> Any:
        """Partition specs of tables: there are none."""
        return None

    def home(self, grids: Int[Array, "r 3"], tables: None = None) -> HomeRows:
        """Inside `shard_map`: the rows here."""
        token = lax.axis_index(SEQUENCE_AXES) * self.image + jnp.arange(self.image, dtype=jnp.int32)
        tokens = jnp.broadcast_to(token, (self.requests, self.image))
        numbers = jnp.arange(1, self.requests + 1, dtype=jnp.int32)[:, None]
        request = jnp.where(tokens < grids.prod(1)[:, None], numbers, 0)
        return HomeRows(request.reshape(-1), tokens.reshape(-1))

    def predict(
        self,
        evaluate: Evaluate,
        x: Float[Array, "n c"],
        time: Float[Array, " r"],
        conditions: Conditions,
        grids: Int[Array, "r 3"],
        tables: None = None,
    ) -> tuple[Float[Array, "g n c"], CacheState | None]:
        """Inside `shard_map`: predictions of all branches for the rows here, and the step cache."""
        branches, sequences = self.sequences // self.requests, self.sequences
        if not self.are_branches_apart:
            given = conditions.flat()
        else:
            branch = lax.axis_index(SEQUENCE_DATA_AXIS)
            mine = jax.tree.map(
                lambda a: lax.dynamic_index_in_dim(a, branch, keepdims=False), conditions._replace(scale=None)
            )
            given = mine._replace(scale=conditions.scale)
        home = self.home(grids)
        # Sequence g * r of branch g and request r; a branch's rows follow those of the one before.
        first = self.requests * jnp.arange(branches, dtype=jnp.int32)[:, None]
        request = home.request[None]
        ids = jnp.where(request > 0, request + first, 0).reshape(-1)
        txt, txt_ids = self._text(given, sequences)
        attention = partial(self._attention, sequences=sequences, ids=(txt_ids, ids))
        rows = DenoiserRows(
            img=jnp.tile(x, (branches, 1)),
            img_ids=ids,
            img_positions=jnp.tile(positions(home, grids), (branches, 1)),
            txt=txt,
            txt_ids=txt_ids,
            time=jnp.tile(time, branches),
            conditions=given,
        )
        found, cache = evaluate(rows, attention)
        found = found.reshape(branches, *x.shape[:1], -1)
        if not self.are_branches_apart:
            return found, cache
        other = lax.ppermute(found[0], SEQUENCE_DATA_AXIS, [(0, 1), (1, 0)])
        both = jnp.stack([found[0], other])
        return jnp.where(branch == 0, both, both[::-1]), cache

    def _text(self, given: Conditions, sequences: int) -> tuple[Array | None, Array]:
        """Part of every sequence's text tokens, and the sequences that they are of."""
        if given.text is None or not self.text:
            channels = None if given.text is None else jnp.zeros((0, given.text.shape[-1]), given.text.dtype)
            return channels, jnp.zeros(0, jnp.int32)
        start = lax.axis_index(SEQUENCE_AXES) * self.text
        whole = self.text * lax.axis_size(SEQUENCE_AXES)
        text = jnp.pad(given.text, ((0, 0), (0, whole - given.text.shape[1]), (0, 0)))
        text = lax.dynamic_slice_in_dim(text, start, self.text, axis=1)
        token = start + jnp.arange(self.text, dtype=jnp.int32)
        numbers = jnp.arange(1, sequences + 1, dtype=jnp.int32)[:, None]
        ids = jnp.where(token[None] < given.text_lengths[:, None], numbers, 0)
        return text.reshape(-1, text.shape[-1]), ids.reshape(-1)

    def _attention(self, q: Array, k: Array, v: Array, *, sequences: int, ids: tuple[Array, Array]) -> Array:
        """Of packed rows [text; image] on this device, as (sequences, tokens, h, d)."""
        num_text = sequences * self.text

        def by_sequence(x: Array) -> Array:
            txt = x[:num_text].reshape(sequences, self.text, *x.shape[1:])
            img = x[num_text:].reshape(sequences, self.image, *x.shape[1:])
            return jnp.concatenate([txt, img], axis=1)

        mask = None if self.is_exact else jnp.minimum(by_sequence(jnp.concatenate(ids)), 1)
        out = self.attend(by_sequence(q), by_sequence(k), by_sequence(v), segment_ids=mask)
        txt, img = out[:, : self.text], out[:, self.text :]
        return jnp.concatenate([part.reshape(-1, *q.shape[1:]) for part in (txt, img)])
