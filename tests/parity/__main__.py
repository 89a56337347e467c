"""`make parity`: compares the models here with diffusers on every case, and records what `make test` compares with.

Writes docs/parity.json (largest errors of each case) and tests/data/parity/ (the reference's results of small cases).
Exits with 1 if an error is above its bound.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import diffusers
import jax
import torch
from safetensors.numpy import save_file

from jaxdit.weights import load_params, read_config, save_params
from tests.parity.cases import CASES, Case
from tests.parity.ours import BOUNDS, errors, run_ours
from tests.parity.reference import check_export, reference_model, run_reference

_ROOT = Path(__file__).parents[2]
_LOG = logging.getLogger("parity")
# In bfloat16, over the reference's own error.
_BF16_FACTOR = 2.0


def _compare(case: Case, folder: Path) -> dict[str, dict[str, float]]:
    reference_model(case).save_pretrained(folder / "theirs")
    reference = run_reference(case)
    if case.recorded:
        recorded = _ROOT / "tests/data/parity"
        recorded.mkdir(parents=True, exist_ok=True)
        save_file(reference, recorded / f"{case.name}.safetensors")
    config = read_config(folder / "theirs")
    save_params(folder / "ours", load_params(folder / "theirs", config), config, max_file_bytes=1 << 20)
    check_export(case, folder / "ours")
    return {
        "float32": errors(run_ours(case, folder / "ours"), reference),
        "bfloat16": errors(run_ours(case, folder / "ours", "bfloat16"), reference),
        "reference_bfloat16": errors(run_reference(case, torch.bfloat16), reference),
    }


def main() -> int:
    """Compare all cases.

    Returns:
        The exit code.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    jax.config.update("jax_platforms", "cpu")
    results = {}
    failed = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = _compare(case, Path(folder))
        results[case.name] = found
        _LOG.info("%s %s", case.name, json.dumps(found))
        if any(found["float32"][group] > bound for group, bound in BOUNDS.items()):
            failed.append(f"{case.name} in float32")
        if any(
            found["bfloat16"][k] > _BF16_FACTOR * found["reference_bfloat16"][k] for k in found["bfloat16"]
        ):
            failed.append(f"{case.name} in bfloat16")
    versions = {"diffusers": diffusers.__version__, "torch": torch.__version__, "jax": jax.__version__}
    text = json.dumps({"versions": versions, "cases": results}, indent=1)
    (_ROOT / "docs/parity.json").write_text(text + "\n", encoding="utf-8")
    if failed:
        _LOG.error("above the bound: %s", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
