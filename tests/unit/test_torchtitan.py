"""torchtitan's checkpoints: one of its own is gone on with as it did itself, and ours as ours."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import yaml
from jobs import checkpoint
from torch import Tensor

from regrow.config.schema import Dtype, ModelConfig, OptimConfig, ParallelConfig, PretrainConfig
from regrow.errors import CheckpointError
from regrow.optim.schedule import lr_at
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh, coordinates_of
from regrow.plan.mesh import plan_mesh
from regrow.record.run_folder import CONFIG_FILE, checkpoints_of, identity, read_record, write_record
from regrow.state.disk import store
from regrow.state.disk.catalog import choose
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Progress, set_optimizer_step, training_entries
from regrow.state.exchange import runs
from regrow.state.exchange.dcp_folder import DcpFolder
from regrow.state.exchange.runs import Batch, export_run, import_of_model
from regrow.storage import Storage
from regrow.train.build import build_step
from support import titan_run
from support.gloo import run_ranks
from support.ragged import ragged_model
from support.runs import RUN_ID, save_run
from support.titan_run import OPTIM, SAVED, SEQ_LEN, SEQS, STEPS, TOTAL

GOLDEN = Path(__file__).parents[1] / "golden" / "torchtitan"  # its README says how it was made
BATCH = Batch(SEQS, SEQ_LEN)
CPU = torch.device("cpu")


def quiet(total: int) -> Any:
    return lambda num_bytes: None


@pytest.fixture
def golden_model(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """In conf/model, as far as imports see."""
    model = titan_run.model(tied=False)
    monkeypatch.setattr(runs, "read_model", lambda name: model)
    return model


def imported(run: Path, source: Path = GOLDEN / "step-5", **options: Any) -> str:
    return import_of_model(
        "torchtitan", str(source), str(run), **{"model": "titan", "batch": BATCH, "start": quiet} | options
    )


def saved(folder: Path) -> dict[str, Tensor]:
    tensors = CheckpointTensors(*choose(*checkpoints_of(str(folder))), lambda num_bytes: None)
    return {name: tensors.whole(name) for name in tensors.index.tensors}


def trained_on(folder: Path, tied: bool, last_step: int, write: bool) -> dict[int, float]:
    """A run's checkpoint on these ranks, trained on as torchtitan's was; the losses by step. `write` its last one."""
    mesh = build_mesh(plan_mesh(torch.distributed.get_world_size(), 1), "cpu")
    model = titan_run.model(tied)
    step = build_step(model, ParallelConfig(), OPTIM, mesh=mesh, device=CPU, seed=0)
    entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
    checkpoints, index = choose(*checkpoints_of(str(folder)))
    store.restore(checkpoints, index, entries, coordinates_of(mesh))
    set_optimizer_step(step.optimizer, index.step)
    progress, losses, tokens = Progress(**index.scalars), {}, SEQS * SEQ_LEN
    share = slice(torch.distributed.get_rank(), None, torch.distributed.get_world_size())
    while progress.step < last_step:
        progress = Progress(progress.step + 1, progress.cursor + SEQS, progress.tokens_seen + tokens)
        rows = torch.as_tensor(titan_run.rows_of(progress.step))[share]
        lr = lr_at(progress.tokens_seen, total_tokens=TOTAL * tokens, config=OPTIM)
        losses[progress.step] = step.run([rows], num_micro_batches=1, lr=lr).resolve().loss
    if write:
        store.save(checkpoints, entries, scalars=progress.to_dict(), run_id=index.run_id, generation=1)
    return losses


def begun(folder: Path, model: ModelConfig, optim: OptimConfig) -> None:
    """An imported run, as its first attempt leaves it."""
    config = PretrainConfig(model=model, optim=optim)
    config.train.steps, config.data.seq_len = TOTAL, SEQ_LEN
    record = read_record(Storage.at(folder)) or {"run_id": RUN_ID}
    write_record(Storage.at(folder), run_id=record["run_id"], identity=identity(config), manifest_sha256="0" * 64)
    (folder / CONFIG_FILE).write_text(yaml.safe_dump({"train": {"steps": TOTAL}, "model": asdict(model)}))
    (folder / "events.jsonl").touch()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_torchtitans_is_gone_on_with_as_it_did_itself(
    ranks: int, golden_model: ModelConfig, tmp_path: Path
) -> None:
    told = imported(tmp_path / "run")
    assert f"goes on from step {SAVED} of {GOLDEN}" in told
    assert (
        "model=titan optim.global_batch_seqs=4 data.seq_len=12 optim.lr=0.01 optim.beta1=0.9 optim.beta2=0.95" in told
    )
    assert "samples from 20 on are next" in told
    record = read_record(Storage.at(tmp_path / "run"))
    assert record is not None
    assert record["manifest_sha256"] is None  # the first attempt's corpus will be it
    kept = {key: record["identity"][key] for key in ("optim.global_batch_seqs", "data.seq_len", "model.num_kv_heads")}
    assert kept == {"optim.global_batch_seqs": 4, "data.seq_len": 12, "model.num_kv_heads": 2}

    theirs = json.loads((GOLDEN / "run.json").read_text())
    for step, rows in theirs["rows"].items():
        assert titan_run.rows_of(int(step)).tolist() == rows
    for ours in run_ranks(trained_on, ranks, tmp_path / "run", False, STEPS, False):
        assert list(ours) == list(range(SAVED + 1, STEPS + 1))
        assert ours == pytest.approx({step: theirs["losses"][str(step)] for step in ours}, rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_torchtitan_goes_on_with_what_was_exported_as_it_did_itself(
    tied: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torchtitan")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def titan(*arguments: object) -> str:
        command = [sys.executable, titan_run.__file__, *map(str, arguments), *["--tied"] * tied]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=200).stdout

    titan("save", tmp_path)
    run, model = tmp_path / "run", titan_run.model(tied)
    monkeypatch.setattr(runs, "read_model", lambda name: model)
    imported(run, tmp_path / "checkpoint" / "step-5")
    run_ranks(trained_on, 1, run, tied, 15, True)
    begun(run, model, OPTIM)
    _, index = choose(*checkpoints_of(str(run)))
    told = export_run(
        "torchtitan", str(run), index, str(tmp_path / "checkpoint" / "step-15"), dtype=Dtype.float32, start=quiet
    )
    assert "exclude_from_loading dataloader" in told
    losses = json.loads(titan("continue", tmp_path, 15).splitlines()[-1])
    assert [int(step) for step in losses] == list(range(16, STEPS + 1))
    theirs = json.loads((tmp_path / "run.json").read_text())["losses"]
    assert losses == pytest.approx({step: theirs[step] for step in losses}, rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back_is_bitwise_equal(tied: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = ModelConfig(vocab_size=20, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=6, tied=tied)
    monkeypatch.setattr(runs, "read_model", lambda name: model)
    run = tmp_path / "run"
    save_run(run, model)  # 12 sequences of 8 tokens a step
    begun(run, model, OptimConfig())
    before, (_, index) = saved(run), choose(*checkpoints_of(str(run)))
    left: list[int] = []  # to be read, of the export and of the import

    def count(total: int) -> Any:
        left.append(total)

        def advance(num_bytes: int) -> None:
            left[-1] -= num_bytes

        return advance

    export_run("torchtitan", str(run), index, str(tmp_path / "step-2"), dtype=Dtype.float32, start=count)
    imported(tmp_path / "again", tmp_path / "step-2", batch=Batch(12, 8), start=count)
    assert left == [0, 0]
    after = saved(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    _, again = choose(*checkpoints_of(str(tmp_path / "again")))
    assert again.scalars == {"step": 2, "cursor": 24, "tokens_seen": 192}
    fused = DcpFolder(tmp_path / "step-2").tensors["optimizer.state.layers.1.attention.qkv_linear.wqkv.weight.exp_avg"]
    assert fused == (4 * 4 + 2 * 2 * 4, 16)


def older(source: Path, target: Path, *, optimizer: bool = True, **changed: Any) -> None:
    """The same state by the names of 0.2, which trains `wq`, `wk` and `wv` apart; with other values of some keys."""
    folder, model = DcpFolder(source), titan_run.model(tied=False)
    state = {key: folder.tensor(key) for key in folder.tensors}
    values = ["train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch"]
    values += [key for key in folder.values if key.startswith("optimizer.param_groups.")]
    state |= {key: folder.value(key) for key in values}
    head_dim, group = model.dim // model.num_heads, model.num_heads // model.num_kv_heads
    prefix = "optimizer.state.layers.0.attention"
    for name in ("step", "exp_avg", "exp_avg_sq"):
        fused = state.pop(f"{prefix}.qkv_linear.wqkv.weight.{name}")
        parts = [fused] * 3
        if name != "step":
            by_head = fused.view(model.num_kv_heads, group + 2, head_dim, model.dim)
            parts = [part.reshape(-1, model.dim).clone() for part in by_head.split((group, 1, 1), dim=1)]
        state |= {f"{prefix}.{to}.weight.{name}": part for to, part in zip(("wq", "wk", "wv"), parts, strict=True)}
    for key in [key for key in values if ".qkv_linear.wqkv." in key]:
        value = state.pop(key)
        state |= {key.replace("qkv_linear.wqkv", to): value for to in ("wq", "wk", "wv")}
    state = {key.replace(".qkv_linear", "").replace("lm_head", "output"): value for key, value in state.items()}
    if not optimizer:
        state = {key: value for key, value in state.items() if key.startswith(("layers", "norm", "tok", "output"))}
    torch_dcp.save(state | changed, checkpoint_id=target, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_of_the_version_before_are_read(golden_model: ModelConfig, tmp_path: Path) -> None:
    older(GOLDEN / "step-5", tmp_path / "step-5")
    imported(tmp_path / "old", tmp_path / "step-5")
    imported(tmp_path / "new")
    old, new = saved(tmp_path / "old"), saved(tmp_path / "new")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], tensor) for name, tensor in new.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_alone_begin_a_run_at_step_0(golden_model: ModelConfig, tmp_path: Path) -> None:
    """As torchtitan's last checkpoint is by default."""
    older(GOLDEN / "step-5", tmp_path / "step-9", optimizer=False)
    told = imported(tmp_path / "run", tmp_path / "step-9", batch=None, moments=Dtype.bfloat16)
    assert "begins at step 0 with the weights" in told
    _, index = choose(*checkpoints_of(str(tmp_path / "run")))
    assert index.scalars == {"step": 0, "cursor": 0, "tokens_seen": 0}
    tensors, (dtype, _) = saved(tmp_path / "run"), index.tensors["optim/exp_avg/norm.weight"]
    assert dtype == "bfloat16"
    assert not tensors["optim/exp_avg/norm.weight"].any()
    imported(tmp_path / "state")
    assert torch.equal(
        tensors["model/layers.0.attention.wk.weight"], saved(tmp_path / "state")["model/layers.0.attention.wk.weight"]
    )
    record = read_record(Storage.at(tmp_path / "run"))
    assert record is not None
    assert record["identity"]["optim.moments"] == "bfloat16"


def with_adamw(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """The same state with these settings of all parameters, and moments kept so."""
    older(GOLDEN / "step-5", folder / "step-4")
    before = DcpFolder(folder / "step-4")
    state: dict[str, Any] = {key: before.tensor(key) for key in before.tensors}
    state = {key: tensor.to(dtype) if ".exp_avg" in key else tensor for key, tensor in state.items()}
    state |= {key: settings.get(key.rpartition(".")[2], before.value(key)) for key in before.values}
    torch_dcp.save(state, checkpoint_id=folder / "step-5", no_dist=True)
    return folder / "step-5"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_settings_of_its_adamw_are_told_to_the_last_digit(golden_model: ModelConfig, tmp_path: Path) -> None:
    """Before, six digits of them were told."""
    exact = {"lr": 0.00012345678901, "initial_lr": 0.00012345678901, "betas": (0.9012345678, 0.9512345678)}
    told = imported(tmp_path / "run", with_adamw(tmp_path, **exact))
    assert " optim.lr=0.00012345678901 optim.beta1=0.9012345678 optim.beta2=0.9512345678 optim.eps=1e-08 " in told


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("dtype", "is_refused"), [(torch.bfloat16, True), (torch.float32, False)])
def test_betas_that_its_moments_cannot_fall_with_are_named(
    dtype: torch.dtype, is_refused: bool, golden_model: ModelConfig, tmp_path: Path
) -> None:
    told = imported(tmp_path / "run", with_adamw(tmp_path, dtype, betas=(0.9, 0.999)))
    assert "optim.beta2=0.999" in told
    assert ("Refused as it stands" in told) is is_refused
    assert ("give optim.beta2=0.99 or less" in told) is is_refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": None}, "--global-batch-seqs and --seq-len"),
        ({"batch": Batch(7, 5)}, "trained on 240 tokens, where 5 steps of 7 x 5 are 175"),
        ({"batch": Batch(5, 9)}, "trained on 240 tokens, where 5 steps of 5 x 9 are 225"),
    ],
)
def test_a_batch_that_cannot_be_its_own_is_refused(
    options: dict[str, Any], says: str, golden_model: ModelConfig, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=says):
        imported(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_our_export_comes_back_after_torchtitan_trained_it_on_other_numbers_of_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its tokens are one rank's, each step's by the ranks of that step; ours are those of all."""
    model, run = ragged_model(), tmp_path / "run"
    monkeypatch.setattr(runs, "read_model", lambda name: model)
    save_run(run, model)  # 12 sequences of 8 tokens a step
    begun(run, model, OptimConfig())
    _, index = choose(*checkpoints_of(str(run)))
    export_run("torchtitan", str(run), index, str(tmp_path / "step-2"), dtype=Dtype.float32, start=quiet)
    folder = DcpFolder(tmp_path / "step-2")
    state = {key: folder.value(key) for key in folder.values} | {key: folder.tensor(key) for key in folder.tensors}
    state |= {key: torch.tensor(5.0) for key in folder.tensors if key.endswith(".step")}
    state |= {"train_state.step": 5, "train_state.ntokens_seen": 192 + 3 * 96 // ranks}  # 8: of 4 units of two by CP
    torch_dcp.save(state, checkpoint_id=tmp_path / "step-5", no_dist=True)
    imported(tmp_path / "again", tmp_path / "step-5", batch=Batch(12, 8))
    _, again = choose(*checkpoints_of(str(tmp_path / "again")))
    assert again.scalars == {"step": 5, "cursor": 60, "tokens_seen": 480}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_layers": 2}, r"has no layers.1.attention_norm.weight, which the model other has"),
        ({"num_layers": 0}, r"holds layers.0.*, which the model other does not have"),
        ({"ffn_dim": 32}, r"layers.0.feed_forward.w1.weight is \[24, 16\], the model other has \[32, 16\]"),
        ({"tied": True}, "lm_head.weight is not the embedding"),
    ],
)
def test_another_model_is_refused(
    changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = ModelConfig(**asdict(titan_run.model(tied=False)) | {"name": "other"} | changed)
    monkeypatch.setattr(runs, "read_model", lambda name: model)
    with pytest.raises(CheckpointError, match=says):
        imported(tmp_path / "run")
    assert read_record(Storage.at(tmp_path / "run")) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_that_stood_still_is_refused(golden_model: ModelConfig, tmp_path: Path) -> None:
    older(GOLDEN / "step-5", tmp_path / "still", **{"optimizer.state.norm.weight.step": torch.tensor(4.0)})
    with pytest.raises(CheckpointError, match=r"AdamW has taken 4 steps with norm.weight, training 5"):
        imported(tmp_path / "run", tmp_path / "still")
    assert not (tmp_path / "run").exists()


W2, WV, NORM = "layers.0.feed_forward.w2.weight", "layers.0.attention.wv.weight", "norm.weight"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tok_embeddings.weight.betas": 0.9}, "its optimizer is not AdamW"),
        ({f"{W2}.decoupled_weight_decay": False}, f"{W2}.decoupled_weight_decay is False, here it is True"),
        ({f"{NORM}.amsgrad": True}, f"{NORM}.amsgrad is True, here it is False"),
        ({f"{WV}.maximize": True}, f"{WV}.maximize is True, here it is False"),
        ({f"{W2}.initial_lr": 1e-5}, f"{W2}.initial_lr is 1e-05, that of tok_embeddings.weight 0.01"),
        ({f"{NORM}.lr": 1e-5}, f"{NORM}.lr is 1e-05, that of tok_embeddings.weight 0.006"),
        ({f"{WV}.betas": (0.5, 0.6)}, rf"{WV}.betas is \(0.5, 0.6\), that of tok_embeddings.weight \(0.9, 0.95\)"),
        ({f"{W2}.eps": 1e-6}, f"{W2}.eps is 1e-06, that of tok_embeddings.weight 1e-08"),
        ({f"{W2}.weight_decay": 0.0}, f"{W2}.weight_decay is 0.0, that of tok_embeddings.weight 0.1"),
    ],
)
def test_an_optimizer_that_is_not_one_adamw_of_all_parameters_is_refused_before_anything_is_written(
    changed: dict[str, Any], says: str, golden_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the embedding's settings were taken for all, and the run was there by the time of a refusal."""
    groups = {f"optimizer.param_groups.{key}": value for key, value in changed.items()}
    older(GOLDEN / "step-5", tmp_path / "step-5", **groups)
    monkeypatch.setattr(runs, "save_one_by_one", None)
    with pytest.raises(CheckpointError, match=says):
        imported(tmp_path / "run", tmp_path / "step-5")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("norm", ["norm", "layers.0.ffn_norm"])
def test_that_a_norm_decayed_is_said(norm: str, golden_model: ModelConfig, tmp_path: Path) -> None:
    said = "Its AdamW decayed norms too; here matrices alone are."
    older(GOLDEN / "step-5", tmp_path / "step-5", **{f"optimizer.param_groups.{norm}.weight.weight_decay": 0.1})
    assert said in imported(tmp_path / "run", tmp_path / "step-5")
    assert said not in imported(tmp_path / "other")


def test_a_run_that_has_not_trained_or_not_begun_is_exported_by_its_weights_alone(
    golden_model: ModelConfig, tmp_path: Path
) -> None:
    for step, says in ((0, "has not trained a step yet"), (2, "has no config.yaml that says train.steps")):
        run = tmp_path / f"run-{step}"
        save_run(run, ragged_model(), steps=(step,))
        _, index = choose(*checkpoints_of(str(run)))
        with pytest.raises(CheckpointError, match=rf"{says}.*export its weights to hf"):
            export_run("torchtitan", str(run), index, str(tmp_path / "out"), dtype=Dtype.float32, start=quiet)
        assert not (tmp_path / "out").exists()


def test_an_average_is_exported_as_the_run_that_it_is_made_of(tmp_path: Path) -> None:
    """It has no log, and was taken for a run that has not begun."""
    run, mean, model = tmp_path / "run", tmp_path / "mean", ragged_model()
    save_run(run, model, steps=(1, 2))
    begun(run, model, OPTIM)
    checkpoints, run_id = checkpoints_of(str(run))
    runs.average_run(str(run), [choose(checkpoints, run_id, step)[1] for step in (1, 2)], str(mean), start=quiet)
    _, index = choose(*checkpoints_of(str(mean)))
    export_run("torchtitan", str(mean), index, str(tmp_path / "out"), dtype=Dtype.float32, start=quiet)
    assert DcpFolder(tmp_path / "out").value("train_state.step") == 2


def test_moments_that_are_there_are_not_said_to_be_kept_otherwise(golden_model: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds moments, kept as they are; leave out --moments bfloat16"):
        imported(tmp_path / "run", moments=Dtype.bfloat16)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "torchtitan"], "a folder of torchtitan does not say which model it is of: give --model"),
        (["--format", "megatron"], "a folder of megatron does not say which model it is of: give --model"),
        (["--format", "torchtitan", "--model", "debug", "--seq-len", "8"], "are given together"),
        (["--format", "torchtitan", "--model", "9b"], "9b"),
        (["--format", "hf", "--model", "debug"], "--model says nothing of a folder of hf"),
        (["--format", "megatron", "--model", "debug", "--seq-len", "8"], "--seq-len says nothing of a folder of meg"),
        (["--format", "torchtitan", "--model", "debug", "--seq-len", "0"], "0 is no positive number"),
    ],
)
def test_what_is_missing_or_of_no_use_is_said_in_one_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["jobs.checkpoint", "import", "--from", str(GOLDEN / "step-5"), "--to", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", [*command, *arguments])
    with pytest.raises(SystemExit) as ended:
        checkpoint.main()
    assert says in f"{ended.value.code}{capsys.readouterr().err}"
    assert not (tmp_path / "run").exists()
