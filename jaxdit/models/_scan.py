"""The default way to run a stack of layers: one scan, rematerialised by a policy with a name."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ._rows import LayerScan

__all__ = ["ATTENTION_NAME", "REMAT_POLICIES", "run_first_layer", "run_layers", "scan_layers"]

ATTENTION_NAME = "attention"
"""`checkpoint_name` of attention outputs in the models. An attention whose backward needs more than its
output (log-sum-exp, exchanged q, k, v) can give its residuals the same name to have them kept too."""

_cp = jax.checkpoint_policies

REMAT_POLICIES = MappingProxyType(
    {
        # Keep everything: fastest, activations of every layer stay in memory.
        "none": _cp.everything_saveable,
        # Keep layer inputs only: about a third more FLOP, least memory.
        "full": _cp.nothing_saveable,
        # Keep results of matrix products, recompute what is elementwise.
        "dots": _cp.dots_saveable,
        # As "dots", but not batched products (the dense attention's scores).
        "dots_no_batch": _cp.dots_with_no_batch_dims_saveable,
        # Keep attention, so that its communication and quadratic work are not repeated.
        "attention": _cp.save_only_these_names(ATTENTION_NAME),
        # Linear products and attention kept.
        "dots_no_batch+attention": _cp.save_from_both_policies(
            _cp.dots_with_no_batch_dims_saveable, _cp.save_only_these_names(ATTENTION_NAME)
        ),
    }
)


def name_attention(out: jax.Array) -> jax.Array:
    """Marks an attention output for the policies that keep it."""
    return checkpoint_name(out, ATTENTION_NAME)


def scan_layers(policy: str = "none", *, unroll: int = 1) -> LayerScan:
    """Makes the `layer_scan` that runs layers by `lax.scan` with a rematerialisation policy.

    Args:
        policy: a name in `REMAT_POLICIES`.
        unroll: layers per iteration of the loop; compile time grows with it.

    Returns:
        `layer_scan(fn, stacked_params, carry, consts) -> carry`.

    Raises:
        ValueError: for an unknown policy or an `unroll` below 1.
    """
    if policy not in REMAT_POLICIES:
        raise ValueError(
            f"scan_layers: policy must be one of {', '.join(REMAT_POLICIES)}; got policy={policy!r}. "
            "Use 'full' for least memory, 'none' for least work."
        )
    if unroll < 1:
        raise ValueError(f"scan_layers: unroll must be at least 1; got unroll={unroll}. Leave it out for 1.")

    def layer_scan(fn: Callable[[Any, Any, Any], Any], stacked_params: Any, carry: Any, consts: Any) -> Any:
        if policy != "none":
            # The loop already keeps XLA from merging the recomputation with the first computation.
            fn = jax.checkpoint(fn, policy=REMAT_POLICIES[policy], prevent_cse=False)

        def body(carry: Any, layer_params: Any) -> tuple[Any, None]:
            return fn(layer_params, carry, consts), None

        return jax.lax.scan(body, carry, stacked_params, unroll=unroll)[0]

    return layer_scan


def run_layers(
    layer_scan: LayerScan, blocks: Any, apply: Callable[[Any, Any, Any], Any], carry: Any, consts: Any
) -> Any:
    """Runs stacked modules by `layer_scan`, each as `carry = apply(block, carry, consts)`.

    Modules become plain nested dicts of arrays here, so a scan (or an FSDP version of it) needs no Flax.
    """
    graph, state = nnx.split(blocks)

    def layer(params: Any, carry: Any, consts: Any) -> Any:
        return apply(nnx.merge(graph, params), carry, consts)

    return layer_scan(layer, nnx.to_pure_dict(state), carry, consts)


def run_first_layer(
    layer_scan: LayerScan, blocks: Any, apply: Callable[[Any, Any, Any], Any], carry: Any, consts: Any
) -> Any:
    """`run_layers` with the first of the stacked modules alone, however their parameters lie."""
    graph, state = nnx.split(blocks)
    return run_layers(
        layer_scan, nnx.merge(graph, jax.tree.map(lambda x: x[:1], state)), apply, carry, consts
    )
