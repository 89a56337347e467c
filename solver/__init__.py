"""Host-side planning with NumPy alone: what a sequence costs, and where its tokens and attention go.

`balance` spreads the sequences of a step over devices and returns a `BalancePlan`. `StepLayout` says where its rows
lie, `capacity_for` sizes a program for it, and `step_tables` makes the arrays that `parallel` runs it by; `pack_home`
and `unpack_home` lay rows out for it and read them back.
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
from solver._step_time import Links as Links
from solver._step_time import StepSeconds as StepSeconds
from solver._tables import AttentionTables as AttentionTables
from solver._tables import ExchangeTables as ExchangeTables
from solver._tables import StepTables as StepTables
from solver._tables import step_tables as step_tables
from solver._topology import Topology as Topology

__all__ = [
    "AttentionTables",
    "BagLayout",
    "BagSpec",
    "BalancePlan",
    "BalanceProblem",
    "Bound",
    "Certificate",
    "CostModel",
    "ExchangeTables",
    "Links",
    "RouteCapacity",
    "StepCapacity",
    "StepLayout",
    "StepSeconds",
    "StepTables",
    "Topology",
    "balance",
    "capacity_for",
    "pack_home",
    "parse_bags",
    "plan_from_slices",
    "step_needs",
    "step_tables",
    "unpack_home",
    "validate_plan",
]
