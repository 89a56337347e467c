"""Accounting of compiled programs: what they compute, what they send, and what is scheduled under it."""

from experiments.hlo._buffers import Buffer as Buffer
from experiments.hlo._buffers import parse_buffers as parse_buffers
from experiments.hlo._buffers import peak_buffers as peak_buffers
from experiments.hlo._collectives import Collective as Collective
from experiments.hlo._collectives import find_collectives as find_collectives
from experiments.hlo._cost import Work as Work
from experiments.hlo._cost import WorkCounter as WorkCounter
from experiments.hlo._cost import attention_rules as attention_rules
from experiments.hlo._counts import Executions as Executions
from experiments.hlo._counts import count_executions as count_executions
from experiments.hlo._counts import trip_count as trip_count
from experiments.hlo._groups import Traffic as Traffic
from experiments.hlo._text import Module as Module
from experiments.hlo._text import parse_module as parse_module
from experiments.hlo._timeline import ModelledStep as ModelledStep
from experiments.hlo._timeline import collective_seconds as collective_seconds
from experiments.hlo._timeline import model_step as model_step
