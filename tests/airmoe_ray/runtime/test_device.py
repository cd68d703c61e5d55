"""Memory of freed tensors is kept for the next ones."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from airmoe_ray.runtime.device import pick_device
if sys.argv[1] == "kept":
    pick_device("cpu", threads=1)
torch.set_num_threads(1)
work = lambda: torch.zeros(64, 1 << 18).add(1).mul(2)  # 64 MB, three times
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_freed_tensors_are_not_given_back_to_the_kernel() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True).stdout)
        for how in ("default", "kept")
    }
    assert faults["kept"] < faults["default"] / 10, faults
