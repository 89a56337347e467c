"""Collectives and attention for packed, unevenly distributed sequences, to call inside `shard_map`.

Nothing here knows about models: layouts come in as plain integer arrays (made by `solver`), rows as JAX arrays.
"""

from parallel._balanced_attention import AttentionLayout as AttentionLayout
from parallel._balanced_attention import balanced_attention as balanced_attention
from parallel._balanced_attention import expand_attention as expand_attention
from parallel._balanced_attention import make_balanced_attention as make_balanced_attention
from parallel._exchange import Route as Route
from parallel._exchange import exchange as exchange
from parallel._exchange import expand_route as expand_route
from parallel._packed_attention import PackedKernel as PackedKernel
from parallel._packed_attention import PackedOutput as PackedOutput
from parallel._packed_attention import PackedSegments as PackedSegments
from parallel._packed_attention import XlaKernel as XlaKernel
from parallel._packed_attention import packed_attention as packed_attention

__all__ = [
    "AttentionLayout",
    "PackedKernel",
    "PackedOutput",
    "PackedSegments",
    "Route",
    "XlaKernel",
    "balanced_attention",
    "exchange",
    "expand_attention",
    "expand_route",
    "make_balanced_attention",
    "packed_attention",
]
