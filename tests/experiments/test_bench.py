"""Benchmarks: what they feed to what they time, what they write, and a run of tiny sizes."""

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments._bench_batches import (
    fresh_joint,
    fresh_tails,
    random_data,
    random_lengths,
    recorded_steps,
    scaled_joint,
    tail_step,
)
from experiments._bench_compilations import Series, measure_growth
from experiments._bench_report import Times, markdown_table, paragraph, write_section
from experiments._bench_step import (
    NUM_DEVICES,
    WIDTHS,
    Stopwatch,
    Variant,
    make_program,
    with_equal_attention,
)
from experiments._feed import Planner
from experiments._program import UserError
from jaxdit.training import StepInputs
from parallel import DATA_AXES, data_mesh
from solver import AttentionTables, CostModel, StepTables


def run_bench(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def test_recorded_batches_keep_their_ranks_and_are_scaled_up():
    ranks = recorded_steps("joint")[0]
    index = scaled_joint(0)
    assert len(ranks) == 32
    assert index.num_sequences == sum(map(len, ranks))
    lengths = [length for rank in ranks for length in rank]
    assert np.all(index.lengths * 32 >= lengths)
    assert np.all((index.lengths - 1) * 32 < lengths)
    home = [rank // 4 for rank, sequences in enumerate(ranks) for _ in sequences]
    np.testing.assert_array_equal(index.home(8), home)
    np.testing.assert_array_equal(index.image_lengths + index.text_lengths, index.lengths)
    assert index.image_lengths.min() > 0


def test_fresh_batches_look_like_the_recorded_ones():
    fresh = fresh_joint(3)
    for index in fresh:
        assert index.num_sequences == scaled_joint(0).num_sequences
        assert abs(index.lengths.sum() / scaled_joint(0).lengths.sum() - 1) < 0.1
        assert np.all(index.text_lengths <= 12)
    assert not np.array_equal(fresh[0].lengths, fresh[1].lengths)


def test_tails_are_the_same_at_every_call_and_clipped():
    index = tail_step(1)
    np.testing.assert_array_equal(index.lengths, tail_step(1).lengths)
    assert index.num_sequences == 64
    np.testing.assert_array_equal(index.home(8), np.repeat(np.arange(8), 8))
    lengths = np.concatenate([one.lengths for one in fresh_tails(100)])
    assert lengths.min() == 2
    assert lengths.max() == 65_536 // 32
    assert abs(np.median(lengths) / (2000 / 32) - 1) < 0.05
    assert tail_step(1, 1).lengths.max() > 32 * (index.lengths.max() - 1)


def test_random_rows_have_the_lengths_of_the_index():
    data = random_data(scaled_joint(0), WIDTHS, num_devices=8)
    assert [len(rows) for rows in data.rows] == data.index.image_lengths.tolist()
    assert [len(rows) for rows in data.text] == data.index.text_lengths.tolist()


def test_random_lengths_add_up():
    lengths = random_lengths(16, 4096, least=200, most=4000, seed=0)
    assert len(lengths) == 16
    assert sum(lengths) == 4096
    assert min(lengths) > 0


def test_missing_recorded_batches_say_where_they_are(tmp_path):
    with pytest.raises(UserError, match="part of a checkout"):
        recorded_steps("joint", tmp_path / "balance.json.gz")


def equal_attention(ranges: np.ndarray, num_key_blocks: int) -> np.ndarray:
    """Ranges (devices, micro-batches, blocks, 2) after every device got as much as the fullest."""
    mesh = data_mesh(jax.devices()[: len(ranges)], shards=1)
    placed = jax.device_put(ranges.astype(np.int32), NamedSharding(mesh, P(DATA_AXES)))
    other = jnp.zeros((*ranges.shape[:2], num_key_blocks, 2), jnp.int32)
    unused: dict[str, Any] = dict.fromkeys(StepTables._fields)
    of_group: dict[str, Any] = dict.fromkeys(AttentionTables._fields)
    group = AttentionTables(**of_group)._replace(key_blocks=placed, query_blocks=other)
    tables = StepTables(**unused)._replace(attention=(group,))
    inputs = StepInputs(*([None] * 4))._replace(tables=tables)
    return np.asarray(with_equal_attention(inputs).tables.attention[0].key_blocks)


def test_every_device_gets_the_block_pairs_of_the_fullest():
    rng = np.random.default_rng(0)
    start = rng.integers(0, 2, (4, 2, 6))
    ranges = np.stack([start, start + rng.integers(0, 3, start.shape)], -1)
    ranges[0] = 0  # a device without attention
    ranges[1] = (1, 5)  # the fullest, but for the next line
    ranges[2, 1] = (0, 5)
    padded = equal_attention(ranges, num_key_blocks=6)
    pairs = (padded[..., 1] - padded[..., 0]).sum(-1)
    np.testing.assert_array_equal(pairs, [[24, 30]] * 4)
    assert padded.max() <= 6
    # Whatever was visited still is.
    np.testing.assert_array_equal(padded[..., 0], ranges[..., 0])
    assert np.all(padded[..., 1] >= ranges[..., 1])


@pytest.mark.full
def test_added_block_pairs_change_no_bit_of_a_step():
    program = make_program(1, 0)
    variant = Variant(program, "g1n8", [scaled_joint(0, 256)])
    watch = Stopwatch.start(program)
    start = jax.tree.map(np.asarray, watch.state)
    results = []
    for inputs in (variant.lending[0], variant.waiting[0]):
        state = jax.device_put(start, program.state_shardings())
        results.append(jax.tree.map(np.asarray, variant.step(state, inputs, watch.key)))
    jax.tree.map(np.testing.assert_array_equal, *results)
    pairs = np.asarray(variant.waiting[0].tables.attention[0].key_blocks)
    assert len(set((pairs[..., 1] - pairs[..., 0]).sum((1, 2)).tolist())) == 1


def test_growth_counts_programs_and_padding():
    cost = CostModel(width=64, gamma=0.4)
    planner = Planner(num_devices=NUM_DEVICES, num_heads=4, bags=None, cost=cost, block=64)
    indices = fresh_joint(4)
    same = measure_growth(Series("same", planner, indices[:1] * 4, ()), "g8n1", 3, (1,))
    assert same.programs == {1: 1}
    assert same.grown == []
    assert 0 < same.padded_tokens < 0.1
    assert 0 < same.padded_rows < 0.4
    assert 1 < same.computed_over_useful < 1.2
    assert same.rows_max_over_mean >= 1
    assert same.attention_max_over_mean >= 1
    assert same.blocks_over_useful > 1
    # A batch four times as long needs a larger program; one that is looked ahead at does not.
    longer = [*indices[:2], scaled_joint(0, 8), *indices[2:]]
    grown = measure_growth(Series("longer", planner, longer, ()), "g8n1", 3, (1, 3))
    assert grown.programs == {1: 2, 3: 1}


def test_sections_are_replaced_where_they_stand(tmp_path):
    path = tmp_path / "docs" / "benchmarks.md"
    write_section(path, "first", "one")
    write_section(path, "second", "two \\1")
    path.write_text(path.read_text() + "\nA note of one's own.\n")
    write_section(path, "first", "three")
    text = path.read_text()
    assert "one\n" not in text
    assert text.index("three") < text.index("two \\1") < text.index("A note")
    assert text.startswith("# Benchmarks")
    assert text.count("<!-- section") == text.count("<!-- end") == 2
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_tables_paragraphs_and_times():
    assert markdown_table(("a", "b"), [(1, 2)]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert paragraph("a\n    b", bullet=True) == "* a b"
    assert Times((3.0, 1.0, 2.0)).text() == "2.00 (1.00)"


def test_unknown_section_is_refused_at_once():
    done = run_bench("--only", "step,attentoin")
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: --only takes sections of step, attention, solver, compilations; got 'attentoin'.\n"
    )


def test_program_prints_and_writes_what_it_measures(tmp_path):
    out, figures = tmp_path / "benchmarks.md", tmp_path / "figures.json"
    done = run_bench("--quick", "--only", "solver", "--json", str(figures), "--out", str(out))
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert "<!-- section solver -->" in text
    assert "`python -m experiments.bench --only solver --quick`" in text
    assert done.stdout.strip() in text
    found = json.loads(figures.read_text())["solver"]
    assert {"plans", "auto", "conditions"} <= set(found)
    assert [entry["mix"] for entry in found["auto"]] == ["joint", "lowres", "mixres"]
    for entry in found["auto"]:
        assert entry["devices"] == 32
        assert 1 <= entry["static_step_cost"] < 1.02
        assert min(entry["plan_ms"]["samples"]) > 0
        assert min(entry["plain_ms"]["samples"]) > 0


@pytest.mark.full
def test_quick_run_measures_everything(tmp_path):
    figures = tmp_path / "figures.json"
    done = run_bench("--quick", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert list(found) == ["step", "attention", "solver", "compilations"]
    assert [row["bags"] for row in found["step"]["variants"]] == ["none", "g8n1", "auto"]
    for rows in found["step"]["auto"].values():
        assert [row["bags"] for row in rows] == ["none", "g8n1", "auto"]
        assert rows[-1]["over_auto"] == rows[-1]["predicted"] == rows[-1]["predicted_by_blocks"] == 1
        for row in rows:
            assert row["attention_over_useful"] >= row["blocks_over_useful"] >= 1
            assert row["linear_over_useful"] >= 1
            assert row["tokens_per_s"] > 0
    assert found["attention"]["largest_difference"] < 1e-5
    assert all(result["programs"] for result in found["compilations"]["results"])
