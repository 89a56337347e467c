"""Files of lengths, and input that the simulation refuses."""

import re

import pytest

from experiments import _simulate_run, simulate
from experiments._program import UserError
from experiments._simulate_batches import read_lengths
from tests.experiments._program_cases import run
from tests.experiments._simulate_cases import simulated


def lengths_of(tmp_path, text, num_devices=None):
    path = tmp_path / "lengths.txt"
    path.write_text(text, encoding="utf-8")
    return read_lengths(path, num_devices=num_devices)


@pytest.mark.parametrize(
    "text", ["10 20\n\n5\n\n\n", "\ufeff[[10, 20], [], [5]]", " [[10,20],\n[ ],[5]]\n", "10\t20\r\n\r\n 5 "]
)
def test_a_file_of_lengths(tmp_path, text):
    workload = lengths_of(tmp_path, text)
    (batch,) = workload.batches
    assert workload.num_devices == 3
    assert batch.lengths.tolist() == [10, 20, 5]
    assert batch.home.tolist() == [0, 0, 2]
    assert batch.num_tokens == 35


def test_json_can_end_with_devices_that_load_nothing(tmp_path):
    assert lengths_of(tmp_path, "[[3], [0], []]", num_devices=3).num_devices == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one token; got none in 0 lines"),
        ("\n\n", "at least one token; got none in 0 lines"),
        ("0 0\n0\n", "at least one token; got none in 2 lines"),
        ("[[], []]", "at least one token"),
        ("10\n4 -3\n", "line 2: lengths are integers in 0 .. 1073741824; got '-3'"),
        ("10 4.5\n", "line 1: lengths are integers .* got '4.5'"),
        ("10,20\n", "line 1: .* got '10,20'. Write numbers of tokens, separated by spaces"),
        ("1e3\n", "got '1e3'"),
        ("1073741825\n", "got '1073741825'"),
        ("9" * 50, "got '9999999999999999999999999999999999999999'"),
        ("²\n", "got '²'"),
        ("[[10, 4.0]]", r"list 1: lengths are integers .* got '4.0'"),
        ("[[10], [true]]", "list 2: .* got 'True'"),
        ("[[10], [null]]", "list 2: .* got 'None'"),
        ("[[10], [NaN]]", "list 2: .* got 'nan'"),
        ("[[[1]]]", r"list 1: .* got '\[1\]'"),
        ("[10, 20]", "JSON holds a list of lists, one for each device; got another shape"),
        ("[[10], [20]", "a JSON list of lists of lengths; .* Mend the JSON"),
    ],
)
def test_files_of_lengths_that_are_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        lengths_of(tmp_path, text)


def test_files_of_other_numbers_of_lines(tmp_path):
    assert lengths_of(tmp_path, "1\n2\n", 2).num_devices == 2
    with pytest.raises(
        UserError, match=r"one line for each of --devices 3; got 2 lines\. Either leave --devices out"
    ):
        lengths_of(tmp_path, "1\n2\n", 3)
    with pytest.raises(
        UserError, match=r"one line for each of --devices 1; got 2 lines\. Either raise --devices"
    ):
        lengths_of(tmp_path, "1\n2\n", 1)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.txt: cannot be read: No such file"):
        read_lengths(tmp_path / "none.txt", num_devices=None)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_lengths(tmp_path, num_devices=None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="a text file in UTF-8"):
        read_lengths(tmp_path / "binary", num_devices=None)


@pytest.fixture
def no_work(monkeypatch):
    """Nothing is planned."""

    def planned(*args, **kwargs):
        raise AssertionError("planned before everything was checked")

    monkeypatch.setattr(_simulate_run, "compare", planned)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mix", "highres"], "--mix must be one of lowres, mixres, joint, all, or data codes"),
        (["--mix", ""], "--mix must be one of"),
        (["--mix", "g8b4i256f1"], r"--mix: parse_codes: .* got part='g8b4i256f1'"),
        (["--mix", "g8b4i8f1s0"], "Z >= 16 pixels"),
        (["--mix", "g1b1i9999999f9s0"], "at most 1073741824 tokens a sample"),
        (["--mix", "g1b9999999i16f1s0"], "at most 1,048,576 sequences over all steps"),
        (["--mix", "g9999b1i16f1s0"], r"--devices must be in 1 \.\. 4096; got 9999"),
        (["--mix", "g1b1i400000f1s0"], "--mix: balance: num_heads"),
        (
            ["--devices", "7"],
            "--devices must be a multiple or a divisor of the 32 ranks of --mix joint; got 7",
        ),
        (["--devices", "0"], r"--devices must be in 1 \.\. 4096; got 0"),
        (["--topology", "4x4"], "--topology must have the 32 devices of the batch; got 4x4, which are 16"),
        (["--topology", "32"], "--topology is MACHINESxGPUS"),
        (["--bags", "g3n4"], "--bags takes none, auto, full or a bag spec: .* multiple of the 12 of g3n4"),
        (["--bags", "8x4"], r"--bags takes none, auto, full or a bag spec: .* got spec='8x4'"),
        (
            ["--mix", "lowres", "--devices", "4096", "--bags", "full"],
            "--bags g4096n1: at most 4,000,000 pieces",
        ),
        (["--steps", "0"], r"--steps must be in 1 \.\. 1000; got 0"),
        (["--gamma", "-1"], "gamma in 0 .. 1e.06; got gamma=-1"),
        (["--gamma", "nan"], "got gamma=nan"),
        (["--width", "100", "--heads", "3"], "--width must be a multiple of --heads"),
        (["--width", "0"], "--width must be a multiple"),
        (["--heads", "0"], r"--heads, which are in 1 \.\. 1024"),
        (["--blocks", "57"], r"--blocks is DOUBLE\+SINGLE, such as 19\+38"),
        (["--blocks", "0+0"], "with a block at least"),
        (["--gpu", "b300"], "--gpu must be one of a100, h100, h200"),
        (["--tflops", "0"], "--tflops must be at least 1e-06"),
        (["--tflops", "nan"], "--tflops must be at least 1e-06"),
        (["--tflops", "990"], "at most the peak, 989.4"),
        (["--plot", "plan.pdf"], r"--plot ends in \.svg or \.png or \.html; got 'plan.pdf'"),
        (["--figure", "bars.html"], r"--figure ends in \.svg or \.png; got 'bars.html'"),
        (["--mix", "all", "--plot", "{tmp}/plan.svg"], "--plot draws one batch; got --mix all"),
        (
            ["--plot", "{tmp}/a.svg", "--figure", "{tmp}/a.svg"],
            "--plot and --figure are two files; got .*a.svg for",
        ),
        (["--tflops", "1e-320"], "--tflops must be at least 1e-06 and at most the peak, 989.4; got 1e-320"),
        (["--plot", "{tmp}/folder.svg"], "is a folder"),
        (["--plot", "{tmp}/file/plan.svg"], "cannot write to .*file: .* Choose another --plot"),
        (["--figure", "{tmp}/file/bars.svg"], "cannot write to .*file: .* Choose another --figure"),
        (["--lengths", "{tmp}/file", "--mix", "joint"], "--lengths is one batch of its own; got --mix too"),
        (["--lengths", "{tmp}/file", "--steps", "1"], "--lengths is one batch of its own; got --steps too"),
        (["--lengths", "{tmp}/file", "--text"], "--text needs text lengths"),
        (["--lengths", "{tmp}/file", "--devices", "3"], "got 2 lines"),
    ],
)
def test_input_that_is_refused_before_any_work(capsys, tmp_path, args, message):
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").write_text("12\n13 14\n")
    assert run(simulate.main, *(arg.replace("{tmp}", str(tmp_path)) for arg in args)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert re.search(f"error: .*{message}", line), line


def test_a_file_of_lengths_as_a_run(capsys, tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[[900, 20], [], [64]]")
    report = simulated(capsys, "--lengths", path, "--width", 64, "--heads", 4)
    assert report["settings"]["topology"] == "1x3"
    (mix,) = report["mixes"]
    assert (mix["mix"], mix["source"], mix["tokens"], mix["longest"]) == ("lengths", "lengths.json", 984, 900)
    assert [plan["bags"] for plan in mix["plans"]] == ["none", "g1n3", "g3n1", "auto"]
