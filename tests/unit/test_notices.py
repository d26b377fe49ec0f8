"""Nodes that are left in time, and nodes that are left alone."""

from regrow.control.membership import Member, Membership
from regrow.control.nodes import MARGIN_S, Exclusions


def made() -> Exclusions:
    return Exclusions(failures=3, within_s=3600.0, quarantine_s=600.0)


def test_a_node_that_is_drained_is_left_before_its_deadline_and_used_until_then() -> None:
    notices = made()
    assert notices.draining({"a": 1000.0}) == ["a"]
    assert notices.draining({"a": 1000.0, "b": 50.0}) == ["b"]
    assert notices.excluded(1000.0 - MARGIN_S - 1) == {"b"}
    assert notices.excluded(1000.0 - MARGIN_S + 1) == {"a", "b"}
    assert notices.draining({}) == []  # gone, or no longer to go
    assert notices.excluded(1000.0) == set()


def test_a_node_that_fails_again_and_again_is_barred_for_a_while() -> None:
    notices = made()
    assert [notices.failed("a", at) for at in (0.0, 10.0, 20.0)] == [False, False, True]
    assert notices.excluded(21.0) == {"a"}
    assert notices.excluded(20.0 + 601.0) == set()
    assert not notices.failed("a", 700.0)  # it starts from nothing


def test_failures_far_apart_do_not_add_up_and_nodes_are_counted_by_themselves() -> None:
    notices = made()
    assert not any(notices.failed("a", at) for at in (0.0, 3000.0, 6000.0, 9000.0))
    assert not any(notices.failed(node, 0.0) for node in "bcdbcd")
    assert not any(Exclusions(0, 3600.0, 600.0).failed("a", at) for at in range(100))


def group(nodes: str, sizes: range) -> Membership:
    membership = Membership(sizes)
    for node in nodes:
        membership.join(Member(f"m{node}", node, "127.0.0.1", 1, 1), expected=len(nodes), now=0.0)
    assert membership.form(0.0) is not None
    return membership


def come_again(membership: Membership, now: float) -> list[str]:
    for member in membership.survivors:
        membership.join(member, expected=1, now=now)
    formation = membership.form(now)
    return [member.node for member in formation.members] if formation else []


def test_a_group_leaves_an_avoided_node_whose_process_waits_and_comes_back_when_it_may() -> None:
    membership = group("abc", range(2, 5))
    assert not membership.wants_to_leave_nodes()
    membership.avoided = {"b"}
    assert membership.wants_to_leave_nodes()
    assert come_again(membership, 10.0) == ["a", "c"]
    assert not membership.wants_to_leave_nodes()
    assert not membership.wants_to_grow(100.0)
    membership.avoided = set()
    assert membership.wants_to_grow(100.0)
    assert come_again(membership, 101.0) == ["a", "c", "b"]


def test_a_group_stays_where_it_cannot_do_without() -> None:
    membership = group("abc", range(3, 5))
    membership.avoided = {"b"}
    assert not membership.wants_to_leave_nodes()
    assert come_again(membership, 10.0) == ["a", "b", "c"]


def test_a_spare_takes_the_place_of_a_lost_one() -> None:
    membership = group("abcd", range(2, 4))  # one more than the largest size
    assert [member.node for member in membership.current] == ["a", "b", "c"]
    membership.died(["mb"])
    assert come_again(membership, 10.0) == ["a", "c", "d"]
