"""Whole states to torch.distributed.checkpoint and back: the same bits, and reading a folder runs nothing of it."""

import io
import os
import pickle
import pickletools
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from regrow.accept.tiny import tiny_model
from regrow.config.schema import Dtype, OptimConfig, ParallelConfig
from regrow.errors import CheckpointError
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.record.run_folder import checkpoints_of, read_record
from regrow.state.disk.catalog import choose
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.exchange.dcp import ExportedState
from regrow.state.exchange.dcp_folder import METADATA
from regrow.state.exchange.runs import export_run, import_run
from regrow.storage import Storage
from support.ragged import ragged_model
from support.runs import save_run

MODEL = ragged_model()


def quiet(total: int) -> Any:
    return lambda num_bytes: None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run and what was exported of it."""
    folder = tmp_path_factory.mktemp("dcp")
    save_run(folder / "run", MODEL)
    _, index = choose(*checkpoints_of(str(folder / "run")))
    export_run("dcp", str(folder / "run"), index, str(folder / "dcp"), dtype=Dtype.float32, start=quiet)
    return folder


def saved(folder: Path) -> dict[str, Tensor]:
    tensors = CheckpointTensors(*choose(*checkpoints_of(str(folder))), lambda num_bytes: None)
    return {name: tensors.whole(name) for name in tensors.index.tensors}


def test_there_and_back_is_bitwise_equal_with_moments_scalars_and_settings(folder: Path, tmp_path: Path) -> None:
    told = import_run("dcp", str(folder / "dcp"), str(tmp_path / "again"), start=quiet)
    assert "goes on from step 2" in told
    before, after = saved(folder / "run"), saved(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    _, index = choose(*checkpoints_of(str(tmp_path / "again")))
    assert index.scalars == {"step": 2, "cursor": 24, "tokens_seen": 192}
    mine, theirs = read_record(Storage.at(tmp_path / "again")), read_record(Storage.at(folder / "run"))
    assert mine is not None
    assert theirs is not None
    assert mine["identity"] == theirs["identity"]
    assert mine["manifest_sha256"] == theirs["manifest_sha256"]
    assert mine["run_id"] != theirs["run_id"]


@pytest.mark.parametrize("most", [700, 5_000, 10_000])
def test_an_export_onto_a_full_disk_ends_in_one_error_that_says_so(folder: Path, tmp_path: Path, most: int) -> None:
    """Torch raised one of its own over that of the disk, and the command ended with a traceback."""
    _, index = choose(*checkpoints_of(str(folder / "run")))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"dcp\S* cannot be written: .*File too large"):
            export_run("dcp", str(folder / "run"), index, str(tmp_path / "dcp"), dtype=Dtype.float32, start=quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "dcp").exists()


def test_torch_loads_what_was_exported_into_a_plain_state_dict(folder: Path, tmp_path: Path) -> None:
    before = saved(folder / "run")
    state: dict[str, Any] = {
        "model": {name.removeprefix("model/"): torch.empty_like(t) for name, t in before.items() if name[0] == "m"},
        "scalars": {"step": 0},
    }
    torch_dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    assert state["scalars"]["step"] == 2
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, before[f"model/{name}"])
    dcp_to_torch_save(folder / "dcp", tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, moments in everything["optim"]["state"].items():
        assert moments["step"] == 2
        assert torch.equal(moments["exp_avg_sq"], before[f"optim/exp_avg_sq/{name}"])


def test_torchs_own_optimizer_takes_the_moments(folder: Path) -> None:
    model = build_model(MODEL, ParallelConfig(), mesh=None, device="cpu", seed=7)
    optimizer = build_optimizer(model, OptimConfig())
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    planner = DefaultLoadPlanner(allow_partial_load=True)  # what is not state, such as lr, stays
    torch_dcp.load(state, checkpoint_id=folder / "dcp", planner=planner, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optim"])
    before = saved(folder / "run")
    for name, parameter in model.named_parameters():
        assert optimizer.state[parameter]["step"] == 2
        assert torch.equal(optimizer.state[parameter]["exp_avg"], before[f"optim/exp_avg/{name}"])


HELD = """
import resource, sys
import torch
import regrow.state.disk.store as store
from regrow.state.disk.catalog import choose
from regrow.config.schema import Dtype
from regrow.state.exchange.runs import export_run, import_run
from regrow.record.run_folder import checkpoints_of

store.FILE_BYTES = 2**22
for run in ("small", "large"):
    run = f"{sys.argv[1]}/{run}"
    for form in ("hf", "dcp"):
        _, index = choose(*checkpoints_of(run))
        export_run(form, run, index, f"{run}-{form}", dtype=Dtype.float32, start=lambda total: lambda done: None)
        import_run(form, f"{run}-{form}", f"{run}-from-{form}", start=lambda total: lambda done: None)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_only_a_few_tensors_are_held_at_a_time(tmp_path: Path) -> None:
    """142 MB of state, of which the largest tensor is 3 MB, files of up to 4 MB, both formats there and back."""
    save_run(tmp_path / "small", tiny_model(num_layers=1))
    whole = save_run(tmp_path / "large", tiny_model(num_layers=4, dim=512, ffn_dim=1536))
    state_bytes = sum(tensor.nbytes for tensor in whole.values())
    done = subprocess.run([sys.executable, "-c", HELD, tmp_path], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert state_bytes > 140e6
    assert after - before < 40e6, (before, after)


class Evil:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, r"(posix|nt)\.system"),
        (eval, r"(builtins|__builtin__)\.eval"),
        (exec, r"(builtins|__builtin__)\.exec"),
        (torch.load, r"torch\.serialization\.load"),
        (__import__, r"(builtins|__builtin__)\.__import__"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_is_refused_by_name_and_not_run(
    function: Callable[..., Any], name: str, protocol: int, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "dcp", tmp_path / "dcp")
    proof = tmp_path / "proof"
    argument: Any = f"open({str(proof)!r}, 'w')" if function in (eval, exec) else f"touch {proof}"
    (tmp_path / "dcp" / METADATA).write_bytes(pickle.dumps({"a": [Evil(function, argument)]}, protocol=protocol))
    with pytest.raises(CheckpointError, match=rf"it names {name}, which is no part of DCP's metadata"):
        import_run("dcp", str(tmp_path / "dcp"), str(tmp_path / "again"), start=quiet)
    assert not proof.exists()
    assert not (tmp_path / "again").exists()


def test_what_metadata_may_name_leads_nowhere(folder: Path, tmp_path: Path) -> None:
    """`getattr`, by which pickles usually get out, stands in the metadata of some versions, but for nothing."""
    way_out = Evil(getattr, Evil(getattr, torch.distributed.checkpoint.metadata.Metadata, "__init__"), "__globals__")
    for content in (way_out, {way_out: 1}, Evil(torch.Size, way_out)):
        shutil.copytree(folder / "dcp", tmp_path / "dcp", dirs_exist_ok=True)
        data = pickle.dumps(content)
        names = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
        assert "getattr" in names
        (tmp_path / "dcp" / METADATA).write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot be read"):
            ExportedState(tmp_path / "dcp")


def test_a_pickle_in_the_data_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "dcp", tmp_path / "dcp")
    proof = tmp_path / "proof"
    evil = io.BytesIO()
    torch.save({"x": Evil(os.system, f"touch {proof}")}, evil)
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.write_bytes(evil.getvalue()[: file.stat().st_size].ljust(file.stat().st_size, b"\0"))
    with pytest.raises(CheckpointError, match=r"\.distcp: .* cannot be read"):
        import_run("dcp", str(tmp_path / "dcp"), str(tmp_path / "again"), start=quiet)
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.write_bytes(evil.getvalue())
    with pytest.raises(CheckpointError):
        import_run("dcp", str(tmp_path / "dcp"), str(tmp_path / "again"), start=quiet)
    assert not proof.exists()


@pytest.mark.slow
def test_damaged_metadata_and_missing_files_end_in_one_error(folder: Path, tmp_path: Path) -> None:
    """Never in another exception. DCP has no checksums: a bit that changes no structure may go unnoticed."""
    pristine = (folder / "dcp" / METADATA).read_bytes()
    shutil.copytree(folder / "dcp", tmp_path / "dcp")
    dice, refused = random.Random(0), 0
    for trial in range(150):
        data = bytearray(pristine)
        if trial % 3:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        else:
            del data[dice.randrange(len(data)) :]
        (tmp_path / "dcp" / METADATA).write_bytes(data)
        try:
            for entry in ExportedState(tmp_path / "dcp").entries(lambda num_bytes: None):
                assert entry.memory.numel() == entry.box.num_elements
        except CheckpointError as error:
            refused += str(tmp_path / "dcp") in str(error)
    assert refused > 100
    (tmp_path / "dcp" / METADATA).write_bytes(pristine)
    next((tmp_path / "dcp").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"\.distcp: .* cannot be read"):
        list(ExportedState(tmp_path / "dcp").entries(lambda num_bytes: None))


def test_a_damaged_checkpoint_is_not_exported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    (file,) = (tmp_path / "run" / "checkpoints" / "step-00000002").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    _, index = choose(*checkpoints_of(str(tmp_path / "run")))
    for form in ("dcp", "hf"):
        run, target = str(tmp_path / "run"), tmp_path / form
        if form == "hf":  # whose model comes first in the file
            data[len(data) // 4] ^= 1
            file.write_bytes(data)
        with pytest.raises(CheckpointError, match="fails its checksum; the file is damaged"):
            export_run(form, run, index, str(target), dtype=Dtype.float32, start=quiet)
        assert not (target / METADATA).exists()
        assert not (target / "config.json").exists()


def test_folders_that_are_no_export_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not there; name a folder of torch"):
        ExportedState(tmp_path)
    torch_dcp.save({"weights": torch.ones(3)}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(CheckpointError, match="only what `export --format dcp` wrote can be imported"):
        ExportedState(tmp_path / "other")
    with pytest.raises(CheckpointError, match="on a file system alone"):
        import_run("dcp", "memory://folder", str(tmp_path / "again"), start=quiet)
