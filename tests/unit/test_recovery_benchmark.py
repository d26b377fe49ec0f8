"""benchmarks/recovery.py: what it makes of steps and samples, without the minutes that it takes."""

import dataclasses
import importlib.util
import json
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from regrow.parallel.compile import graphs_compiled

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recovery", ROOT / "benchmarks" / "recovery.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def steps(benchmark: ModuleType) -> ModuleType:
    return sys.modules["benchmarks.recovery_steps"]


@pytest.fixture(scope="module")
def samples(benchmark: ModuleType) -> ModuleType:
    return sys.modules["benchmarks.recovery_samples"]


@pytest.fixture(scope="module")
def cluster(benchmark: ModuleType) -> ModuleType:
    return sys.modules["benchmarks.recovery_cluster"]


def run_of(steps: ModuleType, first: int, last: int, *, begin: float, group: int, ranks: int = 3) -> list[Any]:
    """A step every half second."""
    return [steps.Step(begin + 0.5 * n, number, group, ranks) for n, number in enumerate(range(first, last + 1))]


def test_training_goes_on_with_the_first_step_past_all_that_was_finished(steps: ModuleType) -> None:
    before = run_of(steps, 1, 10, begin=100.0, group=1)  # the last one ends at 104.5
    assert steps.resumption(before, 1) is None
    again = run_of(steps, 8, 10, begin=106.0, group=2, ranks=2)
    assert steps.resumption(before + again, 1) is None
    new = run_of(steps, 11, 12, begin=107.5, group=2, ranks=2)
    found = steps.resumption(before + again + new, 1)
    assert (found.any_at, found.new_at, found.lost_steps, found.world_size) == (106.0, 107.5, 3, 2)
    assert found.stood_still_s == pytest.approx(2.5)


def test_where_nothing_is_lost_the_first_step_is_a_new_one(steps: ModuleType) -> None:
    before = run_of(steps, 1, 10, begin=100.0, group=1)
    found = steps.resumption(before + run_of(steps, 11, 12, begin=105.1, group=2), 1)
    assert (found.any_at, found.new_at, found.lost_steps) == (105.1, 105.1, 0)
    assert found.stood_still_s == pytest.approx(0.1)


def test_a_step_that_the_old_group_still_finishes_is_not_its_recovery(steps: ModuleType) -> None:
    """The fault is at 104.6; step 11 was about to end, and is trained again."""
    before = run_of(steps, 1, 11, begin=100.0, group=1)
    assert before[-1].time == 105.0
    found = steps.resumption(before + run_of(steps, 11, 12, begin=108.0, group=2), 1)
    assert (found.any_at, found.new_at, found.lost_steps) == (108.0, 108.5, 1)


def test_groups_that_fail_again_count_as_waiting_and_their_steps_as_lost(steps: ModuleType) -> None:
    before = run_of(steps, 1, 10, begin=100.0, group=1)
    second = run_of(steps, 9, 10, begin=106.0, group=2)
    fourth = run_of(steps, 6, 12, begin=120.0, group=4)
    found = steps.resumption(before + second + fourth, 1)
    assert (found.any_at, found.new_at, found.lost_steps) == (106.0, 122.5, 5)


def test_a_groups_median_step_is_of_its_last_twenty(steps: ModuleType) -> None:
    slow = [steps.Step(10.0 * n, n + 1, 1, 3) for n in range(15)]
    after = run_of(steps, 16, 36, begin=1000.0, group=1)
    assert steps.median_step_s(slow + after, 1) == pytest.approx(0.5)
    other = [steps.Step(2000.0 + 9 * n, 37 + n, 2, 3) for n in range(3)]
    assert steps.median_step_s(slow + after + other, 1) == pytest.approx(0.5)
    assert steps.median_step_s(slow + after + other, 2) == pytest.approx(9.0)


def test_a_trail_knows_steps_that_were_taken_back(steps: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    trail = steps.Trail(file, lambda row: steps.Step(**row))
    assert trail.look() == []
    first = run_of(steps, 1, 5, begin=100.0, group=1)
    lines = [json.dumps(dataclasses.asdict(step)) + "\n" for step in first]
    file.write_text("".join(lines[:3]) + lines[3][:10])
    assert trail.look() == first[:3], "a line that is being written waits"
    file.write_text("".join(lines))
    assert trail.look() == first
    second = run_of(steps, 5, 6, begin=110.0, group=2)
    rewritten = tmp_path / "new"
    rewritten.write_text("".join(lines[:4]))
    rewritten.replace(file)
    with open(file, "a") as more:
        more.writelines(json.dumps(dataclasses.asdict(step)) + "\n" for step in second)
    assert trail.look() == first + second


def sample(samples: ModuleType, side: str, fault: str, new_step_s: float | None, **more: Any) -> Any:
    none = new_step_s is None
    given = {
        "round": 0,
        "any_step_s": new_step_s,
        "visible_s": 1.0 if fault == "node_kill" else None,
        "lost_steps": None if none else 0,
        "stood_still_s": None if none else 0.6,
        "step_s": 0.4,
        "waited_s": 60.0,
        "ranks": (3, 0 if none else 2),
        "load": 1.0,
        **more,
    }
    return samples.Sample(side=side, fault=fault, new_step_s=new_step_s, **given)


def test_figures_are_medians_and_their_ratios(samples: ModuleType) -> None:
    measured = [
        *(sample(samples, "ours", "node_kill", seconds) for seconds in (1.5, 2.0, 4.0)),
        *(sample(samples, "ours", "worker_kill", seconds, lost_steps=1) for seconds in (0.5, 1.0)),
        sample(samples, "ours", "hang", 4.5),
        sample(samples, "ours", "regrow", 9.0, restore_s=0.2),
        *(sample(samples, "tuned", "node_kill", seconds, lost_steps=4) for seconds in (8.0, 10.0)),
        sample(samples, "tuned", "worker_kill", 7.5),
        sample(samples, "default", "node_kill", 80.0),
        sample(samples, "default", "hang", None),
    ]
    result = samples.summarize(measured, [0, 1])
    assert result.figures == pytest.approx(
        {
            "node_kill_s": 2.0,
            "worker_kill_s": 0.75,
            "hang_s": 4.5,
            "hang_minus_5_steps_s": 2.5,
            "regrow_s": 9.0,
            "regrow_stall_steps": 1.5,
            "regrow_stall_but_restore_steps": 1.0,
            "node_kill_vs_tuned_stock": 2.0 / 9.0,
            "node_kill_vs_default_stock": 2.0 / 80.0,
            "worker_kill_vs_tuned_stock": 0.1,
            "first_step_after_death_visible_s": 1.0,
            "lost_steps_max": 1,
            "recompiles": 1,
        }
    )
    assert result.spread["node_kill_vs_tuned_stock"] == pytest.approx([1.5 / 10.0, 4.0 / 8.0])
    assert result.peers["tuned_node_kill_s"]["all"] == [8.0, 10.0]
    assert result.peers["tuned_node_kill_lost_steps"]["median"] == 4
    assert result.peers["default_hang_s"] == {"not_within_s": [60.0]}


def test_ours_on_ray_as_it_comes_is_put_beside_ours_and_beside_ray_train_as_it_comes(samples: ModuleType) -> None:
    measured = [
        *(sample(samples, "ours", "node_kill", seconds) for seconds in (1.5, 2.0, 4.0)),
        *(sample(samples, "ours_default", "node_kill", seconds, lost_steps=1) for seconds in (3.0, 5.0, 6.0)),
        *(sample(samples, "default", "node_kill", seconds) for seconds in (50.0, 80.0)),
    ]
    result = samples.summarize(measured, [])
    figures = {name: value for name, value in result.figures.items() if name.startswith("ours_default")}
    assert figures == pytest.approx(
        {
            "ours_default_node_kill_s": 5.0,
            "ours_default_vs_ours_node_kill": 2.5,
            "ours_default_vs_default_stock_node_kill": 5.0 / 65.0,
            "ours_default_lost_steps_max": 1,
        }
    )
    assert result.spread["ours_default_vs_default_stock_node_kill"] == pytest.approx([3.0 / 80.0, 6.0 / 50.0])
    assert len(result.runs["ours_default"]) == 3


def test_ray_looks_after_its_nodes_as_it_comes_for_the_two_sides_that_say_so(benchmark: ModuleType) -> None:
    of_side = {side: benchmark.environment_of(side) for side in benchmark.SIDES}
    hurried = [side for side, found in of_side.items() if any("health_check_period" in name for name in found)]
    assert hurried == ["tuned", "ours", "asynchronous"]


def test_a_side_alone_gives_its_own_figures(samples: ModuleType) -> None:
    result = samples.summarize([sample(samples, "tuned", "node_kill", 8.0)], [])
    assert result.figures == {}
    assert result.peers["tuned_node_kill_s"]["median"] == 8.0


def test_samples_come_back_from_json_as_they_went(samples: ModuleType) -> None:
    measured = [sample(samples, "ours", "node_kill", 1.5), sample(samples, "default", "hang", None)]
    assert [samples.Sample.of(json.loads(json.dumps(each.row()))) for each in measured] == measured
    assert "no new step within 60 s" in samples.describe(measured[1])


EVERY_FAULT = ["worker_kill", "node_kill", "regrow", "hang"]


def test_rounds_go_from_side_to_side(benchmark: ModuleType) -> None:
    runs = benchmark.plan_runs({"default": 2, "tuned": 2, "ours": 2}, [], quick=False)
    assert [run.side for run in runs] == ["default", "tuned", "ours"] * 2
    for number, run in enumerate(runs):
        assert run.faults == tuple((number // 3, fault) for fault in EVERY_FAULT)


def test_a_quick_run_has_the_rounds_that_it_promises(benchmark: ModuleType) -> None:
    runs = benchmark.plan_runs(benchmark.QUICK_ROUNDS, [], quick=True)
    killed = {
        side: [number for run in runs if run.side == side for number, fault in run.faults if fault == "node_kill"]
        for side in benchmark.SIDES
    }
    five = [0, 1, 2, 3, 4]
    ours = {"ours": five, "asynchronous": five, "ours_default": five}
    assert killed == {"default": [0], "tuned": [0, 1, 2], **ours}
    ours = [[fault for _, fault in run.faults] for run in runs if run.side == "ours"]
    assert all(faults[-1] == "hang" and faults.count("hang") == 1 for faults in ours)


def test_rounds_that_are_whole_are_not_run_again(benchmark: ModuleType, samples: ModuleType) -> None:
    whole = [sample(samples, "tuned", fault, 8.0, round=0) for fault in EVERY_FAULT]
    begun = [sample(samples, "tuned", "worker_kill", 8.0, round=1)]
    runs = benchmark.plan_runs({"tuned": 3}, whole + begun, quick=False)
    assert [run.faults[0] for run in runs] == [(1, "worker_kill"), (2, "worker_kill")]
    assert benchmark.plan_runs({"tuned": 1}, whole, quick=True) == []


def test_graphs_are_counted_in_processes_that_saw_it_all(samples: ModuleType) -> None:
    def group(**graphs: int) -> dict[str, Any]:
        return {"workers": [{"pid": pid, "graphs": count} for pid, count in graphs.items()]}

    groups = [group(a=0, b=0, c=0), group(a=1, b=1), group(a=1, b=2, d=0), group(a=1, b=3)]
    assert samples.graphs_compiled(groups) == [0, 2]


def test_a_process_counts_the_graphs_that_it_compiles() -> None:
    before = graphs_compiled()
    double = torch.compile(lambda x: 2 * x, backend="eager")
    for size in (2, 2, 3, 4):  # the second size makes the third one's graph
        double(torch.ones(size))
    assert graphs_compiled() == before + 2


def test_it_is_noted_when_something_is_first_so(cluster: ModuleType) -> None:
    so = threading.Event()
    watch = cluster.Watch(so.is_set)
    assert watch.at is None
    began_at = time.time()
    so.set()
    watch.join(5)
    assert watch.at is not None
    assert 0 <= watch.at - began_at < 5
