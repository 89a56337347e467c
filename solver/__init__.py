"""Host-side planning with NumPy alone: what a sequence costs, and where its tokens and attention go.

`balance` spreads the sequences of a step over devices and returns a `BalancePlan`. `StepLayout` says where its rows
lie, `capacity_for` sizes a program for it, and `step_tables` makes the arrays that `parallel` runs it by; `pack_home`
and `unpack_home` lay rows out for it and read them back. `plan_sequence_parallel` spreads one long sequence.
"""

from solver._bags import BagLayout as BagLayout
from solver._bags import BagSpec as BagSpec
from solver._bags import parse_bags as parse_bags
from solver._balance import balance as balance
from solver._capacity import RouteCapacity as RouteCapacity
from solver._capacity import StepCapacity as StepCapacity
from solver._capacity import capacity_for as capacity_for
from solver._capacity import step_needs as step_needs
from solver._certificate import Bound as Bound
from solver._certificate import Certificate as Certificate
from solver._cost import CostModel as CostModel
from solver._home import pack_home as pack_home
from solver._home import unpack_home as unpack_home
from solver._layout import StepLayout as StepLayout
from solver._plan import BalancePlan as BalancePlan
from solver._plan import BalanceProblem as BalanceProblem
from solver._plan_check import validate_plan as validate_plan
from solver._plan_measure import plan_from_slices as plan_from_slices
from solver._sequence_algorithms import layer_timeline as layer_timeline
from solver._sequence_hardware import A100_MACHINE as A100_MACHINE
from solver._sequence_hardware import H100_MACHINE as H100_MACHINE
from solver._sequence_hardware import Link as Link
from solver._sequence_hardware import SequenceHardware as SequenceHardware
from solver._sequence_layer import SequenceMesh as SequenceMesh
from solver._sequence_layer import SequenceShape as SequenceShape
from solver._sequence_plan import SequenceParallelPlan as SequenceParallelPlan
from solver._sequence_plan import plan_sequence_parallel as plan_sequence_parallel
from solver._sequence_plan import sequence_plans as sequence_plans
from solver._sequence_timeline import TimelineEvent as TimelineEvent
from solver._step_time import Links as Links
from solver._step_time import StepSeconds as StepSeconds
from solver._tables import AttentionTables as AttentionTables
from solver._tables import ExchangeTables as ExchangeTables
from solver._tables import StepTables as StepTables
from solver._tables import step_tables as step_tables
from solver._topology import Topology as Topology

__all__ = [
    "A100_MACHINE",
    "H100_MACHINE",
    "AttentionTables",
    "BagLayout",
    "BagSpec",
    "BalancePlan",
    "BalanceProblem",
    "Bound",
    "Certificate",
    "CostModel",
    "ExchangeTables",
    "Link",
    "Links",
    "RouteCapacity",
    "SequenceHardware",
    "SequenceMesh",
    "SequenceParallelPlan",
    "SequenceShape",
    "StepCapacity",
    "StepLayout",
    "StepSeconds",
    "StepTables",
    "TimelineEvent",
    "Topology",
    "balance",
    "capacity_for",
    "layer_timeline",
    "pack_home",
    "parse_bags",
    "plan_from_slices",
    "plan_sequence_parallel",
    "sequence_plans",
    "step_needs",
    "step_tables",
    "unpack_home",
    "validate_plan",
]
