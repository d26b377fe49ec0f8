from concurrent.futures import Future

import pytest
import torch
import torch.nn.functional as F

from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.control.verification import Checks
from regrow.model.llama import Llama
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.train.certificate import BrokenStep, Certificate
from regrow.train.metrics import InFlight
from regrow.train.step import IGNORE_INDEX, StepResult, TrainStep, evaluate, sum_cross_entropy, whole_loss
from support.operators import Operators

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save


def make_step() -> TrainStep:
    model = build_model(tiny_model(), ParallelConfig(), mesh=None, device="cpu", seed=0)
    optimizer = build_optimizer(model, OptimConfig())
    return TrainStep(model, optimizer, max_grad_norm=1.0, groups=[], shard_group=None)


def gradients(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}


ROWS = count_up_rows(0, num_rows=6, seq_len=12)


def test_extra_passes_add_exactly_nothing_to_loss_and_gradients():
    results = []
    for num_micro_batches in (3, 5):
        step = make_step()
        loss, num_tokens = step.accumulate(list(ROWS.split(2)), num_micro_batches)
        results.append((loss, num_tokens, gradients(step)))
    (loss, count, grads), (padded_loss, padded_count, padded_grads) = results
    assert torch.equal(loss, padded_loss)
    assert torch.equal(count, padded_count)
    for name, grad in grads.items():
        assert torch.equal(grad, padded_grads[name]), name


def test_the_loss_is_the_mean_over_all_tokens_however_they_are_cut_into_micro_batches():
    model = make_step().model
    assert isinstance(model, Llama)
    want = F.cross_entropy(model(ROWS[:, :-1]).flatten(0, 1), ROWS[:, 1:].flatten()).item()
    for size in (1, 2, 3, 6):
        step = make_step()
        loss, _ = step.accumulate(list(ROWS.split(size)), 6)
        assert loss.item() == pytest.approx(want, abs=1e-6)


def test_ignored_targets_count_in_neither_the_loss_nor_the_number_of_tokens():
    masked = ROWS.clone()
    masked[0, 5:] = IGNORE_INDEX
    masked[3] = IGNORE_INDEX
    step = make_step()
    loss, num_tokens = step.accumulate(list(masked.split(2)), 3)
    assert num_tokens.item() == 6 * 12 - 8 - 12
    logits = make_step().model(masked[:, :-1].clamp(min=0))
    want = F.cross_entropy(logits.flatten(0, 1), masked[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
    assert loss.item() == pytest.approx(want.item(), abs=1e-6)


def test_a_batch_without_any_valid_target_gives_zero_and_not_nan():
    step = make_step()
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    step.optimizer.param_groups[0]["weight_decay"] = 0.0
    result = step.run([torch.full((2, 13), IGNORE_INDEX)], num_micro_batches=1, lr=1e-3).resolve()
    assert result == StepResult(loss=0.0, grad_norm=0.0, num_tokens=0, flag=False, blocked=False, digest=0)
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_step_asks_for_no_number_before_it_is_resolved():
    step = make_step()
    with Operators() as operators:
        for number in range(2):
            stats = step.run(list(ROWS.split(3)), num_micro_batches=3, lr=1e-3, digest=1, number=number)
    assert "aten._fused_adamw_.default" in operators.names
    assert not operators.waiting
    assert stats.resolve().loss > 0


@pytest.mark.parametrize("digest", [0, 1, 2**16 - 1, 2**53 + 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_a_digest_of_any_64_bits_comes_back_unchanged(digest):
    result = make_step().run([ROWS], num_micro_batches=1, lr=0.0, flag=digest % 2 == 1, digest=digest).resolve()
    assert result.digest == digest
    assert result.flag == (digest % 2 == 1)


def test_losses_fall_when_there_is_something_to_learn():
    step = make_step()
    losses = [
        step.run([count_up_rows(s, num_rows=16, seq_len=16)], num_micro_batches=1, lr=1e-2).resolve().loss
        for s in range(25)
    ]
    assert losses[-1] < 0.5 * losses[0]


def test_evaluation_sums_over_all_targets_and_leaves_no_gradient():
    step = make_step()
    want = sum_cross_entropy(step.model(ROWS[:, :-1]), ROWS[:, 1:]).item()
    loss_sum, num_tokens = evaluate(step.model, list(ROWS.split(4)), num_batches=5, groups=[])
    assert loss_sum == pytest.approx(want, rel=1e-6)
    assert num_tokens == 72
    assert all(parameter.grad is None for parameter in step.model.parameters())
    filling = torch.full((4, 13), IGNORE_INDEX)
    assert evaluate(step.model, [filling], num_batches=2, groups=[]) == (0.0, 0)


class Silent:
    """Hooks and saver that nothing may be told."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} of a step that nobody vouches for")


def test_garbage_that_is_no_number_is_a_broken_step_and_no_gradient_that_is_not_finite():
    """Which would take the run back to its newest checkpoint, and be counted."""
    step = make_step()
    step.certificate = Certificate(1, 1, torch.device("cpu"))
    whole = step.loss_function
    step.loss_function = lambda *args: whole(*args) * float("nan")
    stats = step.run(list(ROWS.split(2)), num_micro_batches=3, lr=1e-3)
    launched: Future = Future()
    launched.set_result(stats)
    flight = InFlight(Silent(), Silent(), Silent(), Checks(0, 1, 1, 1), nonfinite_skips=0)
    flight.push(1, launched, {})
    step.certificate.clear()
    with pytest.raises(BrokenStep, match="generation 1 was over before step"):
        flight.settle(0)


def test_nothing_more_is_launched_of_a_step_whose_generation_is_over():
    step, launched = make_step(), []
    step.certificate = certificate = Certificate(1, 1, torch.device("cpu"))

    def over_in_the_second(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        launched.append(inputs)
        if len(launched) == 2:
            certificate.clear()
        return whole_loss(model, inputs, targets)

    step.loss_function = over_in_the_second
    with pytest.raises(BrokenStep, match="generation 1 was over while a step was launched"):
        step.run(list(ROWS.split(1)), num_micro_batches=6, lr=1e-3)
    assert len(launched) == 2
