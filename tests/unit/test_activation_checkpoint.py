import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import ActivationCheckpoint, ParallelConfig
from regrow.parallel.apply import build_model
from regrow.train.step import split_rows, sum_cross_entropy

torch.set_num_threads(1)  # threads that wait for each other cost tiny models more than they save


def loss_and_gradients(mode: ActivationCheckpoint) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    parallel = ParallelConfig(activation_checkpoint=mode)
    model = build_model(tiny_model(), parallel, mesh=None, device="cpu", seed=0)
    inputs, targets = split_rows(count_up_rows(0, num_rows=4, seq_len=32))
    loss = sum_cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", [ActivationCheckpoint.selective, ActivationCheckpoint.full])
def test_recomputing_activations_changes_no_bit_of_loss_or_gradients(mode):
    loss, grads = loss_and_gradients(ActivationCheckpoint.none)
    again_loss, again_grads = loss_and_gradients(mode)
    assert torch.equal(loss, again_loss)
    assert grads.keys() == again_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, again_grads[name]), name


def test_parameter_names_do_not_depend_on_activation_checkpointing():
    names = [
        [
            name
            for name, _ in build_model(
                tiny_model(), ParallelConfig(activation_checkpoint=mode), mesh=None, device="cpu", seed=0
            ).named_parameters()
        ]
        for mode in ActivationCheckpoint
    ]
    assert names[0] == names[1] == names[2]


def test_full_checkpointing_runs_each_block_again_and_selective_no_matrix_product():
    flops = {}
    for mode in ActivationCheckpoint:
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(mode)
        flops[mode] = counter.get_total_flops()
    assert flops[ActivationCheckpoint.selective] == flops[ActivationCheckpoint.none]
    assert flops[ActivationCheckpoint.full] > 1.2 * flops[ActivationCheckpoint.none]


def kept_and_gradients(budget: float) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that blocks compiled under a budget keep for backward, but for parameters, and the gradients."""
    parallel = ParallelConfig(compile=True, compile_backend="aot_eager_decomp_partition", activation_budget=budget)
    model = build_model(tiny_model(), parallel, mesh=None, device="cpu", seed=0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs, targets = split_rows(count_up_rows(0, num_rows=4, seq_len=32))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = sum_cross_entropy(model(inputs), targets)
    loss.backward()
    torch._dynamo.reset()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return sum(size for at, size in kept.items() if at not in own), gradients


def test_compiled_blocks_keep_as_much_as_their_budget_allows():
    (all_of_it, want), (half, _), (little, got) = (kept_and_gradients(budget) for budget in (1.0, 0.5, 0.0))
    assert all_of_it > half > little
    assert all_of_it > 2 * little
    assert torch._functorch.config.activation_memory_budget == 0.0
    torch._functorch.config.activation_memory_budget = 1.0
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, msg=name)
