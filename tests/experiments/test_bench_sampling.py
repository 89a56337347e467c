"""The benchmark of sampling: what it draws, counts and fits; and whole, in tiny."""

import json

import numpy as np
import pytest

from experiments import bench_sampling
from experiments._bench_service_load import Answer, Sent, draw_requests, statuses
from experiments._bench_service_run import Loaded, Resident
from tests.experiments._program_cases import run


def test_requests_are_mixed_and_repeat():
    drawn = draw_requests(400, seed=3, largest=128)
    assert drawn == draw_requests(400, seed=3, largest=128)
    kinds = [sent.kind for sent in drawn]
    assert {"whole", "gone", "wrong"} == set(kinds)
    assert kinds.count("whole") > 300
    sizes = {sent.body["size"] for sent in drawn if sent.kind == "whole"}
    assert len(sizes) > 15
    assert all(64 <= int(side) <= 128 for size in sizes for side in size.split("x"))


def loaded(resident):
    answers = [Answer(Sent({}, "whole"), 200, 0.1, 0, "") for _ in range(1000)]
    memory = [Resident(i / 10, i, resident(i)) for i in range(0, 1001, 10)]
    return Loaded(answers, 100.0, memory, 10, 20, 0, 1.0)


def test_growth_of_memory_is_of_the_last_half():
    mega = 1 << 20
    assert loaded(lambda i: 500 * mega).mb_per_thousand == pytest.approx(0)
    # What grows first and stays is no growth; what goes on is.
    assert loaded(lambda i: min(i, 400) * mega).mb_per_thousand == pytest.approx(0, abs=1e-6)
    assert loaded(lambda i: i * mega // 2).mb_per_thousand == pytest.approx(500, rel=0.01)
    assert statuses(loaded(lambda i: 1).answers) == {"whole 200": 1000}


@pytest.mark.parametrize("args", [["--requests", 0], ["--clients", -1]])
def test_numbers_that_are_refused(args, capfd):
    assert run(bench_sampling.main, *args) == 2
    assert "is at least 1" in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("section", ["sampling", "service"])
def test_a_section_in_tiny(section, tmp_path, capfd):
    document, figures = tmp_path / "out.md", tmp_path / "out.json"
    arguments = ["--quick", "--only", section, "--out", document, "--json", figures]
    assert run(bench_sampling.main, *arguments) == 0
    assert f"<!-- section {section} -->" in document.read_text()
    found = json.loads(figures.read_text())[section]
    if section == "service":
        assert found["answers"] == 12
        assert found["problems"] == []
        assert found["exit_code"] == 0
        return
    for placed in found["placed"]:
        assert sum(one["chosen"] for one in placed["algorithms"]) == 2
        assert all(np.all(np.array(one["seconds"]) > 0) for one in placed["algorithms"])
    across = {one["algorithm"]: one["across_bytes"] for one in found["placed"][0]["algorithms"]}
    assert min(across.values()) > 0
    assert all(one["across_bytes"] == 0 for one in found["placed"][1]["algorithms"])
