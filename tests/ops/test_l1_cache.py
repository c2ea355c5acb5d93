"""How much shared memory a kernel asks for; what the hint does is measured by the benchmarks."""

import pytest
import torch

from torch_paged.ops.l1_cache import carveout_percent, prefer_l1

H200_BYTES = 233472


@pytest.mark.parametrize(
    ("shared", "registers", "warps", "blocks"),
    [
        (32, 64, 4, 8),  # 8 blocks of 128 threads fill the registers
        (2048, 114, 4, 4),  # 120 registers are allotted
        (4096, 255, 8, 1),
        (0, 16, 4, 16),  # the warps run out first
        (100_000, 255, 16, 1),  # never less than one block
    ],
)
def test_blocks_that_fit_the_registers_get_their_shared_memory(shared, registers, warps, blocks):
    percent = carveout_percent(shared, registers, warps, H200_BYTES)
    need = blocks * (shared + 1024)
    assert percent - 1 < 100 * need / H200_BYTES <= percent


def test_no_more_than_everything_is_asked_for():
    assert carveout_percent(65536, 32, 4, H200_BYTES) == 100


def test_interpreted_kernels_are_left_alone():
    prefer_l1(None, torch.device("cpu"))
