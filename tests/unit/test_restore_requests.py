"""What a restore reads and asks for at sizes that cannot be had here: planned from boxes, on a storage that counts."""

import pytest
from benchmarks.restore_requests import CASES, count

TO_COLUMNS = "8b fsdp 64 to tp 8 x 7"  # rows written whole, columns read: more requests (decision 43)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.long if name.startswith("405b") else ())
        for name in CASES
        if name != TO_COLUMNS
    ],
)
def test_a_rank_reads_what_it_needs_by_few_requests_and_little_metadata(case: str) -> None:
    found = count(*CASES[case])
    assert found["read_over_needed"] <= 1.02
    assert found["most_read_for_nothing_over_share"] <= 0.02, (
        "of an even share, also where a rank needs next to nothing"
    )
    assert found["requests"] <= 64
    assert found["metadata_bytes"] <= 4e6


def test_a_change_from_rows_to_columns_reads_little_more_than_it_needs() -> None:
    found = count(*CASES[TO_COLUMNS])
    assert found["read_over_needed"] <= 1.1
    assert found["metadata_bytes"] <= 4e6
