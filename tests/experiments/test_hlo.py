"""The accounting of compiled programs, on small ones whose sums are done by hand.

tests/data/hlo/*.hlo are programs for 2 machines of 4 H100, recorded by record.py there: 256 rows a device, width 512.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from experiments.hlo import (
    Traffic,
    WorkCounter,
    attention_rules,
    count_executions,
    find_collectives,
    model_step,
    parse_buffers,
    parse_module,
    peak_buffers,
)
from experiments.hlo._groups import all_to_all_traffic, permute_traffic, replica_groups, ring_traffic
from experiments.hlo._text import Instruction

DATA = Path(__file__).parents[1] / "data" / "hlo"
BLOCK_BYTES = 256 * 512 * 2


class Recorded:
    def __init__(self, name, trips=1.0, **options):
        self.module = parse_module((DATA / f"{name}.hlo").read_text())
        self.executions = count_executions(self.module, data_dependent_trips=trips)
        self.counter = WorkCounter(self.module, data_dependent_trips=trips)
        self.collectives = find_collectives(
            self.module, self.executions, self.counter, per_machine=4, **options
        )

    def of_kind(self, kind):
        return [c for c in self.collectives if c.kind == kind]


def test_bytes_of_an_all_to_all():
    (exchange,) = Recorded("all_to_all").collectives
    assert (exchange.kind, exchange.executions, exchange.group_size) == ("all-to-all", 1, 8)
    assert exchange.num_bytes == BLOCK_BYTES
    # Each of 8 parts goes to one device: itself, 3 of the same machine, 4 of the other.
    assert exchange.traffic == Traffic(3 * BLOCK_BYTES / 8, 4 * BLOCK_BYTES / 8)
    assert not exchange.is_upper_bound
    assert not exchange.is_overlapped
    assert exchange.num_under == 0


def test_bytes_of_a_ring_and_the_turns_of_its_loop():
    recorded = Recorded("ring")
    (permute,) = recorded.collectives
    assert (permute.kind, permute.executions, permute.num_bytes) == ("collective-permute", 7, BLOCK_BYTES)
    # Of 8 edges, 3 to 4 and 7 to 0 leave a machine.
    assert permute.traffic == Traffic(BLOCK_BYTES * 6 / 8, BLOCK_BYTES * 2 / 8)
    product = 2 * 256 * 256 * 512
    assert permute.under.total_flops == product
    assert permute.is_overlapped
    assert recorded.counter.of_program().flops == {"bf16": 7 * product}


def test_bytes_of_a_ragged_exchange_are_an_upper_bound():
    (exchange,) = Recorded("ragged").collectives
    assert exchange.is_upper_bound
    assert exchange.num_bytes == BLOCK_BYTES  # offsets and sizes do not travel
    assert exchange.traffic.inside == pytest.approx(BLOCK_BYTES * 3 / 7)
    assert exchange.traffic.across == pytest.approx(BLOCK_BYTES * 4 / 7)
    assert exchange.expected == exchange.traffic
    (planned,) = Recorded("ragged", ragged_shares=(0.25, 0.0)).collectives
    assert planned.traffic == exchange.traffic
    assert planned.expected == Traffic(BLOCK_BYTES / 4, 0.0)


LAYER = 2 * 512 * 1024  # parameters of a layer


def test_bytes_of_sharded_layers():
    recorded = Recorded("fsdp")
    gathers = [c for c in recorded.of_kind("all-gather") if c.executions == 6]
    scatters = [c for c in recorded.of_kind("reduce-scatter") if c.executions == 6]
    # Forward and backward gathers in bfloat16, reduce-scatters in float32; two parameters, which may travel together.
    for members, total in ((gathers, 2 * 2 * LAYER), (scatters, 4 * LAYER)):
        assert sum(c.num_bytes for c in members) == total
        # A ring of 8: 7/8 of the bytes over every edge, and of 8 edges 2 leave a machine.
        assert sum(c.traffic.inside for c in members) == total * 7 / 8 * 6 / 8
        assert sum(c.traffic.across for c in members) == total * 7 / 8 * 2 / 8
    # Of each layer, 2 products forward, the first again, and 4 backward.
    assert recorded.counter.of_program().flops == {"bf16": 6 * 7 * 2 * 256 * 512 * 1024}


def test_overlap_present():
    recorded = Recorded("fsdp")
    in_loops = [c for c in recorded.collectives if c.executions == 6]
    assert [c.kind for c in in_loops].count("all-gather") == 2
    assert [c.kind for c in in_loops].count("reduce-scatter") == 1
    assert all(c.num_arrays == 2 for c in in_loops)
    assert all(c.is_overlapped and c.is_matched for c in in_loops)
    product = 2 * 256 * 512 * 1024
    assert min(c.under.total_flops for c in in_loops) >= product


def test_overlap_absent():
    recorded = Recorded("fsdp_plain")
    (gather,) = recorded.of_kind("all-gather")
    assert (gather.executions, gather.num_bytes) == (6, 2 * LAYER)
    assert not gather.is_overlapped
    assert gather.under.total_flops == 0
    assert recorded.counter.of_program().flops == {"bf16": 6 * 2 * 2 * 256 * 512 * 1024}


def test_loops_whose_turns_depend_on_data():
    recorded = Recorded("data_dependent", trips=8)
    assert len(recorded.executions.data_dependent) == 1
    assert recorded.counter.of_program().flops == {"bf16": 5 * (1 + 8) * 2 * 256**3}


def test_a_program_compiled_for_cpu():
    def twice_nested(x):
        inner = lambda y, _: (jnp.tanh(y @ y), None)  # noqa: E731
        return lax.scan(lambda y, _: (lax.scan(inner, y, None, 3)[0], None), x, None, 4)[0]

    text = jax.jit(twice_nested).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile().as_text()
    module = parse_module(text)
    assert WorkCounter(module).of_program().flops == {"f32": 12 * 2 * 64**3}


UNKNOWN_KERNEL = """HloModule m, is_scheduled=true, num_partitions=1
ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %k = f32[8,8]{1,0} custom-call(%a), custom_call_target="a_kernel"
  ROOT %c = f32[8,8]{1,0} custom-call(%k), custom_call_target="a_kernel"
}
"""


def test_custom_calls_are_counted_by_rule_or_said_to_be_unknown():
    module = parse_module(UNKNOWN_KERNEL)
    work = WorkCounter(module).of_program()
    assert work.unknown == {"a_kernel": 2}
    assert work.flops == {}
    rules = {"a_kernel": lambda computation, instruction: 10.0}
    work = WorkCounter(module, rules=rules).of_program()
    assert work.unknown == {}
    assert work.flops == {"f32": 20.0}
    # Reads and writes of both calls.
    assert work.num_bytes == 4 * 256


@pytest.mark.parametrize(
    ("kernel", "products", "more"),
    [("forward", 2, "%k"), ("grad_queries", 3, "%q, %k"), ("grad_keys", 4, "%q, %k"), ("other", None, "%k")],
)
def test_work_of_the_attention_kernels(kernel, products, more):
    """By hand: products of 2 x 64 channels for each of 4,096 queries and the 300 keys that it meets."""
    attributes = (
        f'custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="f/packed_attention_{kernel}/pallas_call"}},'
        ' backend_config={debug = false, grid_x = 32 : i32, ir = "ML"}'
    )
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (visits: s32[32,5], q: bf16[4096,64], k: bf16[2048,64]) -> bf16[4096,64] {{
  %visits = s32[32,5]{{1,0}} parameter(0)
  %q = bf16[4096,64]{{1,0}} parameter(1)
  %k = bf16[2048,64]{{1,0}} parameter(2)
  ROOT %call = bf16[4096,64]{{1,0}} custom-call(%visits, %q, {more}), {attributes}
}}
"""
    work = WorkCounter(parse_module(text), rules=attention_rules(300.0)).of_program()
    if products is None:
        assert work.unknown == {"__gpu$xla.gpu.triton": 1.0}
    else:
        assert work.flops == {"bf16": products * 2 * 64 * 4096 * 300}
        assert not work.unknown


def test_a_slice_reads_what_it_returns():
    module = parse_module("""HloModule m, is_scheduled=true, num_partitions=1
%fused (stack: f32[10,64], i: s32[]) -> f32[1,64] {
  %stack = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,64]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,64}
}
ENTRY %main (s: f32[10,64], j: s32[]) -> f32[1,64] {
  %s = f32[10,64]{1,0} parameter(0)
  %j = s32[] parameter(1)
  ROOT %f = f32[1,64]{1,0} fusion(%s, %j), kind=kLoop, calls=%fused
}
""")
    assert WorkCounter(module).of_program().num_bytes == 64 * 4 + 4 + 64 * 4


def test_groups_in_both_notations():
    def groups(text):
        return replica_groups(Instruction("x", "all-gather", (), (), text), 8)

    assert groups("replica_groups={{0,1},{2,3}}, dimensions={0}") == ((0, 1), (2, 3))
    assert groups("replica_groups=[2,4]<=[8], dimensions={0}") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups("replica_groups=[4,2]<=[2,4]T(1,0)") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups("replica_groups={}") == (tuple(range(8)),)


def test_traffic_of_groups_inside_machines():
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ring_traffic(800, groups, 8, 4) == Traffic(600, 0)
    assert all_to_all_traffic(800, groups, 8, 4) == Traffic(600, 0)
    across = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert ring_traffic(800, across, 8, 4) == Traffic(0, 400)
    assert permute_traffic(800, [(0, 0), (1, 2), (3, 4)], 8, 4) == Traffic(100, 100)
    assert ring_traffic(800, ((0,), (1,)), 2, 1) == Traffic(0, 0)


def test_a_program_that_is_not_scheduled_says_nothing_of_overlap():
    module = parse_module(UNKNOWN_KERNEL.replace("is_scheduled=true, ", ""))
    with pytest.raises(ValueError, match="must be scheduled"):
        find_collectives(module, count_executions(module), WorkCounter(module), per_machine=1)


def test_text_without_a_program():
    with pytest.raises(ValueError, match="with an entry"):
        parse_module("HloModule m\n")


class Speeds:
    memory_speed, nvlink, network = 1e12, 1e9, 1e8

    def flop_speed(self, dtype):
        return 1e12


def test_modelled_time_waits_for_what_nothing_is_scheduled_under():
    recorded = Recorded("all_to_all")
    step = model_step(recorded.module, recorded.collectives, recorded.counter, Speeds())
    # Across machines it takes longest: half of the block at 100 MB/s.
    assert step.total_s == pytest.approx(BLOCK_BYTES / 2 / 1e8)
    assert step.waiting_s == {"all-to-all-start": step.total_s}
    assert step.compute_s == 0


def test_modelled_time_hides_what_compute_is_scheduled_under():
    recorded = Recorded("ring")
    fast = Speeds()
    fast.nvlink = fast.network = 1e15
    step = model_step(recorded.module, recorded.collectives, recorded.counter, fast)
    assert step.total_s == pytest.approx(step.compute_s, rel=1e-3)
    slow = model_step(recorded.module, recorded.collectives, recorded.counter, Speeds())
    # Across machines it takes longest: a quarter of the block at 100 MB/s.
    assert slow.total_s == pytest.approx(7 * BLOCK_BYTES * 2 / 8 / 1e8, rel=0.01)


ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}:
 value: <1 a @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 900, preallocated-temp:
 value: <2 b @0> (size=400,offset=0): f32[100]{0}
 value: <3 c{0} @0> (size=400,offset=400): f32[10,10]{1,0}
 value: <4 d (phi) @0> (size=400,offset=400): f32[10,10]{1,0}
 value: <5 e @0> (size=100,offset=800): s8[100]{0}
"""
LIFETIMES = """HloLiveRange (max 9):
  BufferLiveRange:
    b{}:1-3
    c{0}:2-4
    d{}:4-6
    e{}:7-8
"""


def test_temporaries_at_the_peak():
    buffers = parse_buffers(ASSIGNMENT, LIFETIMES)
    assert [b.name for b in buffers] == ["b", "c{0}", "d", "e"]
    peak = peak_buffers(buffers)
    assert {b.instruction for b in peak} == {"b", "c"}
    assert sum(b.num_bytes for b in peak) == 800
    assert peak[0].shape.dims in ((100,), (10, 10))
    assert peak_buffers([]) == []
