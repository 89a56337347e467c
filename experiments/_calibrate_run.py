"""A calibration from start to end: devices, measurements, fits, file, figure and report."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments._bench_report import Conditions
from experiments._calibrate_cases import Cases, calibration_cases, random_cases, time_in_turn
from experiments._calibrate_check import Checked, check_cases, check_figures
from experiments._calibrate_fit import fit_terms, fit_two_columns
from experiments._calibrate_program import Bench, Case, model_config
from experiments._calibrate_report import blocks_text, check_text, devices_text, report
from experiments._calibrate_settings import Requested
from experiments._calibration import Calibration, load_calibration
from experiments._disk import write_text, writing
from experiments._platform import ProcessSettings, cpu_cores, make_mesh, prepare_platform
from experiments._program import UserError, checking
from experiments._run_planner import default_links

_ONE_DEVICE = "there is one device, and nothing to exchange"
_NOTHING_SENT = "no rows were sent"


def calibrate(out: Path, requested: Requested, command: str) -> str:
    """Measure, fit, write the file and its figure. Returns the report, as markdown.

    Args:
        out: JSON file; the figure has its name and ends in .png.
        requested: what was asked for, checked.
        command: that started this, for file and report.

    Raises:
        UserError: for devices that are not there, times that cannot be fitted, or files that cannot be written.
    """
    bench = make_bench(requested, None)
    platform = bench.platform
    lengths = requested.lengths_on(platform)
    conditions = Conditions.now()
    cases = calibration_cases(bench, lengths)
    checks = random_cases(bench, lengths[-1], requested.batches or 0)
    time_in_turn([*cases.all, *checks], repeats=requested.repeats)
    calibration = fitted(bench, cases, conditions)
    checked = check_cases(calibration, checks, default_links(padded=bench.padded))
    figure = out.with_suffix(".png")
    contents = calibration.as_json() | {
        "command": command,
        "check": check_figures(checked) if checked else None,
    }
    write_text(out, json.dumps(contents, indent=1) + "\n", option="--out")
    _draw(figure, bench, cases, calibration, checked)
    where = conditions.line(command, devices_text(bench))
    return f"{report(bench, cases, calibration, checked)}\n\n{where}\n\nWrote {out} and {figure}.\n"


def check_file(path: Path, requested: Requested, command: str) -> str:
    """Measure random batches against the prediction of a file. Returns the report, as markdown.

    Args:
        path: of the file.
        requested: what was asked for, checked; the blocks are the file's.
        command: that started this, for the report.

    Raises:
        UserError: for a file that is no calibration, or of other devices.
    """
    calibration = load_calibration(path)
    if requested.shape:
        raise UserError(
            f"--check FILE measures the blocks of the file; got {', '.join(requested.shape)} too. Leave that out."
        )
    bench = make_bench(requested, calibration)
    longest = max(requested.lengths or calibration.lengths)
    conditions = Conditions.now()
    checks = random_cases(bench, longest, requested.batches or 0)
    time_in_turn(checks, repeats=requested.repeats)
    checked = check_cases(calibration, checks, default_links(padded=bench.padded))
    return f"{check_text(checked)}\n\n{conditions.line(command, devices_text(bench))}\n"


def make_bench(requested: Requested, calibration: Calibration | None) -> Bench:
    """Devices and blocks; those of a calibration, if there is one.

    Raises:
        UserError: for too few devices, devices of another kind than the calibration's, or sizes that no model has.
    """
    count = requested.devices if calibration is None else requested.devices or calibration.num_devices
    cores = cpu_cores()
    prepare_platform(count or cores, ProcessSettings())
    if jax.process_count() > 1:
        raise UserError(
            f"calibration is of one process; got {jax.process_count()}. Start it once, by itself."
        )
    devices = jax.devices()
    platform, kind = devices[0].platform, devices[0].device_kind
    if calibration is not None and kind != calibration.device_kind:
        raise UserError(
            f"the calibration is of {calibration.device_kind}, and the devices are {kind}. Calibrate these."
        )
    if count is None:
        count = min(len(devices), cores) if platform == "cpu" else len(devices)
    if count > len(devices):
        raise UserError(f"--devices must be at most the {len(devices)} there are; got {count}.")
    shape = requested.shape_on(platform) if calibration is None else calibration.shape
    model_config(shape)
    return Bench(shape, make_mesh(count, 1), cores if platform == "cpu" else None)


def fitted(bench: Bench, cases: Cases, conditions: Conditions) -> Calibration:
    """Fits to timed batches.

    Raises:
        UserError: for times that cannot be fitted.
    """
    lengths = np.array([int(case.index.lengths[0]) for case in cases.single])
    with checking("the measured times cannot be fitted"):
        two = fit_two_columns(
            lengths, np.array([case.middle for case in cases.single]), width=bench.shape.width
        )
        terms = fit_terms([case.work for case in cases.all], np.array([case.middle for case in cases.all]))
    no_exchange = None
    if bench.num_devices == 1:
        no_exchange = _ONE_DEVICE
    elif terms.exchange_s_per_byte is None:
        no_exchange = _NOTHING_SENT
    record = {
        "date": conditions.date,
        "jax_version": jax.__version__,
        "platform": bench.platform,
        "cpu": {"name": conditions.cpu_name, "cores": conditions.cpus},
        "load_average": {"start": conditions.load, "end": os.getloadavg()[0]},
        "repeats": len(cases.single[0].seconds),
        "statistic": "median of the repeats; seconds of one block, forward and backward",
        "measurements": [
            {"kind": name, **_measurement(case, terms.seconds(case.work))}
            for name in ("single", "packed", "exchanged")
            for case in getattr(cases, name)
        ],
    }
    return Calibration(
        device_kind=bench.mesh.devices.flat[0].device_kind,
        num_devices=bench.num_devices,
        shape=bench.shape,
        lengths=tuple(lengths.tolist()),
        seconds=tuple(case.middle for case in cases.single),
        two_columns=two,
        terms=terms,
        no_exchange=no_exchange,
        record=record,
    )


def _measurement(case: Case, fitted_s: float) -> dict[str, Any]:
    return {
        "sequences": case.index.num_sequences,
        "tokens": int(case.index.lengths.sum()),
        "bags": case.bags,
        **case.work._asdict(),
        "seconds": case.seconds,
        "fitted_s": fitted_s,
        "residual": fitted_s / case.middle - 1,
    }


def _draw(
    path: Path, bench: Bench, cases: Cases, calibration: Calibration, checked: Sequence[Checked]
) -> None:
    from experiments._calibrate_figure import plot_calibration

    title = f"{devices_text(bench)}: {blocks_text(bench.shape)}"
    with writing(path, "Make room or choose another --out."):
        plot_calibration(
            path, cases.single, (calibration.two_columns, calibration.terms), checked, title=title
        )
