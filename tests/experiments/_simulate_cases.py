"""What tests of the simulation share."""

import json

from experiments import simulate
from tests.experiments._program_cases import run

SMALL = ("--mix", "g2b2i64f1s0,g2b1i256f1s0", "--width", "64", "--heads", "4", "--blocks", "1+2")


def simulated(capsys, *args):
    """The report of a run, which must succeed."""
    capsys.readouterr()
    assert run(simulate.main, *args, "--json") == 0
    return json.loads(capsys.readouterr().out)
