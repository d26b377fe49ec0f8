"""Training speeds that others published, on which forecasts are calibrated. Data; tests/unit/test_forecast.py compares.

Sources: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3, selective checkpointing) and
llama3_8b_h200_2025-06_torchtitan.md (by Trainy); IBM and Meta, "Supercharging Training using float8 and FSDP2" (2024),
which gives no rows and lengths for each: 4,096 tokens are taken, and rows that fit.
"""

from dataclasses import dataclass

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
