"""torch.compile under FSDP, activation checkpointing and float8."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from regrow.accept.tiny import tiny_model
from regrow.config.schema import (
    ActivationCheckpoint,
    AttentionKernel,
    CompileMode,
    Dtype,
    Float8,
    OptimConfig,
    ParallelConfig,
)
from regrow.parallel.apply import build_model
from regrow.parallel.compile import apply_compile
from support.gloo import run_ranks
from support.training import Training, plain_losses, train

OPTIM = OptimConfig(lr=1e-2, global_batch_seqs=12, num_slices=6)
# more layers than torch.compile would recompile for, so that one graph has to do for all
DEEP = tiny_model(num_layers=10)
# what the claim about float8 is made on: large enough that rounding is not the smallest of its worries
MATRIX = tiny_model(num_layers=2, dim=128, ffn_dim=256)
MATRIX_STEPS = 50
MODES = [
    mode if mode is ActivationCheckpoint.selective else pytest.param(mode, marks=pytest.mark.long)
    for mode in ActivationCheckpoint
]


@pytest.fixture(scope="session")
def cache(request: pytest.FixtureRequest) -> dict[str, str]:
    """A compile cache that outlives the session, so that only the first run ever compiles."""
    folder = Path(request.config.rootpath) / ".cache" / "inductor"
    folder.mkdir(parents=True, exist_ok=True)
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def losses_and_graphs(training: Training) -> tuple[list[float], int]:
    losses = [result.loss for result in train(training)]
    return losses, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("mode", MODES)
def test_all_blocks_share_one_graph_under_every_activation_checkpointing(mode):
    training = Training(
        DEEP,
        ParallelConfig(compile=True, compile_backend="aot_eager", activation_checkpoint=mode),
        OPTIM,
        num_steps=3,
    )
    compiled = run_ranks(losses_and_graphs, 2, training)
    eager = run_ranks(losses_and_graphs, 2, Training(DEEP, ParallelConfig(), OPTIM, num_steps=3))
    for (losses, num_graphs), (want, _) in zip(compiled, eager, strict=True):
        assert losses == pytest.approx(want, abs=1e-5)
        assert num_graphs == 1


def test_a_block_compiles_with_its_attention_s_kernel():
    parallel = ParallelConfig(compile=True, compile_backend="aot_eager", attention=AttentionKernel.flash)
    training = Training(DEEP, parallel, OPTIM, num_steps=3)
    ((losses, num_graphs),) = run_ranks(losses_and_graphs, 1, training)
    assert losses == pytest.approx(plain_losses(training), abs=1e-5)
    assert num_graphs == 1


@pytest.mark.long
def test_inductor_may_look_for_fast_kernels(cache):
    parallel = ParallelConfig(compile=True, compile_mode=CompileMode.max_autotune)
    training = Training(tiny_model(), parallel, OPTIM, num_steps=3)
    for losses, num_graphs in run_ranks(losses_and_graphs, 2, training, deadline_s=280, env=cache):
        assert losses == pytest.approx(plain_losses(training), abs=1e-5)
        assert num_graphs == 1


@pytest.mark.long
def test_a_compiled_float8_model_trains_like_the_eager_one_where_no_width_divides_by_the_ranks(cache):
    def training(compile_blocks: bool) -> Training:
        recipe = ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.tensorwise_all_gather, compile=compile_blocks)
        return Training(tiny_model(), recipe, OPTIM)

    compiled = run_ranks(losses_and_graphs, 3, training(True), deadline_s=280, env=cache)
    eager = run_ranks(losses_and_graphs, 3, training(False))
    assert compiled[0][0] == pytest.approx(eager[0][0], rel=5e-3)
    assert compiled[0][1] == 1


@pytest.fixture(scope="module")
def bfloat16_losses() -> dict[int, list[float]]:
    """By world size, filled as the matrix asks for them."""
    return {}


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("compile_blocks", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [recipe for recipe in Float8 if recipe is not Float8.none])
def test_float8_loss_is_within_a_hundredth_of_bfloat16s_after_50_steps(
    recipe, compile_blocks, world_size, cache, bfloat16_losses
):
    def losses(float8: Float8, compiled: bool) -> list[float]:
        parallel = ParallelConfig(dtype=Dtype.bfloat16, float8=float8, compile=compiled)
        training = Training(
            MATRIX,
            parallel,
            OptimConfig(lr=3e-3, global_batch_seqs=24, num_slices=6),
            MATRIX_STEPS,
            seq_len=32,
            noise=0.3,
        )
        results = run_ranks(losses_and_graphs, world_size, training, deadline_s=850, env=cache)
        assert all(result == results[0] for result in results)
        return results[0][0]

    if world_size not in bfloat16_losses:
        bfloat16_losses[world_size] = losses(Float8.none, False)
    want, got = bfloat16_losses[world_size], losses(recipe, compile_blocks)
    how = "compiled" if compile_blocks else "eager"
    line = f"{recipe.value} {how} W={world_size}: {got[-1]:.4f} (bfloat16 {want[-1]:.4f})"
    print(line, flush=True)
    assert 0.3 * want[0] < want[-1] < 0.8 * want[0], "there was nothing to learn, or nothing left"
    assert got[-1] == pytest.approx(want[-1], rel=0.01), line


def graphs_of_many_shapes() -> int:
    for dim in (16, 32):
        model = tiny_model(dim=dim)
        built = build_model(
            model, ParallelConfig(compile=True, compile_backend="eager"), mesh=None, device="cpu", seed=0
        )
        for num_rows, seq_len in ((4, 16), (3, 16), (1, 16), (1, 2)):
            tokens = torch.zeros(num_rows, seq_len, dtype=torch.int64)
            built(tokens)
            with torch.no_grad():
                built(tokens)
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("float8", [Float8.none, Float8.rowwise])
def test_rowwise_float8_keeps_the_rounding_that_fused_operators_leave_out(float8: Float8) -> None:
    """The setting. The NaN that it is against needs a GPU."""
    import torch._inductor.config as inductor

    with inductor.patch(emulate_precision_casts=False):
        apply_compile(SimpleNamespace(layers=[]), ParallelConfig(compile=True, float8=float8))
        assert inductor.emulate_precision_casts == (float8 is Float8.rowwise)


def test_a_process_may_meet_more_shapes_than_torchs_limit_of_eight():
    (num_graphs,) = run_ranks(graphs_of_many_shapes, 1)
    assert num_graphs > 8
