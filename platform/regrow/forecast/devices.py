"""What GPUs offer, from NVIDIA's data sheets: dense arithmetic, memory, links within a node; what steps get. Pure."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Shares:
    """Of what a device offers, what a training step gets of it, all it waits for and launches included."""

    matmul: float  # of the peak, by large matrix products
    float8: float  # and by those in float8, of theirs
    attention: float  # and by fused attention, forward and backward
    memory: float


# fitted to forecast/calibration.py, attention held at what FlashAttention 2, which those ran, gets on Hopper
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


# a name that contains another one stands before it
DEVICES = (
    Device("H100 PCIe", 79 * GIB, 756e12, 1513e12, 2.04e12, 64e9),
    Device("H100 NVL", 93 * GIB, 835e12, 1671e12, 3.94e12, 300e9),
    Device("H100", 79 * GIB, 989e12, 1979e12, 3.35e12, 450e9),
    Device("GH200 144G", 140 * GIB, 989e12, 1979e12, 4.9e12, 450e9),
    Device("GH200", 95 * GIB, 989e12, 1979e12, 4.0e12, 450e9),  # its name ends in 480GB, which is the host's
    Device("H200", 140 * GIB, 989e12, 1979e12, 4.8e12, 450e9),
    Device("A100-PCIE-40GB", 39 * GIB, 312e12, 312e12, 1.555e12, 64e9),
    Device("A100-SXM4-40GB", 39 * GIB, 312e12, 312e12, 1.555e12, 300e9),
    Device("A100", 79 * GIB, 312e12, 312e12, 2.04e12, 300e9),
    Device("B200", 178 * GIB, 2250e12, 4500e12, 7.7e12, 900e9),
)


def find_device(text: str) -> Device | None:
    """The first device whose name a text contains, in any case.

    >>> find_device("NVIDIA H100 80GB HBM3").memory_bytes // GIB
    79
    >>> find_device("h200x8").name
    'H200'
    """
    return next((device for device in DEVICES if device.name.lower() in text.lower()), None)
