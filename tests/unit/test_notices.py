"""Nodes that are left in time, and nodes that are left alone."""

from dataclasses import replace

from regrow.control import events as e
from regrow.control.membership import LAST_CALL_S, Member, Membership
from regrow.control.nodes import MARGIN_S, Exclusions
from support.told import Told, one


def made() -> Exclusions:
    return Exclusions(failures=3, within_s=3600.0, quarantine_s=600.0)


def test_a_node_that_is_drained_is_left_before_its_deadline_and_used_until_then() -> None:
    notices = made()
    assert notices.draining({"a": 1000.0}) == ["a"]
    assert notices.draining({"a": 1000.0, "b": 50.0}) == ["b"]
    assert notices.leaving(1000.0 - MARGIN_S - 1) == {"b"}
    assert notices.leaving(1000.0 - MARGIN_S + 1) == {"a", "b"}
    assert notices.draining({}) == []  # gone, or no longer to go
    assert notices.leaving(1000.0) == set()


def test_a_node_is_left_some_steps_before_its_deadline_where_steps_are_long() -> None:
    """Ranks of a device act on what they are told about three steps later; 10 s are no step of 24 s."""
    told = Told()
    told.form(one(1, "a"), one(2, "goes"))
    for node in ("a", "goes"):
        told(e.KeeperUp(node, node, (node, 1)))
    told(e.Began(1, 0, ("a", "goes"), {"restore_s": 9.0}))
    deadline = told.now + 300.0
    told(e.Notice({"goes": deadline}))
    asked = next(told.now for step in range(1, 20) if (told_to_leave(told, step, step_s=24.0)))
    assert deadline - asked >= 4 * 24.0 + 9.0 - 24.0, "the row before was too early to ask"
    left_at = asked + 3 * 24.0
    assert left_at + 9.0 <= deadline
    quick = Told()
    quick.form(one(1, "a"), one(2, "goes"))
    quick.begin(["a", "goes"])
    deadline = quick.now + 30.0
    quick(e.Notice({"goes": deadline}))
    asked = next(quick.now for step in range(1, 200) if told_to_leave(quick, step, step_s=0.5))
    assert MARGIN_S - 0.5 <= deadline - asked <= MARGIN_S


def told_to_leave(told: Told, step: int, *, step_s: float) -> bool:
    told.now += step_s
    return told.row(step, step_s=step_s, data_wait_s=0.0, snapshot_s=0.0) == "drain"


def test_a_node_that_fails_again_and_again_is_barred_for_a_while() -> None:
    notices = made()
    assert [notices.failed("a", at) for at in (0.0, 10.0, 20.0)] == [False, False, True]
    assert notices.quarantined(21.0) == {"a"}
    assert notices.quarantined(20.0 + 601.0) == set()
    assert not notices.failed("a", 700.0)  # it starts from nothing


def test_failures_far_apart_do_not_add_up_and_nodes_are_counted_by_themselves() -> None:
    notices = made()
    assert not any(notices.failed("a", at) for at in (0.0, 3000.0, 6000.0, 9000.0))
    assert not any(notices.failed(node, 0.0) for node in "bcdbcd")
    never = Exclusions(0, 3600.0, 600.0)
    assert not any(never.failed("a", at) for at in range(100))
    assert never.quarantined(100.0) == set()


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


# hosts, which come back as other nodes


def on_host(pid: int, node: str, machine: str) -> Member:
    return replace(one(pid, node), machine=machine)


def test_a_host_whose_raylet_dies_again_and_again_is_quarantined_though_each_is_another_node() -> None:
    """A pod that is started anew, too: `REGROW_NODE_NAME` is its host's."""
    told = Told(quarantine_failures=3)
    a, b = on_host(1, "a", "host-a"), on_host(2, "b", "host-b")
    told.form(a, b)
    for number in range(3):
        assert told.control.excluded_nodes(told.now) == set()
        pid, node = 10 + number, f"life-{number}"
        told.form(a, b, on_host(pid, node, "flapping"))
        told.begin(["a", "b", node])
        told.row(told.control.next_step)
        told(e.Died(((node, pid),), 2, "worker_died", "its raylet died"))
        told.now += 600.0
    (quarantine,) = told.records("quarantine")
    assert (quarantine["node"], quarantine["host"]) == ("life-2", "flapping")
    told.form(a, b)
    told.begin(["a", "b"])
    told.clear()
    told(e.Joined(on_host(20, "life-3", "flapping"), 3))
    assert told.ask("m20").unfit, "to be started elsewhere, where there is room"
    assert "life-3" in told.control.excluded_nodes(told.now)
    told.now += 10.0
    assert told.row(told.control.next_step) == "", "the others do not stop for it"


def test_raylets_that_share_a_machine_are_counted_each_by_itself() -> None:
    told = Told(quarantine_failures=1)
    told.form(*(on_host(pid, node, "laptop") for pid, node in enumerate("abc")))
    told(e.Died((("c", 2),), 2, "worker_died", "gone"))
    assert told.control.excluded_nodes(told.now) == {"c"}
    told.form(on_host(0, "a", "laptop"), on_host(1, "b", "laptop"))
    told.join(on_host(9, "c", "laptop"))
    assert told.ask("m9").unfit, "it waited there for as long as the quarantine, and none was started elsewhere"
    told.join(on_host(10, "b", "laptop"))
    assert not told.ask("m10").unfit


def test_a_newcomer_that_is_left_out_for_its_silence_counts_as_a_failure_of_its_host() -> None:
    told = Told(quarantine_failures=1)
    told.form(one(1, "a"), one(2, "b"))
    told.begin("ab")
    told.row(1)
    told.form(one(1, "a"), one(2, "b"), one(3, "new"))
    told.join(one(1, "a"), one(2, "b"))
    told.now += 120.0
    told.ask("m1", 2)
    told.now += LAST_CALL_S
    assert told.ask("m1", 2).formation is not None
    assert told.control.excluded_nodes(told.now) == {"new"}
