"""What a drill makes of how its job ended, and what an attempt and its hosts begin with."""

import pytest

from regrow.drill.hosts import free_address
from regrow.drill.session import is_in_order, nodes_by_now


@pytest.mark.parametrize(("status", "by_itself", "asked"), [(0, True, True), (130, False, True), (1, False, False)])
def test_a_job_that_was_asked_to_stop_is_to_have_its_newest_step_in_storage(
    status: int, by_itself: bool, asked: bool
) -> None:
    assert is_in_order(status, asked=False) == by_itself
    assert is_in_order(status, asked=True) == asked


def test_a_job_that_had_to_be_killed_did_not_end_in_order() -> None:
    assert not is_in_order(-9, asked=True)


def test_an_attempt_begins_with_the_nodes_that_faults_have_left_and_not_with_those_of_faults_that_could_not_be() -> (
    None
):
    records = [
        {"record": "job started", "why": "start"},
        {"record": "fault", "number": 0, "kind": "kill_node", "what": "kill_node"},
        {"record": "not injected", "number": 1, "kind": "kill_node", "what": "kill_node"},
        {"record": "fault", "number": 2, "kind": "return_node", "what": "return_node"},
        {"record": "fault", "number": 3, "kind": "kill_node", "what": "kill_node"},
    ]
    assert nodes_by_now(3, records, host_silence_s=10.0) == 2


def test_hosts_that_come_and_go_for_long_never_have_the_machines_own_address() -> None:
    """One after another in the place of the one before it, beside a head that stays: more than there are addresses."""
    head = newest = free_address("10.213.7.0", [])
    given = list[str]()
    for _ in range(600):
        newest = free_address(newest, [head, newest])
        given.append(newest)
    assert [head, *given[:2]] == ["10.213.7.1", "10.213.7.2", "10.213.7.3"]
    assert {head, *given} == {f"10.213.7.{byte}" for byte in range(1, 254)}
    assert all(given[at] not in given[at + 1 : at + 252] for at in range(600))  # its traces are gone before it is again
    with pytest.raises(RuntimeError, match="addresses for 253 hosts at once, and all are taken"):
        free_address(newest, [f"10.213.7.{byte}" for byte in range(1, 254)])
