"""A process that has warmed up has nothing left of it, and has compiled what its group will run; no other one compiles
that again.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.check import topologies
from regrow.config.schema import (
    ActivationCheckpoint,
    Dtype,
    Float8,
    OptimConfig,
    ParallelConfig,
    PretrainConfig,
    TrainConfig,
)
from regrow.parallel.compile import CompileCache, graphs_compiled, graphs_lowered
from regrow.runtime import worker
from regrow.runtime.warm_up import warm_up, warm_up_loss
from regrow.storage import Storage
from support.gloo import run_ranks
from support.training import Training, train

CPU = torch.device("cpu")
OPTIM = OptimConfig(lr=1e-2, global_batch_seqs=12, num_slices=6)
TRACED = ParallelConfig(compile=True, compile_backend="aot_eager")
PASS_SEQS = 2  # of a slice


def warm_up_and_train(training: Training, store: str) -> tuple[int, int]:
    """Graphs traced in the warm-up, and in all with the steps of a group after it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # or one is gone while the other one is still connecting
    dist.destroy_process_group()
    warm_up(CPU, training.model, training.parallel, pass_seqs=PASS_SEQS, seq_len=training.seq_len)
    before = graphs_compiled()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    train(training)
    return before, graphs_compiled()


@pytest.mark.parametrize(
    ("parallel", "document_attention"),
    [
        pytest.param(TRACED, False, marks=pytest.mark.long),
        (replace(TRACED, activation_checkpoint=ActivationCheckpoint.selective), True),
        pytest.param(
            replace(TRACED, dtype=Dtype.bfloat16, float8=Float8.tensorwise_all_gather), False, marks=pytest.mark.long
        ),
    ],
    ids=["plain", "selective, documents", "float8"],
)
def test_after_its_warm_up_a_rank_traces_no_graph_in_the_groups_steps(parallel, document_attention, tmp_path):
    model = replace(tiny_model(num_layers=3), document_attention=document_attention)
    training = Training(model, parallel, OPTIM, num_steps=3, eot_id=7 if document_attention else None)
    for before, after in run_ranks(warm_up_and_train, 2, training, str(tmp_path / "store")):
        assert (before, after) == (1, 1)


def warm_up_alone(parallel: ParallelConfig, pass_seqs: int, seq_len: int) -> tuple[bool, bool]:
    """Whether random numbers go on as if nothing had been, and whether a group is left."""
    dist.barrier()
    dist.destroy_process_group()
    state = torch.get_rng_state()
    warm_up(CPU, tiny_model(), parallel, pass_seqs=pass_seqs, seq_len=seq_len)
    return torch.equal(torch.get_rng_state(), state), dist.is_initialized()


@pytest.mark.parametrize(("chunk_tokens", "rows"), [(24, [16, 16]), (10**6, [32])])
def test_the_loss_is_warmed_up_in_the_shapes_and_the_dtype_of_a_pass(
    chunk_tokens: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def compile_it(function: Any, backend: str) -> Any:  # what happens on GPUs alone
        def called(logits: torch.Tensor, targets: torch.Tensor) -> Any:
            seen.append((tuple(logits.shape), logits.dtype))
            return function(logits, targets)

        return called

    monkeypatch.setattr(torch, "compile", compile_it)
    monkeypatch.setattr("regrow.train.step.compiles_loss", lambda parallel, device: True)
    parallel = ParallelConfig(compile=True, dtype=Dtype.bfloat16, loss_chunk_tokens=chunk_tokens)
    warm_up_loss(CPU, 5000, parallel, pass_seqs=2, seq_len=16)
    assert seen == [((num, 5000), torch.bfloat16) for num in rows]


@pytest.mark.parametrize(("after", "float8"), [(0, Float8.tensorwise), (899, Float8.tensorwise), (950, Float8.none)])
def test_a_newcomer_warms_up_for_what_the_next_step_is_trained_with(
    after: int, float8: Float8, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the bfloat16 steps at the end of a run with float8, too."""
    parallel = replace(TRACED, dtype=Dtype.bfloat16, float8=Float8.tensorwise, bfloat16_tail=0.1)
    config = PretrainConfig(parallel=parallel, train=TrainConfig(steps=1000))
    seen: list[ParallelConfig] = []
    monkeypatch.setattr(worker, "warm_up", lambda device, model, parallel, **options: seen.append(parallel))
    monkeypatch.setattr(worker, "CoordinatorClient", lambda handle: SimpleNamespace(next_step=lambda: after + 1))
    job: Any = SimpleNamespace(config=config, topologies=topologies(config), coordinator=None)
    worker._warm_up(job, CPU, 1, "gloo")
    assert [each.float8 for each in seen] == [float8]


def test_nothing_is_left_of_it():
    assert run_ranks(warm_up_alone, 2, TRACED, PASS_SEQS, 16) == [(True, False)] * 2


@pytest.mark.long
def test_without_compiling_it_is_small_whatever_the_model():
    assert run_ranks(warm_up_alone, 2, ParallelConfig(), 10**9, 10**9) == [(True, False)] * 2


def train_with(cache: str, training: Training) -> dict[str, int]:
    """What a process finds in the folder, compiles, and writes."""
    kept = CompileCache(Storage.at(cache), CPU)
    found = kept.load()
    train(training)
    return {
        "found": found,
        "lowered": graphs_lowered(),
        "written": kept.keep_new(),
        "written_again": kept.keep_new(),
    }


@pytest.mark.long  # inductor compiles in two processes, for half a minute
def test_what_one_machine_has_compiled_another_one_does_not(tmp_path):
    training = Training(tiny_model(), ParallelConfig(compile=True), OPTIM, num_steps=2)

    def on_machine(name: str) -> dict[str, int]:
        """One whose disk has seen nothing yet."""
        alone = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        (result,) = run_ranks(train_with, 1, str(tmp_path / "cache"), training, deadline_s=280, env=alone)
        return result

    first = on_machine("first")
    assert first["found"] == 0
    assert first["lowered"] == 2  # forward and backward of a block
    assert first["written"] > 0
    assert first["written_again"] == 0
    second = on_machine("second")
    assert second == {"found": first["written"], "lowered": 0, "written": 0, "written_again": 0}

    (kept,) = (tmp_path / "cache").rglob("*.artifacts")
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)
    assert CompileCache(Storage.at(tmp_path / "cache"), CPU).load() == 0  # never handed to torch


def test_a_folder_that_cannot_be_read_is_done_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kind = torch.backends.cpu.get_cpu_capability()
    (tmp_path / f"torch-{torch.__version__}-{kind}" / "folder.artifacts").mkdir(parents=True)
    assert CompileCache(Storage.at(tmp_path), CPU).load() == 0
    assert "cannot be read: [Errno 21] Is a directory" in capsys.readouterr().err
