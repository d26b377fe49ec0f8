"""Of real ranks that verify each other, the one that computes wrong is named, and no other ever is."""

from dataclasses import replace

import pytest

from regrow.config.schema import ActivationCheckpoint, Dtype, Float8, ParallelConfig, PipelineSchedule
from regrow.control.verification import ACTIVATIONS as OUTPUTS
from regrow.control.verification import GRADIENTS, LOSS
from regrow.train.orders import ACTIVATIONS, WEIGHTS, Order
from regrow.train.orders import GRADIENTS as IN_GRADIENTS
from support.gloo import run_ranks
from support.verifying import train_verifying

FSDP = ParallelConfig()


@pytest.mark.parametrize("what", [ACTIVATIONS, IN_GRADIENTS])
def test_the_rank_that_computes_wrong_is_named_in_the_next_verification(what: str) -> None:
    seen = run_ranks(train_verifying, 3, FSDP, 4, 9, 1, Order(what), 5)
    assert all(each.outcomes == seen[0].outcomes for each in seen)  # decided alike on all ranks
    odd = {step: outcome.odd for step, outcome in seen[0].outcomes.items()}
    assert odd == {1: (), 4: (), 7: (1,), 8: (1,), 9: (1,)}  # two steps before the last one, and again
    assert all(outcome.compared == (LOSS, GRADIENTS) for outcome in seen[0].outcomes.values())
    assert [each.flipped > 0 for each in seen] == [False, True, False]


def test_no_healthy_rank_is_named_and_nothing_that_is_learned_changes() -> None:
    """Over 16 verifications, one a step, of replicas that nothing is sharded among, too."""
    replicas = ParallelConfig(dp_replicate=3, reshard_after_forward=False, sync_every_micro_batch=True)
    for parallel in (FSDP, replicas):
        seen = run_ranks(train_verifying, 3, parallel, 1, 8, 0, None)[0]
        assert len(seen.outcomes) == 8
        assert not any(outcome.differs or outcome.alone for outcome in seen.outcomes.values())
        assert seen.losses == run_ranks(train_verifying, 3, parallel, 0, 8, 0, None)[0].losses


def test_a_rank_whose_gradients_no_other_shards_is_named_too() -> None:
    """A replica of one rank reduces its gradients over no shards."""
    seen = run_ranks(train_verifying, 3, ParallelConfig(dp_replicate=3), 4, 9, 2, Order(IN_GRADIENTS), 5)
    assert {step: outcome.odd for step, outcome in seen[0].outcomes.items()} == {
        1: (),
        4: (),
        7: (2,),
        8: (2,),
        9: (2,),
    }


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(ParallelConfig(tp=2), id="arithmetic", marks=pytest.mark.long),
        pytest.param(ParallelConfig(cp=2), id="rows"),
    ],
)
def test_of_two_units_it_is_told_that_they_differ_and_not_which_is_wrong(unit: ParallelConfig) -> None:
    """Units of two ranks that share a block's arithmetic, or their rows."""
    seen = run_ranks(train_verifying, 4, unit, 4, 8, 3, Order(ACTIVATIONS), 5)
    found = {step: (outcome.odd, outcome.undecided) for step, outcome in seen[0].outcomes.items()}
    differ = ((), (0, 1))
    assert found == {1: ((), ()), 4: ((), ()), 6: differ, 7: differ, 8: differ}


PIPELINES = {
    "2 stages": ParallelConfig(pp=2),
    "interleaved": ParallelConfig(pp=2, schedule=PipelineSchedule.interleaved, reshard_after_forward=False),
}
EACH_PIPELINE = [pytest.param("2 stages", marks=pytest.mark.long), "interleaved"]


@pytest.mark.parametrize("name", EACH_PIPELINE)
@pytest.mark.parametrize(("what", "pipeline_rank"), [(ACTIVATIONS, 0), (IN_GRADIENTS, 1)])
def test_of_a_pipeline_the_stage_s_rank_that_computes_wrong_is_named(name: str, what: str, pipeline_rank: int) -> None:
    """Three units of two ranks. What is wrong in a stage is wrong in those behind it, too."""
    unit, num_units = 1, 3
    victim = pipeline_rank * num_units + unit
    seen = run_ranks(train_verifying, 6, PIPELINES[name], 4, 9, victim, Order(what), 5, deadline_s=300.0)
    assert all(each.outcomes == seen[0].outcomes for each in seen)
    part = 2 * unit + pipeline_rank
    odd = {step: outcome.odd for step, outcome in seen[0].outcomes.items()}
    assert odd == {1: (), 4: (), 7: (part,), 8: (part,), 9: (part,)}
    assert [each.flipped > 0 for each in seen] == [rank == victim for rank in range(6)]


@pytest.mark.parametrize("name", EACH_PIPELINE)
def test_in_pipelines_no_healthy_rank_is_named_and_nothing_that_is_learned_changes(name: str) -> None:
    """The micro-batch that is verified goes ahead of the step's own, whose gradients have nothing of it."""
    parallel = replace(PIPELINES[name], sync_every_micro_batch=name == "2 stages")
    seen = run_ranks(train_verifying, 4, parallel, 1, 10, 0, None, deadline_s=300.0)[0]
    assert len(seen.outcomes) == 10
    assert not any(outcome.differs or outcome.alone for outcome in seen.outcomes.values())
    assert all(outcome.compared == (OUTPUTS, GRADIENTS) for outcome in seen.outcomes.values())
    assert seen.losses == run_ranks(train_verifying, 4, parallel, 0, 10, 0, None, deadline_s=300.0)[0].losses


def test_a_flipped_weight_is_seen_by_all_alike_and_so_by_no_verification() -> None:
    """A shard's owner gives it to all: what is compared cannot tell. Copies can (`control.replicas`)."""
    seen = run_ranks(train_verifying, 3, FSDP, 2, 8, 1, Order(WEIGHTS), 3)
    assert seen[1].flipped == 1
    assert not any(outcome.differs for outcome in seen[0].outcomes.values())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(dtype=Dtype.bfloat16, activation_checkpoint=ActivationCheckpoint.full),
        ParallelConfig(dtype=Dtype.bfloat16, compile=True),
        ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.tensorwise_all_gather),
        ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.rowwise),
    ],
    ids=["bfloat16", "compiled", "float8 tensorwise, gathered", "float8 rowwise"],
)
def test_in_all_arithmetics_the_one_that_computes_wrong_is_named_and_no_other(parallel: ParallelConfig) -> None:
    for what in (ACTIVATIONS, IN_GRADIENTS):
        seen = run_ranks(train_verifying, 3, parallel, 1, 40, 1, Order(what), 21, deadline_s=400.0)
        odd = [seen[0].outcomes[step].odd for step in range(1, 41)]
        assert odd == [()] * 20 + [(1,)] * 20
