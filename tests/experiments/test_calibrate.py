"""Calibration: the fits by known terms, the file and what a config makes of it, and a tiny run."""

import dataclasses
import json
import logging

import gin
import jax
import numpy as np
import pytest

from experiments import calibrate
from experiments._calibrate_cases import calibration_cases, random_cases
from experiments._calibrate_check import Checked, check_figures, planned_seconds
from experiments._calibrate_fit import Quality, TermsFit, Work, fit_terms, fit_two_columns
from experiments._calibrate_program import Bench, Case, busiest, model_config
from experiments._calibrate_settings import (
    DEFAULT_LENGTHS,
    DEFAULT_SHAPES,
    Requested,
    asked_shape,
    parse_lengths,
)
from experiments._calibration import BlockShape, load_calibration
from experiments._config import UserError, load_config, run_program
from experiments._platform import make_mesh
from experiments._run_planner import default_links, make_planner
from experiments._workdir import checked_settings
from solver import CostModel, Links, balance
from tests.experiments._program_cases import TINY

WIDTH = 64
LENGTHS = np.array([16, 32, 64, 128, 256, 512])
SHAPE = BlockShape(32, 2, "float32", block=16, text=4, double_blocks=0, single_blocks=1)
TINY_FLAGS = ("--width=32", "--num-heads=2", "--block=16", "--text=4", "--lengths=16,32,48", "--repeats=2")


@pytest.fixture(autouse=True)
def _clean_gin():
    yield
    gin.clear_config()


def works_of(lengths, num_bytes):
    return [
        Work(3 * 24.0 * length * WIDTH**2, 3 * 4.0 * length**2 * WIDTH, sent)
        for length, sent in zip(lengths, num_bytes, strict=True)
    ]


@pytest.fixture
def contents():
    """What a calibration file holds, with terms easy to recognise."""
    quality = {"r_squared": 0.99, "mean_relative": 0.01, "largest_relative": 0.02}
    return {
        "format": "jaxdit calibration",
        "version": 1,
        "device_kind": "cpu",
        "num_devices": 4,
        "shape": dataclasses.asdict(SHAPE),
        "lengths": [16, 32],
        "seconds": [1e-3, 3e-3],
        "fits": {
            "two_columns": {
                "token_s": 1e-4,
                "pair_s": 1e-7,
                "gamma": 0.9,
                "seconds_per_flop": 2e-11,
                "quality": quality,
            },
            "terms": {
                "launch_s": 1e-3,
                "linear_s_per_flop": 4e-12,
                "attention_s_per_flop": 2e-12,
                "exchange_s_per_byte": 1e-9,
                "no_exchange": None,
                "quality": quality,
            },
        },
        "date": "2026-01-01",
    }


@pytest.fixture
def write(tmp_path):
    def write_file(contents):
        path = tmp_path / "calibration.json"
        path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
        return path

    return write_file


# Fits.


def test_two_columns_are_recovered_and_are_the_cost_models():
    cost = CostModel(WIDTH, gamma=0.6, seconds_per_flop=3e-12)
    # Forward and backward: three times the forward pass that the cost model prices.
    fit = fit_two_columns(LENGTHS, 3 * cost.total(LENGTHS.astype(float)), width=WIDTH)
    assert fit.gamma == pytest.approx(0.6)
    assert fit.seconds_per_flop == pytest.approx(3e-12)
    assert fit.quality.r_squared == pytest.approx(1)
    again = CostModel(WIDTH, fit.gamma, fit.seconds_per_flop)
    np.testing.assert_allclose(fit.seconds(LENGTHS), 3 * again.total(LENGTHS.astype(float)))
    seconds = Links().compute_seconds(again, 512, float(again.attention(512)))
    assert fit.seconds(np.array([512]))[0] == pytest.approx(seconds)


def test_terms_are_recovered_exactly():
    works = works_of(np.tile(LENGTHS, 2), [0.0] * 6 + [1e4 * 3**i for i in range(6)])
    terms = np.array([2e-3, 3e-12, 1.5e-12, 4e-10])
    seconds = np.column_stack([np.ones(12), works]) @ terms
    fit = fit_terms(works, seconds)
    found = fit.launch_s, fit.linear_s_per_flop, fit.attention_s_per_flop, fit.exchange_s_per_byte
    np.testing.assert_allclose(found, terms)
    assert fit.gamma == pytest.approx(0.5)
    assert fit.seconds(works[-1]) == pytest.approx(seconds[-1])
    assert fit.quality.largest_relative < 1e-9


def test_terms_are_recovered_from_noise():
    works = works_of(np.repeat(LENGTHS, 20), np.tile([0.0, 3e6], 60))
    terms = np.array([2e-4, 3e-12, 1.5e-12, 1e-10])
    noise = np.exp(0.05 * np.random.default_rng(0).standard_normal(120))
    fit = fit_terms(works, np.column_stack([np.ones(120), works]) @ terms * noise)
    found = fit.launch_s, fit.linear_s_per_flop, fit.attention_s_per_flop, fit.exchange_s_per_byte
    np.testing.assert_allclose(found, terms, rtol=0.15)
    assert 0.02 < fit.quality.mean_relative < 0.06


def test_nothing_sent_gives_no_exchange_and_no_term_is_negative():
    works = works_of(LENGTHS, [0.0] * 6)
    fit = fit_terms(works, np.array([w.linear_flops for w in works]) * 3e-12 + 1e-9 * (LENGTHS < 20))
    assert fit.exchange_s_per_byte is None
    assert min(fit.launch_s, fit.linear_s_per_flop, fit.attention_s_per_flop) >= 0
    # A concave curve would have a negative square.
    assert fit_two_columns(LENGTHS, np.sqrt(LENGTHS), width=WIDTH).gamma == 0


def test_fits_say_what_they_cannot_fit():
    with pytest.raises(ValueError, match="at least two lengths; got 1"):
        fit_two_columns(np.array([8, 8]), np.array([1.0, 1.0]), width=8)
    with pytest.raises(ValueError, match="a part that grows with the length"):
        fit_two_columns(LENGTHS, LENGTHS.astype(float) ** 4, width=8)
    with pytest.raises(ValueError, match="positive and finite"):
        fit_two_columns(LENGTHS, np.array([1.0, 2, 3, np.nan, 5, 6]), width=8)
    with pytest.raises(ValueError, match="as many measurements as terms; got 2 and 3"):
        fit_terms(works_of([1, 2], [0.0, 0.0]), np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="must grow with the work of linear layers"):
        fit_terms(works_of(LENGTHS, [0.0] * 6), np.ones(6))


def test_devices_that_share_cores_lend_them():
    assert busiest([8, 1, 1, 2], None) == 8
    assert busiest([8, 1], 2) == 8
    # Four devices on two cores: all busy takes the mean; one alone has a core of its own, twice its share.
    assert busiest([5, 5, 5, 5], 2) == 5
    assert busiest([8, 0, 0, 0], 2) == 4
    assert busiest([6, 6, 6, 2], 2) == 5


# What is measured.


def test_default_lengths_on_gpus_are_the_published_ones():
    lengths = DEFAULT_LENGTHS["gpu"]
    assert len(lengths) == 10
    assert (lengths[0], lengths[-1]) == (448, 65536)
    assert (DEFAULT_SHAPES["gpu"].width, DEFAULT_SHAPES["gpu"].head_dim) == (3072, 128)
    for shape in (*DEFAULT_SHAPES.values(), SHAPE):
        assert sum(model_config(shape).axes_dim) == shape.head_dim


def test_cases_count_what_programs_compute():
    bench = Bench(SHAPE, make_mesh(2, 1), cores=2)
    cases = calibration_cases(bench, (16, 32, 48))
    assert [len(part) for part in (cases.single, cases.packed, cases.exchanged)] == [3, 2, 2]
    for length, case in zip((16, 32, 48), cases.single, strict=True):
        assert case.work.linear_flops == 3 * 24 * length * 32**2
        # Lengths are whole blocks, so that pairs are the squares: 2 heads of 16.
        assert case.work.attention_flops == 3 * 4 * length**2 * 32
        assert case.work.exchange_bytes == 0
    for case in cases.packed:
        assert case.work.linear_flops == case.shares.work.linear_flops
        assert case.work.attention_flops <= case.shares.work.attention_flops
        assert case.index.lengths.sum() == case.shares.index.lengths.sum()
    # Of 2 x 48 tokens with 2 heads, half of a device's rows go to the other; 8 tensors of 16 float32.
    assert cases.exchanged[1].work.exchange_bytes == 48 * 16 * 4 * 8
    assert calibration_cases(Bench(SHAPE, make_mesh(1, 1), cores=2), (16, 32, 48)).exchanged == []


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_random_batches_differ_and_fit_their_programs(devices):
    bench = Bench(SHAPE, make_mesh(devices, 1), cores=2)
    cases = random_cases(bench, 48, 9)
    assert len(cases) == 9
    assert len({id(case.shares or case) for case in cases}) == 4
    assert len({tuple(case.index.lengths) for case in cases}) > 3
    for case in cases:
        assert case.sizes.fits(bench.needs(case.index, case.bags))
        assert case.index.lengths.min() > 0
        assert case.index.lengths.sum() in {devices * t for t in (16, 28, 48, 38)}


# The file.


def test_a_file_gives_cost_and_links(write, contents):
    found = load_calibration(write(contents))
    assert found.as_json() == {
        **contents,
        "fits": {**contents["fits"], "terms": {**contents["fits"]["terms"], "gamma": 0.5}},
    }
    assert found.cost_model(128) == CostModel(128, 0.5, 4e-12)
    links = found.links(Links())
    # A row of a head of 16 float32: q, k, v and o, forward and backward.
    assert links.row_seconds(16) == pytest.approx(16 * 4 * 8 * 1e-9)
    assert links.flops_per_s == pytest.approx(2.5e11)
    assert links.inside_bytes_per_s == pytest.approx(1e9)
    assert links.across_bytes_per_s == pytest.approx(1e9)  # never faster than inside
    terms = dataclasses.replace(found.terms, exchange_s_per_byte=None)
    assert (
        dataclasses.replace(found, terms=terms).links(Links()).inside_bytes_per_s
        == Links().inside_bytes_per_s
    )


def test_a_config_takes_the_file(write, contents):
    path = write(contents)

    def planner(*bindings):
        load_config(TINY, bindings)
        return make_planner(checked_settings(()), 4, padded=True)

    calibrated = planner(f"train.calibration='{path}'")
    assert calibrated.cost == CostModel(32, 0.5, 4e-12)
    assert calibrated.links.flops_per_s == pytest.approx(2.5e11)
    assert planner().cost == CostModel(32, 0.4)
    assert planner().links == default_links(padded=True)
    explicit = planner(f"train.calibration='{path}'", "train.gamma=0.7")
    assert explicit.cost == CostModel(32, 0.7, 4e-12)
    # Counting in seconds or in FLOP gives the same plan.
    lengths, home = [900, 30, 31, 400, 260, 17, 512, 64], [0, 1, 2, 3] * 2
    plans = [
        balance(lengths, home, num_devices=4, bags="g1n2+g2n1", num_heads=2, cost=cost)
        for cost in (calibrated.cost, CostModel(32, 0.5))
    ]
    np.testing.assert_array_equal(plans[0].token_slices, plans[1].token_slices)
    np.testing.assert_array_equal(plans[0].head_slices, plans[1].head_slices)


def test_other_devices_and_models_are_warned_of(write, contents, caplog):
    found = load_calibration(write(contents))
    found.warn_of_differences(device_kind="cpu", width=32, num_heads=2, dtype="float32")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        found.warn_of_differences(device_kind="NVIDIA H100", width=64, num_heads=2, dtype="float32")
    assert [record.args for record in caplog.records] == [
        ("devices", "cpu", "NVIDIA H100"),
        ("width", 32, 64),
    ]


def test_bad_files_are_refused(write, contents, tmp_path):
    def fails(value, match):
        with pytest.raises(UserError, match=match):
            load_calibration(write(value))

    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_calibration(tmp_path / "none.json")
    fails("not json", "is not JSON")
    fails("[1]", "is not a calibration")
    fails({**contents, "format": "other"}, "is not a calibration: it has no format 'jaxdit calibration'")
    fails({**contents, "version": 2}, "must be of version 1; got 2")
    for name in ("device_kind", "num_devices", "shape", "lengths", "seconds", "fits"):
        fails({key: x for key, x in contents.items() if key != name}, f"{name} must be there; got none")
    fails({**contents, "seconds": [1.0]}, "one of seconds for each of lengths; got 1 and 2")
    fails({**contents, "seconds": [1.0, 0]}, r"seconds.entry must be a number in 1e-12 \.\. 1e\+06; got 0")
    fails({**contents, "num_devices": 0}, r"num_devices must be an integer in 1 \.\. 1048576; got 0")
    fails({**contents, "version": True}, "must be of version 1; got True")
    fails(
        {**contents, "lengths": [1, 2**70]}, r"lengths.entry must be an integer in 1 \.\. 1048576; got 11805"
    )
    fails("[" * 100_000, "is not JSON")

    def with_shape(**changes):
        return {**contents, "shape": {**contents["shape"], **changes}}

    fails(with_shape(dtype="int8"), "dtype must be float32 or bfloat16")
    fails(with_shape(block=7), r"shape.block must be a multiple of 8 in 8 \.\. 4096; got 7")
    fails(with_shape(text=10**20), "shape.text must be an integer in 0")

    def with_term(**changes):
        terms = {**contents["fits"]["terms"], **changes}
        return {**contents, "fits": {**contents["fits"], "terms": terms}}

    fails(with_term(launch_s=-1e-9), r"fits.terms.launch_s must be a number in 0 \.\. 1e\+06; got -1e-09")
    fails(
        with_term(linear_s_per_flop=0),
        r"fits.terms.linear_s_per_flop must be a number in 1e-24 \.\. 1e\+06; got 0",
    )
    fails(with_term(attention_s_per_flop=float("nan")), "attention_s_per_flop must be a number in 0")
    fails(with_term(attention_s_per_flop=10**400), "attention_s_per_flop must be a number in 0")
    fails(with_term(attention_s_per_flop="1"), "attention_s_per_flop must be a number in 0")
    fails(with_term(exchange_s_per_byte=None), "fits.terms.no_exchange must be a text")
    fails(with_term(exchange_s_per_byte=1e-320), "exchange_s_per_byte must be a number in 1e-24")
    fails(with_term(attention_s_per_flop=1.0), "gamma in 0 .. 1e")
    assert (
        load_calibration(write(with_term(exchange_s_per_byte=None, no_exchange="one"))).no_exchange == "one"
    )


# The program.


def test_bad_flags_are_refused_before_any_work(tmp_path, monkeypatch, write, contents):
    def fails(*flags, match):
        with pytest.raises(UserError, match=match):
            calibrate.main([f"--out={tmp_path / 'out.json'}", *flags])

    fails("--lengths=64,x", match="whole numbers between commas")
    fails("--lengths=64,128", match="at least 3 different ones")
    fails("--lengths=1,64,128", match="at least 3 different ones in")
    fails("--repeats=0", match="--repeats must be at least 1; got 0")
    for folder in ("folder.json", "figure.png"):
        (tmp_path / folder).mkdir()
    for out in ("folder.json", "figure.json"):
        fails(f"--out={tmp_path / out}", match="--out and its figure are files to write; .* is a folder")
    fails("--check", "--batches=0", match="--batches must be at least 1; got 0")
    fails("--devices=0", match="--devices must be at least 1; got 0")
    fails("--devices=99", match="--devices must be at most the 8 there are; got 99")
    fails("--width=30", "--num-heads=4", match="even multiple of --num-heads")
    fails("--block=12", match="--block must be a multiple of 8")
    fails("--text=-1", match="--text must not be negative")
    fails("--set=train.block=8", match="--set changes the config of --config")
    fails("--out=result.txt", match=r"--out must end in .json")
    fails("--out=/dev/null/x.json", match="cannot write to /dev/null")
    fails("--check=none.json", match="none.json cannot be read")
    fails(f"--check={write(contents)}", "--width=64", match="measures the blocks of the file; got width too")
    other = write({**contents, "device_kind": "NVIDIA H100"})
    fails(f"--check={other}", match="is of NVIDIA H100, and the devices are cpu")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    fails(match="of one process with the devices of one machine; got SLURM_STEP_NUM_TASKS=2")
    assert not (tmp_path / "out.json").exists()


def test_a_config_gives_the_blocks():
    args = calibrate._parser().parse_args(["--config", str(TINY), "--block", "16", "--set", "train.steps=1"])
    shape = Requested(asked_shape(args), None, None, 1, None).shape_on("cpu")
    assert shape == BlockShape(32, 2, "float32", block=16, text=16, double_blocks=0, single_blocks=1)
    assert parse_lengths("64, 16,32,16") == (16, 32, 64)


TERMS = TermsFit(1e-3, 3e-12, 6e-12, 2e-9, Quality(1.0, 0.0, 0.0))


def tell_time(monkeypatch, *, runs):
    """Blocks take what known terms say: what this machine takes for tiny ones is mostly noise."""

    def time(case):
        if runs:
            case._call()
        case.seconds.append(TERMS.seconds(case.work))

    monkeypatch.setattr(Case, "time", time)
    if not runs:
        monkeypatch.setattr(Case, "prepare", lambda case: None)


def test_a_run_measures_fits_and_checks(tmp_path, capsys, monkeypatch):
    tell_time(monkeypatch, runs=False)
    out = tmp_path / "new" / "small.json"
    flags = [f"--out={out}", *TINY_FLAGS, "--devices=2", "--check", "--batches=4"]
    assert run_program(calibrate.main, flags) == 0
    text = capsys.readouterr().out
    assert "Mean absolute error of the predicted step time over 4 random batches: **0.0%**" in " ".join(
        text.split()
    )
    assert out.with_suffix(".png").stat().st_size > 10_000
    contents = json.loads(out.read_text())
    assert contents["lengths"] == [16, 32, 48]
    assert contents["check"]["mean_absolute_error"] < 1e-9
    assert [m["kind"] for m in contents["measurements"]] == ["single"] * 3 + ["packed"] * 2 + [
        "exchanged"
    ] * 2
    assert all(len(m["seconds"]) == 2 and abs(m["residual"]) < 1e-9 for m in contents["measurements"])
    found = load_calibration(out)
    assert (found.device_kind, found.num_devices, found.shape) == ("cpu", 2, SHAPE)
    assert found.terms.gamma == pytest.approx(2)
    assert found.terms.exchange_s_per_byte == pytest.approx(2e-9)
    # What the planner compares plans by, from the same terms.
    plan = balance([48, 16], [0, 1], num_devices=2, bags="g1n2", num_heads=2, cost=CostModel(32, 0.4))
    seconds = 1e-3 + 3 * float(CostModel(32, 2.0, 3e-12).total(48))
    assert planned_seconds(found, plan, Links()) == pytest.approx(seconds)

    assert run_program(calibrate.main, [f"--check={out}", "--batches=1", "--repeats=1"]) == 0
    assert "over 1 random batches" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def _quick():
    # That it runs is what is tested, not how fast: compiling takes nearly all of the time.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.full
@pytest.mark.usefixtures("_quick")
def test_one_device_runs_and_has_nothing_to_exchange(tmp_path, capsys, monkeypatch):
    tell_time(monkeypatch, runs=True)
    out = tmp_path / "one.json"
    assert run_program(calibrate.main, [f"--out={out}", *TINY_FLAGS, "--devices=1"]) == 0
    assert "none: there is one device, and nothing to exchange" in capsys.readouterr().out
    terms = json.loads(out.read_text())["fits"]["terms"]
    assert terms["exchange_s_per_byte"] is None
    assert terms["no_exchange"] == "there is one device, and nothing to exchange"
    assert json.loads(out.read_text())["check"] is None
    assert load_calibration(out).links(Links()).inside_bytes_per_s == Links().inside_bytes_per_s


@pytest.mark.usefixtures("_quick")
def test_the_timed_program_is_the_balanced_step():
    bench = Bench(SHAPE, make_mesh(2, 1), cores=2)
    (case, *_) = random_cases(bench, 48, 3)[2:]
    assert case.bags == "g2n1"
    case.prepare()
    case.time()
    assert case.middle > 0
    loss, grads = case._run(bench.params, case._inputs, bench.key)
    assert loss.shape == (2,)
    assert np.all(np.asarray(loss) > 0)
    assert jax.tree.structure(grads) == jax.tree.structure(bench.params)
    # Every device has a gradient of its own, of the tokens it has.
    kernel = np.asarray(grads["backbone"]["img_in"]["kernel"])
    assert kernel.shape == (2, *bench.params["backbone"]["img_in"]["kernel"].shape)
    assert np.isfinite(kernel).all()


def test_errors_of_the_check_by_hand():
    batch = Checked("g1n2", 2, 10, 6, 8, 2.0, (2.0, 2.0), 1.8, 2.5, Work(1.0, 1.0, 0.0))
    other = dataclasses.replace(batch, predicted_s=2.4, planned_s=2.0)
    figures = check_figures([batch, other])
    assert figures["mean_absolute_error"] == pytest.approx(0.15)
    assert figures["largest_absolute_error"] == pytest.approx(0.2)
    assert figures["mean_absolute_error_of_plans"] == pytest.approx(0.125)
