"""What is said after a lack of memory, and after /dev/shm was full."""

from __future__ import annotations

import shutil

import pytest

from dpmon.text.formatting import format_bytes
from support.run_harness import Dpmon

pytestmark = pytest.mark.slow

LIMITED = """
import resource, time, torch
net = torch.nn.Linear(8, 8)
for _ in range(10):
    net(torch.ones(4, 8)).sum().backward()
    time.sleep(0.15)
_, size = (int(word) for word in open("/proc/self/statm").read().split()[:2])
resource.setrlimit(resource.RLIMIT_AS, ((size * 4096) + (3 << 30), -1))
{fails}
"""
FAILURES = {
    "MemoryError": ("held = bytearray(1 << 40)", "MemoryError (script.py:9); the run used "),
    "torch": ("held = torch.empty(1 << 40, dtype=torch.uint8)", "(script.py:9); the run used "),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_lack_of_host_memory(dpmon: Dpmon, name: str) -> None:
    fails, said = FAILURES[name]
    run = dpmon.run(*dpmon.warm(), "--headless", dpmon.script(LIMITED.format(fails=fails)))
    assert run.status == 1
    cause = dpmon.exit()["cause"]
    assert said in cause
    assert cause.endswith(" were free")
    assert said in run.errors
    report = " ".join(dpmon.run("report").text.split())
    assert "consequences of it; the run used" in report


SHARED = """
import torch
net = torch.nn.Linear(8, 8)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 40:
            raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device")
        return torch.ones(8)
for x in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1):
    net(x).sum().backward()
"""


def test_a_full_dev_shm(dpmon: Dpmon) -> None:
    run = dpmon.run(*dpmon.warm(), "--headless", dpmon.script(SHARED))
    total = format_bytes(shutil.disk_usage("/dev/shm").total)
    assert run.status == 1
    assert f" of {total} in /dev/shm were used" in dpmon.exit()["cause"]
