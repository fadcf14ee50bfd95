"""Forty forms of CUDA_VISIBLE_DEVICES, read as in the CUDA programming guide and as torch does."""

from __future__ import annotations

import pytest

from dpmon.gpu.device_record import visible_gpus

A, B, C, D = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932f937-0000-4106-c12f-20bd9faed9f6",
    "GPU-abcdef01-d72c-4106-c12f-20bd9faed9f6",
    "GPU-5a5a5a5a-d72c-4106-c12f-20bd9faed9f6",
)
FOUR = [A, B, C, D]
M = "MIG-11111111-d72c-4106-c12f-20bd9faed9f6"

# Under CUDA_DEVICE_ORDER=PCI_BUS_ID, on a machine with four GPUs.
PLAIN: dict[str | None, list[int]] = {
    None: [0, 1, 2, 3],
    "": [],
    " ": [],
    "0": [0],
    "3": [3],
    "0,1,2,3": [0, 1, 2, 3],
    "3,2,1,0": [3, 2, 1, 0],
    "2,1": [2, 1],
    "0,2,-1,1": [0, 2],
    "-1": [],
    "-1,0": [],
    "0,-1": [0],
    "4": [],
    "0,4,1": [0],
    "99": [],
    "99999999999999999999": [],
    "0,0": [],
    "1,2,1": [],
    " 1 , 2 ": [1, 2],
    "1,": [1],
    ",1": [],
    "0,,1": [0],
    "1abc": [1],
    "1gpu2,2ampere": [1, 2],
    "+1": [1],
    "gpu0": [],
    "all": [],
    "none": [],
    "NoDevFiles": [],
    "0;1": [0],
    "0:1": [0],
    A: [0],
    f"{C},{A}": [2, 0],
    "GPU-abcdef01": [2],
    "GPU-a": [2],
    "GPU-5,GPU-a": [3, 2],
    "GPU-8932f937": [],  # of two
    "GPU-8932f937-d": [0],
    "GPU-": [],
    "GPU-ffff": [],
    f"{A},GPU-ffff,{C}": [0],
    f"{A},{A}": [],
    f"{A},GPU-8932f937-d72c": [],  # the same in two ways
    f"{A},1": [0],
    f"0,{C}": [0],
    f"{A},": [0],
    A.removeprefix("GPU-"): [],  # as an index: 8932
    A.replace("GPU-", "gpu-"): [],
}


@pytest.mark.parametrize("text", PLAIN)
def test_in_nvmls_order(text: str | None) -> None:
    assert visible_gpus(text, "PCI_BUS_ID", FOUR) == [i in PLAIN[text] for i in range(4)]


@pytest.mark.parametrize("text", PLAIN)
def test_torch_reads_it_the_same_way(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("torch.cuda")
    if text is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    parsed = cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = cuda._transform_uuid_to_ordinals(parsed, FOUR)
    seen = []
    for index in parsed:
        if index >= 4:
            break
        seen.append(index)
    assert visible_gpus(text, "PCI_BUS_ID", FOUR) == [i in seen for i in range(4)]


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST", "", "junk"])
@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (None, [True] * 4),
        ("0,1,2,3", [True] * 4),
        ("2,3", [None] * 4),  # the fastest come first, but NVML does not say which these are
        ("0", [None] * 4),
        ("", [False] * 4),
        ("-1", [False] * 4),
        (f"{C},{A}", [True, False, True, False]),  # names do not depend on the order
    ],
)
def test_in_an_unknown_order(order: str | None, text: str | None, visible: list[bool | None]) -> None:
    assert visible_gpus(text, order, FOUR) == visible


def test_one_gpu_has_one_order() -> None:
    assert visible_gpus("0", None, FOUR[:1]) == [True]
    assert visible_gpus("1", None, FOUR[:1]) == [False]
    assert visible_gpus(None, None, []) == []


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (M, [None] * 4),
        (f"MIG-{B}/1/0", [None] * 4),
        (A, [True, False, False, False]),
        ("1", [None] * 4),  # a divided GPU is seen as one of its instances
        (None, [None] * 4),
        ("", [False] * 4),
    ],
)
def test_with_mig(text: str | None, visible: list[bool | None]) -> None:
    assert visible_gpus(text, "PCI_BUS_ID", FOUR, has_mig_instances=True) == visible


def test_a_uuid_that_nvml_does_not_know() -> None:
    assert visible_gpus(A, "PCI_BUS_ID", [A, None]) == [None, None]
