"""Against results of diffusers and transformers, recorded by `make parity`.

Of diffusers outputs and gradients, sequences packed against one by one, and samplers' tables and rows after every
evaluation; of transformers features of text encoders.
"""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.parity.cases import CASES
from tests.parity.ours import bounds_of, errors, run_ours, write_checkpoint
from tests.parity.scheduler_cases import SCHEDULER_CASES
from tests.parity.scheduler_ours import SCHEDULER_BOUNDS, scheduler_errors
from tests.parity.text_cases import TEXT_CASES, write_encoder
from tests.parity.text_ours import TEXT_BOUNDS, run_our_text, text_errors

RECORDED = Path(__file__).parents[1] / "data" / "parity"


@pytest.mark.parametrize("case", [case for case in CASES if case.recorded], ids=lambda case: case.name)
def test_recorded_results_of_diffusers(case, tmp_path):
    write_checkpoint(case, tmp_path)
    found = errors(run_ours(case, tmp_path), load_file(RECORDED / f"{case.name}.safetensors"))
    assert all(found[group] <= bound for group, bound in bounds_of(case).items()), found


@pytest.mark.parametrize("case", SCHEDULER_CASES, ids=lambda case: case.name)
def test_samplers_go_where_those_of_diffusers_go(case):
    recorded = load_file(RECORDED / "schedulers.safetensors")
    prefix = f"{case.name}."
    reference = {k.removeprefix(prefix): x for k, x in recorded.items() if k.startswith(prefix)}
    found = scheduler_errors(case, reference)
    assert all(found[group] <= bound for group, bound in SCHEDULER_BOUNDS.items()), found


@pytest.mark.parametrize("case", [case for case in TEXT_CASES if case.recorded], ids=lambda case: case.name)
def test_recorded_results_of_transformers(case, tmp_path):
    write_encoder(case, tmp_path)
    found = text_errors(run_our_text(case, tmp_path), load_file(RECORDED / f"{case.name}.safetensors"))
    assert all(found[group] <= bound for group, bound in TEXT_BOUNDS.items()), found
