"""A rank that computes wrong, in the real job: named, its host given up, and the run is what it would have been."""

from pathlib import Path

import pytest

from regrow.train.orders import ACTIVATIONS, ORDERS, Order
from support.cluster import SMALL, Job

STEPS = 120
OVERRIDES = [
    *SMALL,
    "cluster.min_workers=2",
    f"train.steps={STEPS}",
    "train.stop_at_step=60",
    "snapshot.every_steps=1",
    "snapshot.slots=4",
    "checkpoint.every_steps=15",
]
UNITS = {
    "of a rank": ["cluster.local_nodes=4", "cluster.max_workers=4"],
    "pipelines of two": [
        "cluster.local_nodes=6",
        "cluster.max_workers=6",
        "parallel.pp=2",
        "optim.global_batch_seqs=30",
        "optim.num_slices=30",
    ],
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("units", UNITS)
def test_a_rank_that_computes_wrong_is_expelled_and_the_losses_are_an_undisturbed_run_s(
    units: str, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pipeline the rank that has the wrong stage, and no other of its unit."""
    overrides = [*OVERRIDES, *UNITS[units]]
    with Job(storage, f"undisturbed {units}".replace(" ", "-"), *overrides) as job:
        assert job.wait(400) == 0, job.printed()
        expected = [row["loss"] for row in job.metrics()]
    orders = tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv(ORDERS, str(orders))
    with Job(storage, f"corrupted {units}".replace(" ", "-"), *overrides, "cluster.verify_every_steps=10") as job:
        job.wait_for(lambda: job.last_step() >= 33, 400)
        victim = job.workers()[1]
        node = job.events("generation")[-1]["workers"][1]["node"]
        Order(ACTIVATIONS).leave(orders, victim)
        assert job.wait(400) == 0, job.printed()
        (corruption,) = job.events("corruption")
        assert (corruption["ranks"], corruption["nodes"], corruption["is_decided"]) == ([1], [node], True)
        assert corruption["verified_step"] == corruption["step"] // 10 * 10 - 11  # before bits were flipped
        again = job.events("generation")[1]
        assert (again["cause"], again["source"]) == ("corrupted", "snapshot")
        assert 15 < again["start_step"] <= corruption["verified_step"]
        assert all(each["node"] == node and each["reason"] == "corrupt" for each in job.events("quarantine"))
        assert victim not in job.workers()
        assert [each["kind"] for each in job.events("suspected")] == ["corrupt"]
        losses = [row["loss"] for row in job.metrics()]
    assert losses == pytest.approx(expected, abs=1e-5)
