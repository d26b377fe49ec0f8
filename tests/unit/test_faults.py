"""Fault plans: what is written is what happens, and every mistake is one clear line."""

import itertools
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from regrow.drill.faults import (
    KINDS,
    NODE,
    WORKER,
    Fault,
    RandomFaults,
    check_plan,
    draw_faults,
    from_json,
    may_befall,
    parse_faults,
    parse_plan,
    plan_lines,
    to_json,
)
from regrow.drill.session import nodes_by_now
from regrow.errors import ConfigError


def random_faults(**changes: object) -> RandomFaults:
    wanted = {
        "count": 200,
        "seed": 7,
        "kinds": {"kill_worker": 3, "kill_node": 3, "return_node": 4, "kill_worker and kill_keeper": 1},
        "every_steps": (5, 20),
        "first_step": 10,
        "nodes": 3,
        "least_nodes": 2,
        "most_nodes": 4,
        "host_silence_s": 10.0,
    }
    return RandomFaults(**(wanted | changes))  # type: ignore[arg-type]


def test_a_plan_is_lines_of_when_and_what() -> None:
    plan = parse_plan(
        [
            "at step 20: kill_worker rank=1 and kill_node node=0",
            "after 2.5 s: stop_worker continue_after_s=8",
            "with 4 ranks: kill_worker",
        ]
    )
    assert plan == [
        Fault("kill_worker", at_step=20, rank=1),
        Fault("kill_node", node=0),
        Fault("stop_worker", after_s=2.5, options={"continue_after_s": 8.0}),
        Fault("kill_worker", with_ranks=4),
    ]
    assert plan[2].option("continue_after_s") == 8.0
    assert Fault("drain_node").option("deadline_s") == 15.0


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(sorted(KINDS)))
    options = draw(
        st.fixed_dictionaries({}, optional={key: st.integers(1, 99).map(float) for key in KINDS[kind].options})
    )
    options = {key: value / 100 if key == "share" else value for key, value in options.items()}
    victim = draw(st.sampled_from([None, *{WORKER: ["rank"], NODE: ["rank", "node"], "": []}[KINDS[kind].victim]]))
    return Fault(kind, options=options, **({victim: draw(st.integers(0, 9))} if victim else {}))


@given(st.lists(st.tuples(faults(), st.sampled_from(["step", "after", "ranks", "with"])), max_size=12))
def test_a_plan_reads_back_as_it_was_written(drawn: list[tuple[Fault, str]]) -> None:
    plan: list[Fault] = []
    for number, (fault, trigger) in enumerate(drawn):
        when = "step" if not plan and trigger == "with" else trigger
        moment = {
            "step": {"at_step": 10 + number},
            "after": {"after_s": 0.5 * number},
            "with": {},
            "ranks": {"with_ranks": 4},
        }[when]
        plan.append(Fault(fault.kind, rank=fault.rank, node=fault.node, options=fault.options, **moment))
    assert parse_plan(plan_lines(plan)) == plan
    assert from_json(to_json(plan, seed=3), "plan.json") == (plan, 3)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("kill_worker", "must read 'at step 20: KIND'"),
        ("at step x: kill_worker", "must read"),
        ("at step 20:", "must read"),
        ("at step 20: kill_wroker", "no kind of fault is called 'kill_wroker'; did you mean kill_worker?"),
        ("at step 20: earthquake", "there are kill_worker, stop_worker"),
        ("at step 20: kill_worker node=1", "kill_worker takes rank, not 'node=1'"),
        ("at step 20: kill_coordinator rank=1", "kill_coordinator takes nothing, not 'rank=1'"),
        ("at step 20: kill_worker rank=one", "rank=one is not a finite number"),
        ("at step 20: kill_worker rank=1.5", "rank=1.5 must be a whole number"),
        ("at step 20: slow_worker for_s=-1", "for_s=-1 must be 0 or more"),
        ("at step 20: slow_worker for_s=inf", "for_s=inf is not a finite number"),
        ("at step 20: kill_worker rank=nan", "rank=nan is not a finite number"),
        ("at step 20: slow_worker share=1", "share=1 must be above 0 and below 1"),
        ("at step 20: kill_node rank=1 node=1", "give rank or node, not both"),
        ("at step 0: kill_worker", "steps count from 1"),
    ],
)
def test_a_mistake_in_a_plan_is_one_line_that_names_it(line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        parse_plan([line])
    assert "\n" not in str(caught.value)
    assert line.partition(": ")[2] in str(caught.value)


def test_a_plan_goes_forward() -> None:
    with pytest.raises(ConfigError, match="behind one at step 20"):
        parse_plan(["at step 20: kill_worker", "after 3 s: kill_worker", "at step 19: kill_worker"])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["at step 60: kill_worker"], "the run ends with step 60"),
        (["at step 10: kill_worker rank=3"], "beyond cluster.max_workers=3"),
        (["with 4 ranks: kill_worker"], "would never be due: cluster.max_workers=3"),
        (["at step 10: kill_node node=1", "at step 20: kill_node node=1"], "1 are up by then"),
        (["at step 10: kill_node and kill_node", "at step 20: kill_keeper"], "no node left"),
        (["at step 10: partition_node"], "drill.hosts=apart"),
    ],
)
def test_a_plan_must_fit_its_cluster_and_its_run(lines: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_plan(parse_plan(lines), nodes=2, max_workers=3, last_step=60, apart=False, host_silence_s=10.0)
    check_plan(
        parse_plan(["at step 9: kill_node", "after 3 s: return_node and kill_node node=1"]),
        nodes=2,
        max_workers=3,
        last_step=60,
        apart=False,
        host_silence_s=10.0,
    )


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ("", 1),
        ("kill_after_s=25", 1),
        ("kill_after_s=2 continue_after_s=3", 1),  # the first is done
        ("continue_after_s=3", 2),
        ("continue_after_s=9.9", 2),
        ("continue_after_s=10", 1),
    ],
)
def test_a_silent_node_stays_that_is_continued_before_ray_gives_it_up(given: str, nodes: int) -> None:
    """Counted as gone, a plan was refused that names it later, a random one never had enough, and a drill that was
    gone on with had one node less."""
    line = f"black_hole_node node=0 {given}".strip()
    plan = parse_plan([f"at step 10: {line}", "after 20 s: kill_keeper node=1"])
    fits = {"max_workers": 3, "last_step": 60, "apart": False}
    if nodes == 2:
        check_plan(plan, nodes=2, host_silence_s=10.0, **fits)
    else:
        with pytest.raises(ConfigError, match="1 are up by then"):
            check_plan(plan, nodes=2, host_silence_s=10.0, **fits)
    assert nodes_by_now(2, [{"record": "fault", "kind": "black_hole_node", "what": line}], host_silence_s=10.0) == nodes
    silent = random_faults(count=3, kinds={line: 1}, nodes=3, least_nodes=2)
    if nodes == 2:
        assert len(draw_faults(silent)) == 3
    else:
        with pytest.raises(ConfigError, match="keeps 2 nodes"):
            draw_faults(silent)


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 60))
def test_a_random_plan_keeps_its_bounds_and_a_longer_one_begins_with_it(seed: int, count: int, more: int) -> None:
    plan = draw_faults(random_faults(seed=seed, count=count))
    longer = draw_faults(random_faults(seed=seed, count=count + more))
    assert len(plan) == count
    assert longer[:count] == plan
    assert parse_plan(plan_lines(longer)) == longer
    here, steps = 3, [fault.at_step for fault in longer if fault.at_step is not None]
    for fault in longer:
        here += KINDS[fault.kind].nodes
        assert 2 <= here <= 4
    assert steps[0] == 10
    assert all(5 <= later - earlier <= 20 for earlier, later in itertools.pairwise(steps))


def test_a_random_plan_is_the_same_for_ever() -> None:
    assert plan_lines(draw_faults(random_faults(count=6))) == [
        "at step 10: kill_node",
        "at step 17: return_node",
        "at step 23: kill_node",
        "at step 33: kill_worker",
        "at step 46: kill_worker",
        "at step 57: kill_worker",
    ]


def test_seeds_and_weights_matter() -> None:
    plan = draw_faults(random_faults(count=1000))
    assert plan != draw_faults(random_faults(count=1000, seed=8))
    kinds = [fault.kind for fault in plan]
    assert kinds.count("kill_worker") > 2 * kinds.count("kill_keeper") > 0
    assert min(kinds.count("kill_node"), kinds.count("return_node")) > 100


def test_who_a_fault_may_befall_changes_no_soak_of_a_seed() -> None:
    """Plans of evidence are drawn as they were before some faults took groups of a size."""
    for name in ("soak", "light_soak"):
        plan = yaml.safe_load((Path(__file__).parents[2] / f"conf/drill/{name}.yaml").read_text())["drill"]
        for fault in itertools.chain.from_iterable(map(parse_faults, plan["kinds"])):
            assert all(may_befall(fault, ranks) for ranks in range(plan["most_nodes"] + 1))


def test_a_fault_is_drawn_only_for_groups_that_it_is_for() -> None:
    kinds = {"flip_weights replicas=2": 3, "flip_gradients": 3, "return_node": 3, "kill_node": 2}
    here, drawn = 4, draw_faults(random_faults(count=500, kinds=kinds, nodes=4))
    for fault in drawn:
        assert fault.kind != "flip_weights" or here in (2, 4)
        assert fault.kind != "flip_gradients" or here >= 3
        here += KINDS[fault.kind].nodes
    assert {fault.kind for fault in drawn} == {"flip_weights", "flip_gradients", "return_node", "kill_node"}


def test_a_fault_that_needs_another_node_is_not_drawn_for_the_last_one() -> None:
    """Of three workers each, so that the group is never too small for it."""
    for kind in ("corrupt_snapshot", "partition_peer", "hang_first_step", "dead_mount"):
        kinds = {kind: 3, "return_node": 3, "kill_node": 3}
        here, found = 3, False
        for fault in draw_faults(random_faults(kinds=kinds, least_nodes=1, apart=True, workers_on_node=3)):
            assert fault.kind != kind or here >= 2
            found |= fault.kind == kind
            here += KINDS[fault.kind].nodes
        assert found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kinds": {}}, "must name faults"),
        ({"kinds": {"kill_worker": 0}}, "a weight above 0"),
        ({"kinds": {"kil_worker": 1}}, "did you mean kill_worker?"),
        ({"kinds": {"kill_node": 1}}, "keeps 2 nodes between 2 and 4"),
        ({"every_steps": (20, 5)}, "the smaller one first"),
    ],
)
def test_mistakes_in_what_is_to_be_drawn(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        draw_faults(random_faults(**changes))
