"""Weights to Hugging Face's layout and back: the same bits, and the model that config.json describes."""

import json
import os
import resource
import shlex
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from tokenizers.processors import ByteLevel, RobertaProcessing, TemplateProcessing
from torch import Tensor

from regrow.accept.tiny import tiny_model
from regrow.config.schema import DataConfig, Dtype, ModelConfig, OptimConfig, PretrainConfig, RunConfig
from regrow.config.store import pretrain_config
from regrow.data.prepare.prepare import prepare
from regrow.data.prepare.tokenizer import END_OF_TEXT, encode, parse_tokenizer, train_tokenizer
from regrow.data.read.manifest import Manifest
from regrow.errors import CheckpointError, ConfigError, DataError, RegrowError, ResumeError
from regrow.model.llama import Llama
from regrow.model.size import parameter_shapes
from regrow.record.claim import Claim
from regrow.record.lock import lock_run
from regrow.record.run_folder import checkpoints_of, read_record, write_record
from regrow.record.unfinished import UNFINISHED
from regrow.runtime.run_folder import Run, check_may_start
from regrow.state.disk import tensors as tensors_module
from regrow.state.disk.catalog import choose, open_checkpoint
from regrow.state.disk.store import save_one_by_one
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry, whole_entry
from regrow.state.exchange import huggingface, runs
from regrow.state.exchange.huggingface import export_weights, hugging_face_name, import_entries, read_model
from regrow.state.exchange.runs import average_run, export_run, import_of_model, import_run
from regrow.storage import Storage
from support.corpus import WordRecipe
from support.opened import open_run
from support.ragged import ragged_model
from support.reference_llama import reference_logits
from support.runs import save_run

MODELS = {
    "tiny": tiny_model(),
    "tied": tiny_model(tied=True),
    "ragged": ragged_model(),
    "all-heads": ModelConfig(
        name="all-heads", vocab_size=50, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=24, rope_theta=1e4
    ),
}
LARGE = ModelConfig(vocab_size=8192, dim=1024, num_layers=6, num_heads=16, num_kv_heads=16, ffn_dim=2816)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def quiet(total: int) -> Any:
    return lambda num_bytes: None


def export(run: Path, to: Path, dtype: Dtype = Dtype.float32) -> str:
    _, index = choose(*checkpoints_of(str(run)))
    return export_run("hf", str(run), index, str(to), dtype=dtype, start=quiet)


def tensors_of(run: Path) -> CheckpointTensors:
    return CheckpointTensors(*choose(*checkpoints_of(str(run))), lambda num_bytes: None)


def logits(config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    model.rope_Q2.copy_(model.rope_frequencies_Q2())
    with torch.no_grad():
        return model(tokens)


@every_model
def test_there_and_back_is_bitwise_equal_and_begins_a_run_at_step_0(model: ModelConfig, tmp_path: Path) -> None:
    saved = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "hf")
    told = import_run("hf", str(tmp_path / "hf"), str(tmp_path / "again"), start=quiet)
    assert f"run.storage_path={tmp_path} run.name=again" in told
    again = tensors_of(tmp_path / "again")
    assert again.index.scalars == {"step": 0, "cursor": 0, "tokens_seen": 0}
    assert again.index.tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(again.whole(name), tensor if name.startswith("model/") else torch.zeros_like(tensor)), name


@every_model
def test_exported_weights_and_config_give_the_logits_of_the_run(model: ModelConfig, tmp_path: Path) -> None:
    """The exported files are read as anyone would, the model is built from config.json alone."""
    saved = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "hf")
    read = read_model(Storage.at(tmp_path / "hf"))
    files = load_file(tmp_path / "hf" / "model.safetensors")
    weights = {name: files[hugging_face_name(name)] for name in names_of(model)}
    assert len(files) == len(weights)
    mine = {name.removeprefix("model/"): tensor for name, tensor in saved.items() if name.startswith("model/")}
    tokens = torch.randint(model.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    got = logits(read, weights, tokens)
    assert torch.equal(got, logits(model, mine, tokens))
    double = {name: tensor.double() for name, tensor in weights.items()}
    for row, logits_TV in zip(tokens, got, strict=True):
        want = reference_logits(read, double, row)
        assert (logits_TV - want).abs().max() <= 1e-5 * want.abs().max()


@every_model
def test_transformers_gives_the_same_logits(model: ModelConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", torch_dtype=torch.float32)
    mine = {name.removeprefix("model/"): tensor for name, tensor in saved.items() if name.startswith("model/")}
    tokens = torch.randint(model.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    want = logits(model, mine, tokens)
    with torch.no_grad():
        got = theirs(tokens).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def names_of(model: ModelConfig) -> list[str]:
    return list(parameter_shapes(model))


def test_names_are_those_that_llama_for_causal_lm_has() -> None:
    got = {hugging_face_name(name) for name in names_of(tiny_model(num_layers=1))}
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    assert got == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"model.layers.0.{name}.weight" for name in layer),
    }


def test_large_models_are_split_over_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_run(tmp_path / "run", tiny_model())
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    export(tmp_path / "run", tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(t.nbytes for name, t in saved.items() if name.startswith("model/"))
    for file in files:
        for name in (content := load_file(tmp_path / "hf" / file)):
            assert index["weight_map"][name] == file
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= 20_000
    import_run("hf", str(tmp_path / "hf"), str(tmp_path / "again"), start=quiet)
    again = tensors_of(tmp_path / "again")
    assert all(torch.equal(again.whole(name), saved[name]) for name in saved if name.startswith("model/"))


def bytes_to_export(checkpoints: Path, to: str, shard_bytes: int) -> int:
    """That this process takes at the fullest moment of an export, over what it took before."""

    def kibibytes(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    huggingface.SHARD_BYTES = shard_bytes
    tensors_module.GROUP_BYTES = 1  # no neighbours
    index = open_checkpoint(Storage.at(checkpoints), 0)
    tensors, before = CheckpointTensors(Storage.at(checkpoints), index, lambda num_bytes: None), kibibytes("VmRSS:")
    export_weights(tensors, LARGE, Storage.at(to), dtype=Dtype.float32, seq_len=None, end_of_text_id=None)
    return 1024 * (kibibytes("VmHWM:") - before)


def test_a_larger_file_takes_the_memory_of_its_tensors_once(tmp_path: Path) -> None:
    entries = (whole_entry(f"model/{name}", torch.ones(shape)) for name, shape in parameter_shapes(LARGE).items())
    save_one_by_one(Storage.at(tmp_path / "run"), entries, scalars={"step": 0}, run_id="x")
    taken, written = list[int](), list[int]()
    for shard_bytes in (50_000_000, 400_000_000):
        folder = tmp_path / str(shard_bytes)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            taken.append(process.submit(bytes_to_export, tmp_path / "run", str(folder), shard_bytes).result())
        written.append(max(path.stat().st_size for path in folder.iterdir()))
    assert taken[1] - taken[0] < 1.5 * (written[1] - written[0])


def test_files_in_a_store_are_those_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path / "run", tiny_model())
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(huggingface, "PIECE_BYTES", 1000)
    store, folder = Storage.at(f"memory://{uuid.uuid4().hex}/hf"), Storage.at(tmp_path / "hf")
    for to in (store, folder):
        _, index = choose(*checkpoints_of(str(tmp_path / "run")))
        export_run("hf", str(tmp_path / "run"), index, str(to), dtype=Dtype.float32, start=quiet)
    assert store.list() == folder.list()
    assert sum(name.endswith(".safetensors") for name in folder.list()) > 2
    assert all(store.read_bytes(name) == folder.read_bytes(name) for name in folder.list())
    assert len({(tmp_path / "hf" / name).stat().st_mode for name in folder.list()}) == 1


def test_a_disk_that_is_full_is_told_in_a_line_and_leaves_no_file(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_model())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"hf/model.safetensors cannot be written"):
            export(tmp_path / "run", tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("form", ["hf", "torchtitan", "dcp"])
@pytest.mark.parametrize("is_there", [False, True])
def test_an_export_that_fails_leaves_the_folder_as_it_was(
    form: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    config = DataConfig(vocab_size=512, seq_len=8, validation_fraction=0.2)
    prepare(config, WordRecipe(), tmp_path / "data" / "words", progress=lambda stage, done, total: None)
    run, to = tmp_path / "run", tmp_path / "out"
    save_run(run, tiny_model(), steps=(1, 2))
    (run / "config.yaml").write_text("train: {steps: 9}")
    record = run / "run.json"
    record.write_text(record.read_text().replace("0" * 64, Manifest.load(tmp_path / "data" / "words").sha256))
    if is_there:
        to.mkdir()
    for file in (run / "checkpoints" / "step-00000002").glob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    checkpoints = checkpoints_of(str(run))
    with pytest.raises(CheckpointError, match="step-00000002"):
        export_run(form, str(run), choose(*checkpoints, 2)[1], str(to), dtype=Dtype.float32, start=quiet)
    assert to.exists() == is_there
    assert not is_there or list(to.iterdir()) == []
    export_run(form, str(run), choose(*checkpoints, 1)[1], str(to), dtype=Dtype.float32, start=quiet)


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something while an import writes its tensors."""
    save = runs.save_one_by_one

    def saved(folder: Storage, entries: Iterable[Entry], **options: Any) -> None:
        def with_act() -> Iterator[Entry]:
            first, *others = entries
            yield first
            act()
            yield from others

        save(folder, with_act(), **options)

    monkeypatch.setattr("regrow.state.disk.store.FILE_BYTES", 1)
    monkeypatch.setattr(runs, "save_one_by_one", saved)


def test_no_job_begins_and_nothing_else_fills_a_folder_that_an_import_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the job began from its seed, and whichever import failed first deleted the other one's files."""
    save_run(tmp_path / "run", tiny_model(), steps=(1, 2))
    export(tmp_path / "run", tmp_path / "hf")
    checkpoints, run_id = checkpoints_of(str(tmp_path / "run"))
    indexes = [choose(checkpoints, run_id, step)[1] for step in (1, 2)]
    again, refused = tmp_path / "again", list[str]()
    config = PretrainConfig(run=RunConfig(name="again", storage_path=str(tmp_path)), model=tiny_model())

    def others() -> None:
        before = sorted(again.rglob("*"))
        for attempt in (
            lambda: open_run(config, manifest_sha256="aa"),
            lambda: import_run("hf", str(tmp_path / "hf"), str(again), start=quiet),
            lambda: average_run(str(tmp_path / "run"), indexes, str(again), start=quiet),
            lambda: export(tmp_path / "run", again),
        ):
            with pytest.raises(RegrowError) as error:
                attempt()
            refused.append(str(error.value))
        assert sorted(again.rglob("*")) == before

    meanwhile(monkeypatch, others)
    import_run("hf", str(tmp_path / "hf"), str(again), start=quiet)
    assert len(refused) == 4
    assert all(line.startswith(f"{again} is not complete: ") for line in refused)
    assert sorted(path.name for path in again.iterdir()) == ["checkpoints", "run.json"]
    assert open_run(config, manifest_sha256="aa").resumed_step == 0
    assert tensors_of(again).index.tensors.keys() == tensors_of(tmp_path / "run").index.tensors.keys()


@pytest.mark.parametrize("is_given_up", [False, True])
def test_an_import_that_fails_deletes_what_it_made_and_nothing_of_others(
    is_given_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_given_up`: its mark was deleted by hand meanwhile, and the folder is a run's now."""
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    again = Storage.at(tmp_path / "again")
    config = PretrainConfig(run=RunConfig(name="again", storage_path=str(tmp_path)), model=tiny_model())

    def fails() -> None:
        lock = lock_run(again)  # as a job that comes to be refused
        assert lock is not None
        Claim.take(again)
        if is_given_up:
            again.delete(UNFINISHED)
            open_run(config, manifest_sha256="aa")
        lock.close()
        raise CheckpointError("the source is damaged")

    meanwhile(monkeypatch, fails)
    with pytest.raises(CheckpointError, match=r"^the source is damaged$"):
        import_run("hf", str(tmp_path / "hf"), str(again), start=quiet)
    run = ["checkpoints", "config.yaml", "run.json"] if is_given_up else []
    assert again.list() == [".lock", *run, "writers"]


def test_an_import_whose_mark_was_deleted_does_not_take_the_place_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    again = Storage.at(tmp_path / "again")
    config = PretrainConfig(run=RunConfig(name="again", storage_path=str(tmp_path)), model=tiny_model())
    begun = list[Run]()

    def given_up() -> None:
        again.delete(UNFINISHED)
        begun.append(open_run(config, manifest_sha256="aa"))

    meanwhile(monkeypatch, given_up)
    with pytest.raises(CheckpointError, match=r"again/\.unfinished was deleted, or is another process's"):
        import_run("hf", str(tmp_path / "hf"), str(again), start=quiet)
    record = read_record(again)
    assert record is not None
    assert record["run_id"] == begun[0].run_id


def test_an_import_into_a_store_is_marked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    again, seen = Storage.at(f"memory://{uuid.uuid4().hex}/again"), list[str]()

    def second() -> None:
        seen.extend(again.list())
        with pytest.raises(CheckpointError, match="again is not complete: "):
            import_run("hf", str(tmp_path / "hf"), str(again), start=quiet)

    meanwhile(monkeypatch, second)
    import_run("hf", str(tmp_path / "hf"), str(again), start=quiet)
    assert seen == [UNFINISHED, "checkpoints"]
    assert again.list() == ["checkpoints", "run.json"]


def test_an_import_that_is_terminated_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scheduler ends it. Before, half a folder stayed, in which the next job trained from its seed."""
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    unheard = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: unheard.append(number))
    try:
        meanwhile(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        options = ["--from", str(tmp_path / "hf"), "--to", str(tmp_path / "again"), "--format", "hf"]
        monkeypatch.setattr(sys, "argv", ["jobs.checkpoint", "import", *options])
        with pytest.raises(SystemExit) as ended:
            checkpoint.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ended.value.code, unheard) == (143, [])
    assert not (tmp_path / "again").exists()


def test_bfloat16_files_hold_the_nearest_values_and_can_be_imported(tmp_path: Path) -> None:
    saved = save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf", Dtype.bfloat16)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    import_run("hf", str(tmp_path / "hf"), str(tmp_path / "again"), start=quiet)
    again = tensors_of(tmp_path / "again")
    for name, tensor in saved.items():
        if name.startswith("model/"):
            assert torch.equal(again.whole(name), tensor.bfloat16().float()), name


def test_moments_are_stored_as_the_run_will_keep_them(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    source, bfloat16 = str(tmp_path / "hf"), Dtype.bfloat16
    told = import_run("hf", source, str(tmp_path / "again"), moments=bfloat16, start=quiet)
    assert told.endswith(" optim.moments=bfloat16")
    again = tensors_of(tmp_path / "again")
    for name in again.index.tensors:
        assert again.whole(name).dtype is (torch.float32 if name.startswith("model/") else torch.bfloat16), name
    import_run("hf", source, str(tmp_path / "plain"), start=quiet)
    for name, right, wrong in (("again", bfloat16, Dtype.float32), ("plain", Dtype.float32, bfloat16)):
        config = PretrainConfig(run=RunConfig(name=name, storage_path=str(tmp_path)), model=tiny_model())
        refused = replace(config, optim=OptimConfig(moments=wrong))
        with pytest.raises(ResumeError, match=rf"optim\.moments: {right} -> {wrong}"):
            check_may_start(refused)  # else the run is restored in vain, for good
        config.optim.moments = right
        open_run(config, manifest_sha256="aa")
        assert open_run(config, manifest_sha256="aa").resumed_step == 0
    import_run("hf", source, str(tmp_path / "older"), moments=bfloat16, start=quiet)
    record = read_record(Storage.at(tmp_path / "older"))
    assert record is not None
    del record["identity"]["optim.moments"]  # as a version before wrote it, which told how to start it
    write_record(
        Storage.at(tmp_path / "older"), run_id=record["run_id"], identity=record["identity"], manifest_sha256=None
    )
    config = PretrainConfig(run=RunConfig(name="older", storage_path=str(tmp_path)), model=tiny_model())
    check_may_start(replace(config, optim=OptimConfig(moments=bfloat16)))
    with pytest.raises(CheckpointError, match="leave out --moments bfloat16"):
        import_run("dcp", source, str(tmp_path / "other"), moments=bfloat16, start=quiet)


def test_the_command_for_a_run_in_a_store_with_options_is_read_as_it_is_meant(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    store = f"memory://{uuid.uuid4().hex}/runs"
    told = import_run("hf", str(tmp_path / "hf"), f"{store}/mine?region=x&scheme=http", start=quiet)
    config = pretrain_config([word for word in shlex.split(told.splitlines()[-1]) if word.startswith("run.")])
    assert (config.run.storage_path, config.run.name) == (f"{store}?region=x&scheme=http", "mine")


@pytest.mark.parametrize(
    ("folder", "name"),
    [(folder, "mine") for folder in ("im port(1)", "a,b", "it's", 'so "called"', "{x};y&z", "a=b", "é", "~", "b\\")]
    + [("runs", name) for name in ("007", "1e5", "null", "True")],
)
def test_the_command_for_a_run_is_read_as_its_folder_is_called(folder: str, name: str, tmp_path: Path) -> None:
    arguments = shlex.split(runs._named(Storage.at(tmp_path / folder / name)))
    run = pretrain_config(arguments).run
    assert (run.storage_path, run.name) == (str(tmp_path / folder), name)


@pytest.mark.parametrize("name", ["my run", "llama+tuned", "a" * 64, "_x"])
def test_a_folder_by_whose_name_no_run_can_go_is_refused_before_it_is_written(name: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_model(), steps=(1, 2))
    export(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(ConfigError, match="must be 1 to 63 letters"):
        import_run("hf", str(tmp_path / "hf"), str(tmp_path / name), start=quiet)
    with pytest.raises(ConfigError, match="must be 1 to 63 letters"):
        import_of_model("torchtitan", str(tmp_path / "hf"), str(tmp_path / name), model="debug", start=quiet)
    checkpoints, run_id = checkpoints_of(str(tmp_path / "run"))
    indexes = [choose(checkpoints, run_id, step)[1] for step in (1, 2)]
    with pytest.raises(ConfigError, match="must be 1 to 63 letters"):
        average_run(str(tmp_path / "run"), indexes, str(tmp_path / name), start=quiet)
    assert not (tmp_path / name).exists()


def test_the_tokenizer_of_the_runs_corpus_goes_with_it(tmp_path: Path) -> None:
    config = DataConfig(vocab_size=512, seq_len=8, validation_fraction=0.2)
    (tmp_path / "data" / "unfinished").mkdir(parents=True)
    prepare(config, WordRecipe(), tmp_path / "data" / "words", progress=lambda stage, done, total: None)
    save_run(tmp_path / "run", tiny_model())
    assert "without a tokenizer" in export(tmp_path / "run", tmp_path / "without")
    manifest = Manifest.load(tmp_path / "data" / "words")
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace("0" * 64, manifest.sha256))
    assert f"with the tokenizer of {tmp_path}/data/words" in export(tmp_path / "run", tmp_path / "hf")
    tokenizer = (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert tokenizer == (tmp_path / "data" / "words" / "tokenizer.json").read_bytes()
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["bos_token_id"] == exported["eos_token_id"] == manifest.tokenizer.eot_id
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["eos_token"] == END_OF_TEXT
    config_file = tmp_path / "run" / "config.yaml"
    config_file.write_text("run: [")
    with pytest.raises(RegrowError, match=r"config\.yaml is damaged"):
        export(tmp_path / "run", tmp_path / "unknown")
    config_file.write_text("run: {storage_path: nope://of-the-cluster}")
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "run")
    assert "without a tokenizer" in export(tmp_path / "elsewhere" / "run", tmp_path / "none")
    (tmp_path / "elsewhere" / "run" / "config.yaml").write_text("data: {corpora: {words: nope://of-the-cluster/words}}")
    told = export(tmp_path / "elsewhere" / "run", tmp_path / "out-of-reach")
    assert "without a tokenizer: its corpus was not found, or cannot be read from here" in told
    config_file.unlink()
    (tmp_path / "data" / "words" / "tokenizer.json").write_bytes(tokenizer + b" ")
    with pytest.raises(DataError, match=r"tokenizer\.json is not what its manifest says"):
        export(tmp_path / "run", tmp_path / "damaged")


TEMPLATE = TemplateProcessing(single="a $A", special_tokens=[("a", 65)])


@pytest.mark.parametrize(
    ("processor", "kept"),
    [
        (TEMPLATE, None),
        (RobertaProcessing(("b", 66), ("a", 65)), None),
        (processors.Sequence([ByteLevel(trim_offsets=False), TEMPLATE]), ["ByteLevel"]),  # Llama 3's
    ],
    ids=["template", "roberta", "sequence"],
)
def test_an_exported_tokenizer_puts_no_token_before_a_text(processor: Any, kept: Any, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a text of words, and another one"] * 9, vocab_size=300)
    tokenizer.post_processor = processor
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    huggingface.export_tokenizer(Storage.at(tmp_path), tokenizer.to_str().encode(), end_of_text=END_OF_TEXT, seq_len=8)
    exported = json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]
    assert (exported and [each["type"] for each in exported["processors"]]) == kept
    text = "another text ¶ of words"
    trained = encode(parse_tokenizer(tokenizer.to_str().encode(), "here"), [text])[0]
    assert trained is not None
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == trained.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; regrow's Llama has 'llama'"),
        ({"attention_bias": True}, "attention_bias is True; regrow's Llama has False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; regrow's Llama has 'silu'"),
        ({"head_dim": 64}, "head_dim is 64; regrow's Llama has 8"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is of type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "is not a Llama's config: KeyError: 'factor'"),
        ({"num_hidden_layers": 3}, "has no model.layers.2."),
        ({"num_hidden_layers": 1}, "holds model.layers.1."),
        ({"intermediate_size": 64}, r"down_proj.weight is \[32, 48\], its config.json says \[32, 64\]"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is set, but lm_head.weight is not the embedding"),
    ],
)
def test_what_this_llama_cannot_be_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        import_run("hf", str(tmp_path / "hf"), str(tmp_path / "again"), start=quiet)
    assert read_record(Storage.at(tmp_path / "again")) is None


def test_the_settings_of_newer_and_older_versions_are_understood(tmp_path: Path) -> None:
    """Newer ones keep RoPE's settings together; older ones save buffers, and a tied output a second time."""
    model = tiny_model(tied=True)
    saved = save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["rope_parameters"] = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
    del config["head_dim"], config["hidden_act"], config["attention_bias"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    source = Storage.at(tmp_path / "hf")
    read = read_model(source)
    assert {**vars(read), "name": ""} == {**vars(model), "name": ""}
    entries = {entry.box.name: entry for entry in import_entries(source, read, lambda num_bytes: None)}
    assert torch.equal(entries["model/embed.weight"].memory, saved["model/embed.weight"].view(-1))
    assert entries.keys() == saved.keys()


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        import_run("hf", str(tmp_path / "hf"), str(tmp_path / "again"), start=quiet)
    assert not (tmp_path / "again" / "run.json").exists()


def test_folders_that_hold_something_are_left_alone(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tiny_model())
    export(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is not empty; name a new folder"):
        export(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is not empty; name a new folder"):
        import_run("hf", str(tmp_path / "hf"), str(tmp_path / "run"), start=quiet)
    with pytest.raises(CheckpointError, match="is not there; name a folder that holds a Hugging Face model"):
        import_run("hf", str(tmp_path / "nowhere"), str(tmp_path / "new"), start=quiet)
