"""A window of steps under the profiler: what is written, and when nothing is."""

import gzip
import json
from pathlib import Path

import torch

from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import OptimConfig, ParallelConfig
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.storage import Storage
from regrow.train.profile import KINDS, REST, ProfileWindow, Spent, kind_of, summary
from regrow.train.step import TrainStep


def train(window: ProfileWindow, steps: range) -> list[str]:
    """Real steps; where the window said that something was written."""
    model = build_model(tiny_model(), ParallelConfig(), mesh=None, device="cpu", seed=0)
    step = TrainStep(model, build_optimizer(model, OptimConfig()), max_grad_norm=1.0, group=None, shard_group=None)
    found = [window.after(steps.start - 1)]
    for number in steps:
        step.run([count_up_rows(number, num_rows=2, seq_len=8)], num_micro_batches=1, lr=1e-3).resolve()
        found.append(window.after(number))
    window.abandon()
    return [where for where in found if where is not None]


def test_a_trace_and_a_page_are_written_after_the_last_step_of_the_window(tmp_path: Path) -> None:
    window = ProfileWindow(Storage.at(tmp_path), torch.device("cpu"), first=2, num_steps=2)
    assert train(window, range(1, 6)) == [str(tmp_path / "profiles" / "step-00000002")]
    folder = tmp_path / "profiles" / "step-00000002"
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "aten::_fused_adamw_" for event in trace["traceEvents"]) == 2 * 2  # groups, steps
    page = (folder / "summary.md").read_text()
    assert page.startswith("# steps 2 to 3, one rank on cpu\n")
    for kind in ("matrix products", "attention", "optimizer and clipping", REST):
        assert f"| {kind} |" in page
    assert len(page.splitlines()) < 60


def test_a_group_that_does_not_train_through_the_window_leaves_nothing(tmp_path: Path) -> None:
    first = ProfileWindow(Storage.at(tmp_path), torch.device("cpu"), first=2, num_steps=3)
    assert train(first, range(1, 4)) == []  # it broke
    again = ProfileWindow(Storage.at(tmp_path), torch.device("cpu"), first=2, num_steps=3)
    assert train(again, range(4, 7)) == []  # it went on from here
    assert list(tmp_path.iterdir()) == []
    at_once = ProfileWindow(Storage.at(tmp_path), torch.device("cpu"), first=7, num_steps=1)
    assert train(at_once, range(7, 8))  # from the first step of a group, too


def test_shares_add_up_and_names_do_not_break_the_table() -> None:
    found = [Spent("aten::mm", 0.006, 8), Spent("void cutlass::a|b", 0.003, 4), Spent("aten::silu", 0.001, 2)]
    page = summary(found, title="steps", num_steps=2)
    assert "| matrix products | 4.50 | 90.0% |" in page
    assert "| everything else | 0.50 | 10.0% |" in page
    assert r"`void cutlass::a\|b`" in page
    assert "| all | 5.00 | |" in page


def test_every_kind_has_a_kernel() -> None:
    kernels = {
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "collectives",
        "flash_fwd_kernel": "attention",
        "nvjet_tst_128x256": "matrix products",
        "multi_tensor_apply_kernel": "optimizer and clipping",
        "Memcpy DtoD": "copies and casts",
        "triton_poi_fused_silu_mul": "fused by torch.compile",
        "elementwise_kernel": REST,
    }
    assert {name: kind_of(name) for name in kernels} == kernels
    assert set(kernels.values()) == {kind for kind, _ in KINDS} | {REST}
