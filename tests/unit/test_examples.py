"""The scripts of examples/ run as their first lines say, and train."""

import os
import re
import sys
from pathlib import Path

import pytest
from example_support import run_example

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHERS = {
    "pipeline.py": [],
    "transformer.py": [],
    "unet.py": [],
    "data_parallel.py": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_NUM_THREADS": "1"}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(LAUNCHERS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_it_trains(name: str) -> None:
    command = [sys.executable, *LAUNCHERS[name], str(EXAMPLES / name)]
    done = run_example(command, EXAMPLES.parent, ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    shares = [float(share) for share in re.findall(r"epoch \d: ([\d.]+)%", done.stdout)]
    assert len(shares) == 8
    # A network that reads the digits at random is at 10 %.
    assert shares[-1] > 90
