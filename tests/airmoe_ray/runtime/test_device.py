"""A process computes where it was told to, and memory of freed tensors is kept for the next ones."""

import subprocess
import sys

import pytest
import torch

from airmoe_ray.errors import UserError
from airmoe_ray.runtime.device import LOGICAL_GPUS, assigned_device

CODE = """
import resource, sys, torch
from airmoe_ray.runtime.device import pick_device
if sys.argv[1] == "kept":
    pick_device("cpu", threads=1)
torch.set_num_threads(1)
work = lambda: torch.zeros(64, 1 << 18).add(1).mul(2)  # 64 MB, three times
for _ in range(6):  # until the heap has the size that the work needs
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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A torch that finds GPUs; devices on which a tensor was made."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None: made.append(device))
    return made


def test_no_gpu_assigned_is_the_cpu_also_where_there_are_gpus(cuda: list[torch.device]) -> None:
    assert assigned_device([], instead="").type == "cpu"


def test_the_device_is_the_one_assigned_by_its_place_among_those_that_are_shown(
    cuda: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    assert assigned_device(["5"], instead="") == torch.device("cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert assigned_device(["MIG-2"], instead="") == torch.device("cuda", 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert assigned_device(["3"], instead="") == torch.device("cuda", 3)


def test_a_gpu_that_is_assigned_and_cannot_be_used_is_an_error_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old(*shape: int, device: object = None) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(torch, "empty", too_old)
    with pytest.raises(
        UserError, match=r"^GPU 0 was assigned .*is too old; driver .*, torch 2.* for CUDA .*; .* or do x$"
    ):
        assigned_device(["0"], instead="do x")


def test_a_logical_gpu_is_the_cpu_and_says_so_for_tests_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(LOGICAL_GPUS, "1")
    assert assigned_device(["0"], instead="").type == "cpu"
    assert "on the CPU (AIRMOE_LOGICAL_GPUS=1)" in caplog.text
