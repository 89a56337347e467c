"""The engine's compiled programs and layouts, for tools that compile or measure them by themselves."""

from ._packed_layout import PackedLayout as PackedLayout
from ._packed_layout import PackedTables as PackedTables
from ._program import Batch as Batch
from ._program import EvaluationInputs as EvaluationInputs
from ._program import Layout as Layout
from ._program import SamplingState as SamplingState
from ._program import make_evaluation as make_evaluation
from ._program import make_home as make_home
from ._program import make_start as make_start
from ._sequence_layout import SequenceLayout as SequenceLayout

__all__ = [
    "Batch",
    "EvaluationInputs",
    "Layout",
    "PackedLayout",
    "PackedTables",
    "SamplingState",
    "SequenceLayout",
    "make_evaluation",
    "make_home",
    "make_start",
]
