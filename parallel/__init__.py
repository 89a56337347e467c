"""Collectives and attention for packed, unevenly distributed sequences, to call inside `shard_map`.

Nothing here knows about models: layouts come in as plain integer arrays (made by `solver`), rows as JAX
arrays.
"""

from parallel._balanced_attention import AttentionLayout as AttentionLayout
from parallel._balanced_attention import HeadGroup as HeadGroup
from parallel._balanced_attention import TokenRoutes as TokenRoutes
from parallel._balanced_attention import balanced_attention as balanced_attention
from parallel._balanced_attention import expand_attention as expand_attention
from parallel._balanced_attention import expand_tokens as expand_tokens
from parallel._balanced_attention import make_balanced_attention as make_balanced_attention
from parallel._block_attention import Attended as Attended
from parallel._block_attention import BlockAttention as BlockAttention
from parallel._block_attention import BlockMask as BlockMask
from parallel._block_attention import DifferentiableAttention as DifferentiableAttention
from parallel._block_cudnn import CudnnBlockAttention as CudnnBlockAttention
from parallel._block_packed import PackedBlockAttention as PackedBlockAttention
from parallel._block_platform import PlatformBlockAttention as PlatformBlockAttention
from parallel._block_xla import XlaBlockAttention as XlaBlockAttention
from parallel._exchange import exchange as exchange
from parallel._fsdp import gather_leaf as gather_leaf
from parallel._fsdp import shard_axis as shard_axis
from parallel._fsdp import sharded_layer_scan as sharded_layer_scan
from parallel._mesh import DATA_AXES as DATA_AXES
from parallel._mesh import REPLICA_AXIS as REPLICA_AXIS
from parallel._mesh import SHARD_AXIS as SHARD_AXIS
from parallel._mesh import check_machines as check_machines
from parallel._mesh import data_mesh as data_mesh
from parallel._one_sided import one_sided_all_to_all as one_sided_all_to_all
from parallel._one_sided import one_sided_ring_attention as one_sided_ring_attention
from parallel._one_sided_puts import MosaicPuts as MosaicPuts
from parallel._one_sided_puts import Puts as Puts
from parallel._one_sided_puts import SimulatedPuts as SimulatedPuts
from parallel._online_softmax import Partial as Partial
from parallel._packed_attention import XlaKernel as XlaKernel
from parallel._packed_attention import packed_attention as packed_attention
from parallel._packed_segments import PackedKernel as PackedKernel
from parallel._packed_segments import PackedOutput as PackedOutput
from parallel._packed_segments import PackedSegments as PackedSegments
from parallel._pallas_attention import PallasKernel as PallasKernel
from parallel._ring_attention import ring_attention as ring_attention
from parallel._routes import Route as Route
from parallel._routes import expand_route as expand_route
from parallel._sequence_attention import sequence_attention as sequence_attention
from parallel._sequence_inputs import JointOutput as JointOutput
from parallel._sequence_inputs import ReplicatedText as ReplicatedText
from parallel._sequence_mesh import RING_AXES as RING_AXES
from parallel._sequence_mesh import SEQUENCE_DATA_AXIS as SEQUENCE_DATA_AXIS
from parallel._sequence_mesh import ULYSSES_AXES as ULYSSES_AXES
from parallel._sequence_mesh import Placement as Placement
from parallel._sequence_mesh import sequence_mesh as sequence_mesh
from parallel._sequence_padding import PaddedSequence as PaddedSequence
from parallel._sequence_padding import pad_sequence as pad_sequence
from parallel._sequence_padding import unpad_sequence as unpad_sequence
from parallel._tiles import KernelTiles as KernelTiles
from parallel._tiles import Tiles as Tiles
from parallel._torus_attention import torus_attention as torus_attention
from parallel._ulysses_attention import ulysses_attention as ulysses_attention
from parallel._ulysses_attention import usp_attention as usp_attention
from parallel._uniform_attention import uniform_attention as uniform_attention
from parallel._zero_copy import zero_copy_options as zero_copy_options

__all__ = [
    "DATA_AXES",
    "REPLICA_AXIS",
    "RING_AXES",
    "SEQUENCE_DATA_AXIS",
    "SHARD_AXIS",
    "ULYSSES_AXES",
    "Attended",
    "AttentionLayout",
    "BlockAttention",
    "BlockMask",
    "CudnnBlockAttention",
    "DifferentiableAttention",
    "HeadGroup",
    "JointOutput",
    "KernelTiles",
    "MosaicPuts",
    "PackedBlockAttention",
    "PackedKernel",
    "PackedOutput",
    "PackedSegments",
    "PaddedSequence",
    "PallasKernel",
    "Partial",
    "Placement",
    "PlatformBlockAttention",
    "Puts",
    "ReplicatedText",
    "Route",
    "SimulatedPuts",
    "Tiles",
    "TokenRoutes",
    "XlaBlockAttention",
    "XlaKernel",
    "balanced_attention",
    "check_machines",
    "data_mesh",
    "exchange",
    "expand_attention",
    "expand_route",
    "expand_tokens",
    "gather_leaf",
    "make_balanced_attention",
    "one_sided_all_to_all",
    "one_sided_ring_attention",
    "packed_attention",
    "pad_sequence",
    "ring_attention",
    "sequence_attention",
    "sequence_mesh",
    "shard_axis",
    "sharded_layer_scan",
    "torus_attention",
    "ulysses_attention",
    "uniform_attention",
    "unpad_sequence",
    "usp_attention",
    "zero_copy_options",
]
