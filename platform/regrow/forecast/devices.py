"""What GPUs offer, from NVIDIA's data sheets: dense arithmetic, memory, links within a node; what steps get. Pure.

What steps get is calibrated on speeds that others published; tests/unit/test_forecast.py compares. Their sources:
torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3, selective checkpointing) and
llama3_8b_h200_2025-06_torchtitan.md (by Trainy); IBM and Meta, "Supercharging Training using float8 and FSDP2" (2024),
which gives no rows and lengths for each: 4,096 tokens are taken, and rows that fit.
"""

import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Shares:
    """Of what a device offers, what a training step gets of it, all it waits for and launches included."""

    matmul: float  # of the peak, by large matrix products
    float8: float  # and by those in float8, of theirs
    attention: float  # and by fused attention, forward and backward
    memory: float


# fitted to PUBLISHED, attention held at what FlashAttention 2, which those ran, gets on Hopper
PUBLISHED_SHARES = Shares(matmul=0.45, float8=0.38, attention=0.3, memory=0.65)
# of a peak that is itself a measured matrix product; benchmarks/step.py's 5M parameters reached an MFU of 0.58
MEASURED_SHARES = Shares(matmul=0.62, float8=0.55, attention=0.4, memory=0.8)


@dataclass(frozen=True)
class Device:
    """One GPU, or one worker's share of a machine without."""

    name: str  # as torch gives it, or a part of it
    memory_bytes: int  # that programs can have
    flops: float  # a second, bfloat16
    float8_flops: float  # a second; without float8 units as bfloat16
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the others of its node, one way
    shares: Shares = PUBLISHED_SHARES
    has_float8: bool = True  # multiplies float8 matrices, or emulates that as a CPU does


# A name that contains another one stands before it. Dense figures are half of what data sheets have with sparsity.
# H200 NVL's 1,671 and 3,341 TFLOPS are taken from NVIDIA's H200 page, not looked up again; GB200's, B300's and GB300's
# from the data sheets of GB200 NVL72, GB300 NVL72 and HGX as others quote them (186, 270 and 279 GB).
DEVICES = (
    Device("H100 PCIe", 79 * GIB, 756e12, 1513e12, 2.04e12, 64e9),
    Device("H100 NVL", 93 * GIB, 835e12, 1671e12, 3.94e12, 300e9),
    Device("H100", 79 * GIB, 989e12, 1979e12, 3.35e12, 450e9),
    Device("GH200 144G", 140 * GIB, 989e12, 1979e12, 4.9e12, 450e9),
    Device("GH200", 95 * GIB, 989e12, 1979e12, 4.0e12, 450e9),  # its name ends in 480GB, which is the host's
    Device("H200 NVL", 140 * GIB, 835e12, 1671e12, 4.8e12, 450e9),
    Device("H200", 140 * GIB, 989e12, 1979e12, 4.8e12, 450e9),
    Device("A100-PCIE-40GB", 39 * GIB, 312e12, 312e12, 1.555e12, 32e9, has_float8=False),
    Device("A100-SXM4-40GB", 39 * GIB, 312e12, 312e12, 1.555e12, 300e9, has_float8=False),
    Device("A100 80GB PCIe", 79 * GIB, 312e12, 312e12, 1.935e12, 32e9, has_float8=False),
    Device("A100", 79 * GIB, 312e12, 312e12, 2.04e12, 300e9, has_float8=False),
    Device("GB300", 277 * GIB, 2500e12, 5000e12, 8.0e12, 900e9),
    Device("B300", 268 * GIB, 2250e12, 4500e12, 7.7e12, 900e9),
    Device("GB200", 184 * GIB, 2500e12, 5000e12, 8.0e12, 900e9),
    Device("B200", 178 * GIB, 2250e12, 4500e12, 7.7e12, 900e9),
)


def find_device(text: str) -> Device | None:
    """The first device whose name a text contains, in any case and with no further digit: an A1000 is no A100. None
    for a part of one, by MIG.

    >>> find_device("NVIDIA H100 80GB HBM3").memory_bytes // GIB
    79
    >>> find_device("h200x8").name
    'H200'
    """
    if re.search(r"\bMIG\b", text):
        return None
    return next((each for each in DEVICES if re.search(rf"{each.name}(?!\d)", text, re.IGNORECASE)), None)


WITHIN = 0.15  # of each figure below, what a forecast gives for it


@dataclass(frozen=True)
class Published:
    """One run of others."""

    model: str  # of conf/model
    device: str
    gpus: int
    seqs: int  # of one GPU's pass, of which a step has one
    seq_len: int
    compiled: bool
    float8: bool  # tensorwise, the parameters gathered in float8
    checkpointed: bool  # selectively
    tokens_per_s: int  # of one GPU
    memory_bytes_per_s: float | None = None  # where it is not the data sheet's


def _torchtitan(gpus: int, tokens_per_s: int, *, compiled: bool, float8: bool) -> Published:
    """H100s with 96 GB of HBM2e, limited to 500 W."""
    return Published("8b", "H100", gpus, 2, 8192, compiled, float8, True, tokens_per_s, 2.4e12)


PUBLISHED = (
    _torchtitan(8, 5762, compiled=False, float8=False),
    _torchtitan(8, 6667, compiled=True, float8=False),
    _torchtitan(8, 8532, compiled=True, float8=True),
    _torchtitan(128, 5605, compiled=False, float8=False),
    _torchtitan(128, 6514, compiled=True, float8=False),
    _torchtitan(128, 8380, compiled=True, float8=True),
    Published("8b", "H200", 32, 2, 8192, True, True, True, 10938),
    Published("8b", "H200", 64, 2, 8192, True, True, True, 10753),
    Published("1_8b", "H100", 128, 2, 4096, True, False, False, 29000),
    Published("1_8b", "H100", 128, 2, 4096, True, True, False, 35000),
    Published("8b", "H100", 128, 1, 4096, True, False, True, 8000),
    Published("8b", "H100", 128, 1, 4096, True, True, True, 10000),
)

CALIBRATED_ON = (
    f"calibrated on what {len(PUBLISHED)} published runs reached, each within {WITHIN:.0%}: torchtitan's 8B on 8 and "
    "128 H100s of 500 W and on 32 and 64 H200s, IBM's 1.8B and 8B on H100s; elsewhere they are a guess"
)
