"""What a run reports: rows that read back as written, each step once, and the progress line."""

import io
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from _checkpoint_cases import file_size_limit

from experiments import _metrics
from experiments._config import UserError
from experiments._metrics import MetricsWriter, Progress, StepReport, read_metrics

REPORT = StepReport(
    loss=0.123456,
    tokens_per_s=12_345.6,
    step_s=0.2101,
    load_before=1.847,
    load_after=1.018,
    padded_fraction=0.0371,
    computed_over_useful=1.0612,
    compilations=3,
)
REPORT_TEXT = (
    "loss 0.1235, 12.3k tokens/s, 0.21 s/step, load max/mean 1.85 -> 1.02, padded 3.7 %, "
    "computed/useful 1.061, compiled 3"
)


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def test_rows_read_back_as_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        values = {
            "loss": jnp.bfloat16(0.5),
            "lr": np.float32(0.25),
            "n": 7,
            "ok": True,
            "load": np.array([1.0, 2.0]),
        }
        writer.write(0, values)
        writer.write(3, {"loss": jnp.float32(jnp.nan), "load": [1.0, float("-inf")], "max": float("inf")})
    assert read_metrics(tmp_path)[0] == {
        "step": 0,
        "loss": 0.5,
        "lr": 0.25,
        "n": 7,
        "ok": True,
        "load": [1.0, 2.0],
    }
    assert json.loads(lines(tmp_path)[1]) == {
        "step": 3,
        "loss": None,
        "load": [1.0, None],
        "max": None,
        "non_finite": {"loss": "nan", "load": ["1.0", "-inf"], "max": "inf"},
    }
    second = read_metrics(tmp_path)[1]
    assert np.isnan(second.pop("loss"))
    assert second == {"step": 3, "load": [1.0, float("-inf")], "max": float("inf")}


def test_a_row_is_in_the_file_at_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": 1.0})
        assert len(lines(tmp_path)) == 1
        writer.flush()


def test_resuming_leaves_each_step_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(6):
            writer.write(step, {"loss": float(step)})
    with MetricsWriter(tmp_path, start_step=4) as writer:
        assert len(lines(tmp_path)) == 4
        for step in range(4, 8):
            writer.write(step, {"loss": -float(step)})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["loss"] for row in rows] == [0, 1, 2, 3, -4, -5, -6, -7]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("rest", ['{"step": 2, "lo', '{"step": 2, "loss": 1.0}', "{", "\x00\x00"])
def test_last_line_cut_off_by_a_kill(tmp_path, rest):
    with MetricsWriter(tmp_path) as writer:
        for step in range(2):
            writer.write(step, {"loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(rest)
    assert len(read_metrics(tmp_path)) in (2, 3)
    with MetricsWriter(tmp_path, start_step=2) as writer:
        writer.write(2, {"loss": 2.0})
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [0, 1, 2]


def test_a_file_that_is_no_metrics_file_is_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nhello\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a row of metrics"):
        MetricsWriter(tmp_path, start_step=1)
    assert "hello" in lines(tmp_path)
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path / "elsewhere")


def test_workdir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError, match=r"cannot write .*file/metrics\.jsonl .*: (Not a directory|File exists)"
    ):
        MetricsWriter(tmp_path / "file")


def test_full_disk_is_an_error_and_no_hang(tmp_path):
    writer = MetricsWriter(tmp_path)

    def write_on():
        for step in range(100):
            writer.write(step, {"loss": 1.0})

    with file_size_limit(200):
        with pytest.raises(UserError, match=r"metrics\.jsonl .*: File too large\. Make room"):
            write_on()
        with pytest.raises(UserError, match="File too large"):
            writer.close()
    writer.close()
    with MetricsWriter(tmp_path, start_step=5) as writer:
        writer.write(5, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_events_are_flushed_in_time(tmp_path):
    with MetricsWriter(tmp_path, flush_s=0.0) as writer:
        (events,) = (tmp_path / "events").iterdir()
        before = events.stat().st_size
        writer.write(0, {"loss": 1.0})
        assert events.stat().st_size > before


def test_what_is_refused(tmp_path):
    with MetricsWriter(tmp_path, start_step=5) as writer:
        with pytest.raises(ValueError, match=r"step must be greater than 4; got step=4"):
            writer.write(4, {})
        writer.write(5, {"a": 1})
        with pytest.raises(ValueError, match="greater than 5; got step=5"):
            writer.write(5, {"b": 1})
        for value in ("text", None, np.zeros((2, 2)), 1j, object()):
            with pytest.raises(ValueError, match="must be real numbers or sequences of them; got x"):
                writer.write(6, {"x": value})
        for name in ("step", "non_finite"):
            with pytest.raises(ValueError, match="a column of its own"):
                writer.write(6, {name: 1})
        writer.write(6, {"a": 2})
    assert len(lines(tmp_path)) == 2


def test_other_processes_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", enabled=False) as writer:
        writer.write(0, {"loss": 1.0}, {"image": np.zeros((4, 4, 3), np.uint8)})
        writer.flush()
        with pytest.raises(ValueError, match="step must be greater"):
            writer.write(0, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_tensorboard_reads_the_events(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(4):
            values = {"loss": 1.0 * step, "load": [1, 2]}
            writer.write(step, values, {"samples": np.full((8, 12, 3), 200, np.uint8)})
    with MetricsWriter(tmp_path, start_step=2) as writer:
        writer.write(2, {"loss": -1.0})
    from tensorboardX.proto import event_pb2

    tags, steps, starts = set(), [], []
    for path in sorted((tmp_path / "events").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for record in _records(path.read_bytes()):
            event = event_pb2.Event.FromString(record)
            tags |= {value.tag for value in event.summary.value}
            steps += [event.step for value in event.summary.value if value.tag == "loss"]
            starts += [event.step] if event.HasField("session_log") else []
    assert tags == {"loss", "samples"}
    assert steps == [0, 1, 2, 3, 2]
    assert starts == [2], "TensorBoard hides what it read before from this step on"


def _records(data):
    """The records of an event file: length (8 bytes), checksum (4), data, checksum (4)."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_report_text():
    assert str(REPORT) == REPORT_TEXT


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (2.5e6, "2.5M"), (3e12, "3e+03G")]
)
def test_counts(count, text):
    assert _metrics._count_text(count) == text


def test_bar_on_a_terminal():
    stream = Terminal()
    with Progress(10, 2, stream=stream, enabled=True) as progress:
        for step in range(3, 11):
            progress.update(step, REPORT)
    assert "10/10" in stream.getvalue()
    assert "loss 0.1235" in stream.getvalue()


def test_log_lines_without_a_terminal(caplog):
    stream = io.StringIO()
    with (
        caplog.at_level(logging.INFO),
        Progress(25, 2, log_every=10, stream=stream, enabled=True) as progress,
    ):
        for step in range(3, 26):
            progress.update(step, REPORT)
    assert stream.getvalue() == ""
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in texts] == [f"step {step} of 25" for step in (3, 10, 20, 25)]
    assert texts[0].endswith(REPORT_TEXT)
    assert texts[2].endswith("about 0 s left")


def test_silent_on_other_processes(caplog):
    stream = Terminal()
    with caplog.at_level(logging.INFO), Progress(2, stream=stream, enabled=False) as progress:
        progress.update(1, REPORT)
    assert stream.getvalue() == ""
    assert not caplog.records
