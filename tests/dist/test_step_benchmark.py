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

from regrow.config.schema import ModelConfig
from regrow.testing.gloo import run_ranks

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


def test_the_benchmark_runs_where_only_torch_is_installed_and_writes_what_it_measured(tmp_path):
    out = tmp_path / "results" / "step.json"
    small = ["--models", "debug-layers1", "--seq-len", "32", "--micro-batch-seqs", "2", "--warmup", "1", "--quick"]
    recipes = ["--recipes", "bare", "float32", "bfloat16", "tensorwise", "--device", "cpu", "--no-loss"]
    recipes += ["--rank-models"]  # none
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
    return step_ranks.time_sides(model, 1, 1, 2)


def test_both_sides_take_the_same_steps_on_two_ranks():
    for seconds in run_ranks(measured_ranks, 2):
        assert [len(times) for times in seconds.values()] == [2, 2]
        assert all(time > 0 for times in seconds.values() for time in times)


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
