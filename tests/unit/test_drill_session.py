"""What a drill makes of how its job ended."""

import pytest

from regrow.drill.session import is_in_order


@pytest.mark.parametrize(("status", "by_itself", "asked"), [(0, True, True), (130, False, True), (1, False, False)])
def test_a_job_that_was_asked_to_stop_is_to_have_its_newest_step_in_storage(
    status: int, by_itself: bool, asked: bool
) -> None:
    assert is_in_order(status, asked=False) == by_itself
    assert is_in_order(status, asked=True) == asked


def test_a_job_that_had_to_be_killed_did_not_end_in_order() -> None:
    assert not is_in_order(-9, asked=True)
