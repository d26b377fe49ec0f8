"""benchmarks/step.py, as a machine that has only torch runs it."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed.tensor import distribute_tensor

from regrow.accept.tiny import count_up_rows
from regrow.config.schema import ActivationCheckpoint, Dtype, ModelConfig, OptimConfig, ParallelConfig
from regrow.parallel.fsdp import build_mesh
from regrow.plan.mesh import plan_mesh
from regrow.state.exchange.huggingface import hugging_face_name
from regrow.train.build import build_step
from support.gloo import run_ranks

ROOT = Path(__file__).parents[2]
ABSENT = ["ray", "hydra", "omegaconf", "yaml", "pyarrow", "tokenizers", "fsspec"]

RUN_WITHOUT = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None  # importing it raises ImportError
sys.path = [path for path in sys.path if path != {str(ROOT / "platform")!r}]
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_benchmark", ROOT / "benchmarks" / "step.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["step_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_benchmark_runs_where_only_torch_is_installed_and_writes_what_it_measured(tmp_path):
    out = tmp_path / "results" / "step.json"
    small = ["--models", "debug-layers1", "--seq-len", "32", "--micro-batch-seqs", "2", "--warmup", "1", "--quick"]
    recipes = ["--recipes", "bare", "float32", "bfloat16", "tensorwise", "--device", "cpu", "--no-loss"]
    recipes += ["--rank-models", "--profile", "1"]  # none
    subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT, str(ROOT / "benchmarks" / "step.py"), "--out", str(out), *small, *recipes],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    result = json.loads(out.read_text())
    figures = result["figures"]
    for recipe in ("float32", "bfloat16", "tensorwise"):
        for figure in ("tokens_per_s", "step_s", "mfu"):
            assert figures[f"cpu/debug-layers1/{recipe}/{figure}"] > 0
        fast, slow = result["spread"][f"cpu/debug-layers1/{recipe}/step_s"]
        assert fast <= figures[f"cpu/debug-layers1/{recipe}/step_s"] <= slow
        profile = result["profiles"][f"debug-layers1/{recipe}"]
        assert {"matrix products", "optimizer and clipping"} < profile["ms_by_kind"].keys()
        assert profile["most"][0]["ms"] >= profile["most"][-1]["ms"] > 0
    assert figures["tokens_per_s_ratio_bare"] > 0
    assert figures["cpu/debug-layers1/tensorwise/float8_speedup"] > 0
    assert result["peers"]["cpu/debug-layers1/bare/tokens_per_s"] > 0
    assert "6N + 12" in result["settings"]["mfu"]
    assert result["settings"]["peak_source"]
    assert {"figures", "spread", "peers", "versions", "hardware", "git"} <= result.keys()


def measured_loss() -> Any:
    sys.path.insert(0, str(ROOT))
    from benchmarks import step_loss

    step_loss.SHAPES["cpu"] = (4, 256, 64)
    return dataclasses.asdict(step_loss.measure_loss(torch.device("cpu"), rounds=2))


@pytest.mark.long  # test_footprint has such steps' peaks
def test_a_step_with_the_loss_in_chunks_saves_more_than_the_logits_at_a_vocabulary_of_32k():
    (part,) = run_ranks(measured_loss, 1)
    logits_bytes, peaks = part["settings"]["logits_bytes"], part["settings"]["peak_bytes"]
    assert logits_bytes == 4 * 1024 * 32768
    assert part["figures"]["chunked_loss_bytes_saved"] == peaks["all at once"] - peaks["in chunks"] >= logits_bytes
    low, high = part["spread"]["chunked_loss_step_s_ratio"]
    assert 0 < low <= high


def measured_ranks() -> Any:
    sys.path.insert(0, str(ROOT))
    from benchmarks import step_ranks

    model = ModelConfig(vocab_size=64, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32)
    return step_ranks.time_sides(model, Dtype.float32, 1, 2, 3, step_ranks.SIDES)


def test_all_sides_take_the_same_steps_on_two_ranks_in_every_round():
    for seconds in [each for of_rank in run_ranks(measured_ranks, 2) for each in of_rank]:
        assert list(seconds) == ["ours", "fsdp"]
        assert [[len(times) for times in rounds] for rounds in seconds.values()] == [[3, 3], [3, 3]]
        assert all(time > 0 for rounds in seconds.values() for times in rounds for time in times)


def test_without_torchtitan_one_line_says_how_to_get_it(benchmark, monkeypatch, capsys, tmp_path):
    from benchmarks import step_ranks

    took = {side: [[2.0, 1.0, 3.0], [4.0]] for side in step_ranks.SIDES}
    monkeypatch.setattr(step_ranks, "is_installed", lambda: False)
    monkeypatch.setattr(step_ranks, "run_ranks", lambda *arguments, **_: [(took, took)])
    part = step_ranks.measure_ranks(ModelConfig(), dtype=Dtype.bfloat16, rounds=2, steps=3)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == part.settings["left_out"]
    assert "pip install -e '.[benchmark]'" in line
    assert part.figures["cpu/debug/2_ranks/bfloat16/tokens_per_s_ratio_fsdp"] == 1.0
    assert part.figures["cpu/debug/2_ranks/bfloat16/tokens_per_cpu_s_ratio_fsdp"] == 1.0
    assert part.spread["cpu/debug/2_ranks/bfloat16/tokens_per_s"] == [2048 / 4, 2048 / 2]
    monkeypatch.setattr(benchmark, "is_installed", lambda: False)
    out = tmp_path / "step.json"
    small = ["--models", "debug-layers1", "--recipes", "torchtitan", "float32", "--seq-len", "32", "--quick"]
    arguments = ["--out", str(out), *small, "--micro-batch-seqs", "1", "--no-loss", "--rank-models", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["step.py", *arguments])
    benchmark.main()
    assert "pip install" in json.loads(out.read_text())["skipped"]["debug-layers1/torchtitan"]


def losses_of_torchtitan(model: ModelConfig) -> tuple[list[float], list[float]]:
    """Of ours and theirs, from the same weights, on the same rows."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.step_titan import build_trainer, micro_batches

    rows = count_up_rows(0, num_rows=4, seq_len=24, vocab_size=model.vocab_size)
    cpu, lr = torch.device("cpu"), 1e-2
    step = build_step(
        model, ParallelConfig(), OptimConfig(), mesh=build_mesh(plan_mesh(1, 1), "cpu"), device=cpu, seed=0
    )
    names = {name: hugging_face_name(name) for name, _ in step.model.named_parameters()}
    weights = {names[name]: value.full_tensor().detach().clone() for name, value in step.model.named_parameters()}
    trainer = build_trainer(
        model,
        device=cpu,
        dtype=Dtype.float32,
        seq_len=24,
        micro_batch_seqs=2,
        num_micro_batches=2,
        lr=lr,
        compiled=False,
        compile_backend="inductor",
        activation_checkpoint=ActivationCheckpoint.none,
    )
    (theirs,) = trainer.model_parts
    adapter = trainer.config.model_spec.state_dict_adapter(trainer.model_config, None)
    sample = next(theirs.parameters())
    theirs.load_state_dict(
        {
            name: distribute_tensor(value, sample.device_mesh, sample.placements)
            for name, value in adapter.from_hf(weights).items()
        },
        strict=not model.tied,
    )
    logged: list[float] = []
    trainer.metrics_processor.should_log = lambda _: True
    trainer.metrics_processor.log = lambda _, loss, *rest, **more: logged.append(loss)
    ours = []
    for _ in range(3):
        ours.append(step.run(list(rows.split(2)), num_micro_batches=2, lr=lr).resolve().loss)
        trainer.step += 1
        trainer.train_step(trainer.batch_generator(micro_batches(rows, 2)))
    return ours, logged


@pytest.mark.parametrize("tied", [False, True])
def test_torchtitan_takes_the_same_steps_of_the_same_model(tied):
    pytest.importorskip("torchtitan")
    model = ModelConfig(vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, tied=tied)
    ((ours, theirs),) = run_ranks(losses_of_torchtitan, 1, model)
    assert ours[-1] < ours[0]
    assert theirs == pytest.approx(ours, rel=1e-5)


def test_model_files_read_without_pyyaml_are_those_that_hydra_reads(benchmark):
    for path in sorted((ROOT / "conf" / "model").glob("*.yaml")):
        loaded = OmegaConf.load(path)
        want = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), loaded.get("model", loaded)))
        assert benchmark.read_model(path.stem) == want


def test_a_model_can_be_taken_with_fewer_layers(benchmark):
    config = benchmark.read_model("8b-layers4")
    assert (config.name, config.dim, config.num_layers) == ("8b-layers4", 4096, 4)


@pytest.mark.parametrize(("arguments", "says"), [(["--models", "9b"], "'9b'"), (["--recipes", "int4"], "'int4'")])
def test_an_unknown_model_or_recipe_ends_with_the_known_ones(benchmark, arguments, says, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["step.py", "--out", str(tmp_path / "x.json"), "--device", "cpu", *arguments])
    with pytest.raises(SystemExit, match=says):
        benchmark.main()
