"""Runs scenarios of `outlive` and judges them: what lives, how soon, in the same process, and what it believed."""

import time
from dataclasses import dataclass
from functools import partial

from regrow.accept.claims import Report
from regrow.accept.outlive import Fault, Outlived, Scenario, outlive, who_goes_on
from regrow.accept.ranks import Ranks

START_S = 150.0  # for ranks to import, compile, train, be disturbed and go on
HEARTBEAT_S = (
    30  # of torch's monitor thread, instead of 480: what would end a survivor then, ends it while it is watched
)


@dataclass(frozen=True)
class Row:
    """One claim of a matrix."""

    name: str  # of the claim
    num_ranks: int
    scenario: Scenario
    tolerance: float = 1e-4  # of a certified loss against the same step of the next group
    free_s: float = 12.0
    first_step_s: float = 15.0
    may_end: bool = False  # a survivor may end itself instead: all start anew then


def run_matrix(
    report: Report, rows: list[Row], *, device_type: str, settle_s: float, environment: dict[str, str] | None = None
) -> None:
    """A row after the other; the survivors of all of them stay until `settle_s` after the last one."""
    settings = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT_S)} | (environment or {})
    running: list[tuple[Row, Ranks, list[int], str]] = []
    try:
        for row in rows:
            report.begun(row.name, "was begun and did not come to its end")
            ranks = Ranks(outlive, row.num_ranks, row.scenario, device_type=device_type, environment=settings)
            running.append((row, ranks, (left := who_goes_on(row.num_ranks, row.scenario)), ""))
            if not ranks.wait(partial(has_come_to_an_end, ranks, left), START_S):
                running[-1] = (row, ranks, left, f"within {START_S:.0f} s not all went on")
            for rank in set(range(row.num_ranks)) - set(left):  # a rank that hangs in a loop takes a core
                ranks.processes[rank].kill()
            report.begun(row.name, "survivors went on, and were not watched to the end")
        ends_at = time.monotonic() + settle_s
        while time.monotonic() < ends_at:
            for _, ranks, _, _ in running:
                ranks.look()
            time.sleep(0.2)
        for row, ranks, left, why in running:
            judge(report, row, ranks, left, why, settle_s)
    finally:
        for _, ranks, _, _ in running:
            ranks.kill()


def has_come_to_an_end(ranks: Ranks, left: list[int]) -> bool:
    """All of these went on or are no more: what a watchdog ended is not waited for."""
    return bool(ranks.failed()) or all(ranks.went_on(rank) or not ranks.is_alive(rank) for rank in left)


def judge(report: Report, row: Row, ranks: Ranks, left: list[int], why: str, settle_s: float) -> None:
    if row.may_end and (ended := [rank for rank in left if ranks.ended_itself(rank)]):
        hang = [rank for rank in left if rank not in ended and ranks.is_alive(rank) and not ranks.went_on(rank)]
        figure = f"{len(ended)} of {len(left)} ended themselves, for a start anew; {len(hang)} hang"
        report.found(row.name, not hang, figure, "a survivor hangs")
        return
    alive = [rank for rank in left if ranks.is_alive(rank)]
    lived = f"{len(alive)} of {len(left)} alive {settle_s:.0f} s later"
    ranks.store.set("release", "")
    ranks.finish(alive, 20.0)
    try:
        found: list[Outlived] = [ranks.result(rank) for rank in left]
    except RuntimeError as error:
        report.found(row.name, False, lived, why or str(error))
        return
    free_s, first_s = max(each.free_s for each in found), max(each.first_step_s for each in found)
    certified = sorted({step for each in found for step in each.losses})
    figure = f"{lived}; device free after {free_s:.1f} s, first new step after {first_s:.1f} s"
    if row.scenario.fault in (Fault.none, Fault.late):
        figure = f"{lived}; {len(certified)} steps"
        if any(each.said for each in found):
            why = why or f"it cost the group: {next(each.said for each in found if each.said)}"
    problems = [why] if why else []
    if len(alive) < len(left):
        problems.append("a survivor ended later")
    if any(each.pid != ranks.processes[rank].pid for rank, each in zip(left, found, strict=True)):
        problems.append("a survivor is another process")
    if row.scenario.fault not in (Fault.none, Fault.late):
        problems += judge_times(row, free_s, first_s) + judge_beliefs(row, found, certified)
    report.found(row.name, not problems, figure, "; ".join(problems))


def judge_times(row: Row, free_s: float, first_s: float) -> list[str]:
    return [
        f"{what} took longer than {most_s:.0f} s"
        for what, took_s, most_s in (("the abort", free_s, row.free_s), ("going on", first_s, row.first_step_s))
        if took_s > most_s
    ]


def judge_beliefs(row: Row, found: list[Outlived], certified: list[int]) -> list[str]:
    """A step that was broken was certified nowhere; those before it are what another group computes."""
    if any(not each.said for each in found):
        return ["a survivor did not notice that its group was over"]
    if row.scenario.where.value in ("all_reduce", "reduce_scatter", "init"):
        return []
    problems = []
    if broken := [step for step in certified if step >= row.scenario.fatal_step]:
        problems.append(f"step {broken[0]} was believed, in which a rank was lost")
    for each in found:
        for step, loss in each.losses.items():
            expected = each.after.get(step, loss)
            if not abs(loss - expected) <= row.tolerance * max(1.0, abs(expected)):
                problems.append(f"step {step} was believed at a loss of {loss:.5f}, another group has {expected:.5f}")
                return problems
    return problems
