"""Runs made of Hugging Face's weights, torchtitan's or torch's DCP, or a mean of checkpoints; and written as these."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import yaml

from regrow.config.check import BFLOAT16_BETA, check_run_name
from regrow.config.plain import read_model
from regrow.config.schema import DataConfig, Dtype, OptimConfig, Schedule
from regrow.data.prepare.tokenizer import parse_tokenizer
from regrow.data.read.corpora import Corpora, prepared_in
from regrow.errors import CheckpointError, DataError
from regrow.model.size import parameter_shapes
from regrow.optim.adamw import MOMENTS
from regrow.optim.schedule import lr_at
from regrow.plan.boxes import ITEM_BYTES, Box
from regrow.record.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    model_of,
    new_run_id,
    read_config,
    read_record,
    write_record,
)
from regrow.record.unfinished import check_empty, filling
from regrow.state.disk.catalog import Start, may_be_deleted
from regrow.state.disk.format import Index
from regrow.state.disk.store import save_one_by_one
from regrow.state.disk.tensors import CheckpointTensors
from regrow.state.entries import Entry, Progress
from regrow.state.exchange import dcp, huggingface
from regrow.state.exchange.megatron import MegatronFolder
from regrow.state.exchange.torchtitan import AdamWSettings, TitanFolder, bytes_read, export_for_torchtitan
from regrow.storage import Storage, StorageError, split_location

NOT_TOLD = ("name", "document_attention")  # of a model by Hugging Face's config.json
WORDS_OF_HYDRA = ("null", "true", "false", "nan", "inf")  # values that are no text


@dataclass(frozen=True)
class Batch:
    """What each step of a trainer took, all ranks together."""

    seqs: int
    seq_len: int


def export_run(form: str, run_folder: str, index: Index, to: str, *, dtype: Dtype, start: Start) -> str:
    """Write a run's checkpoint to a new folder, in the form `hf` (its weights in `dtype`), `dcp` or `torchtitan`; says
    what it did.

    Raises RegrowError where the folder is not empty, or the checkpoint is damaged. What fails leaves nothing there.
    """
    run, target = Storage.at(run_folder), Storage.at(to)
    with filling(target), may_be_deleted(run / CHECKPOINTS, index.step):
        if form == "hf":
            written = _export_weights(run, index, target, dtype, start)
        elif dtype is not Dtype.float32:
            raise CheckpointError(
                f"{form} holds the state as it is, in float32; leave out --dtype {dtype}, or export to hf"
            )
        elif form == "torchtitan":
            written = _export_for_torchtitan(run, index, target, start)
        else:
            written = _export_state(run, index, target, start)
    return f"step {index.step} of {run} is at {target}, {written}"


def import_run(form: str, source: str, run_folder: str, *, moments: Dtype = Dtype.float32, start: Start) -> str:
    """Make a run of what lies in a folder in the form `hf` or `dcp`; says how to start it.

    AdamW's moments, which `hf` does not have, begin at zero, kept as `moments`.
    Raises RegrowError where the run's folder is not empty or its name no run's, or the source is damaged, or no such
    model or state.
    """
    run = Storage.at(run_folder)
    _check_new_run(run)
    if form == "hf":
        return "\n".join(_import_weights(Storage.at(source), run, moments, start))
    if moments is not Dtype.float32:
        raise CheckpointError(f"dcp holds moments, kept as they are; leave out --moments {moments}")
    return "\n".join(_import_state(Storage.at(source), run, start))


def import_of_model(
    form: str,
    source: str,
    run_folder: str,
    *,
    model: str,
    batch: Batch | None = None,
    moments: Dtype = Dtype.float32,
    start: Start,
) -> str:
    """Make a run of a folder of `torchtitan` or `megatron` (Megatron-Core), of this model of conf/model; says how to
    start it.

    It goes on from the step of a folder of torchtitan's that has the optimizer's state, and `batch` says what of the
    data that is; else it begins with the weights, and moments kept as `moments`.
    Raises RegrowError where the run's folder is not empty or its name no run's, or the source is damaged, or of another
    model or batch.
    """
    run, config, folder = Storage.at(run_folder), read_model(model), _local(Storage.at(source))
    _check_new_run(run)
    state = TitanFolder(folder, config) if form == "torchtitan" else MegatronFolder(folder, config)
    goes_on = isinstance(state, TitanFolder) and state.has_optimizer
    adamw = state.adamw() if isinstance(state, TitanFolder) and goes_on else None
    if goes_on and moments is not Dtype.float32:
        raise CheckpointError(f"{source} holds moments, kept as they are; leave out --moments {moments}")
    progress = _progress_of(state, source, batch) if isinstance(state, TitanFolder) and goes_on else Progress()
    identity = {f"model.{key}": value for key, value in asdict(config).items() if key not in NOT_TOLD}
    if batch is not None:
        identity |= {"optim.global_batch_seqs": batch.seqs, "data.seq_len": batch.seq_len}
    entries = _noted(state.entries(start(state.num_bytes), moments=getattr(torch, moments)), identity)
    _create(run, entries, progress, identity, None)
    begins = f"goes on from step {progress.step}" if goes_on else "begins at step 0 with the weights"
    command = f"    python -m jobs.pretrain {_named(run)} model={model}"
    command += "".join(f" {key}={identity[key]}" for key in identity if key.startswith(("data.", "optim.global")))
    command += _kept_as(identity)
    lines = [f"{run} {begins} of {source}. With a corpus prepared with the same tokenizer, start it with", "", command]
    if adamw is not None:
        lines = [*lines[:-1], command + _said(adamw), "", *_not_carried(progress, adamw, identity["optim.moments"])]
    elif isinstance(state, MegatronFolder) and state.padding:
        rows = " and ".join(f"{rows:,} rows of {key}" for key, rows in state.padding.items())
        lines += ["", f"Left out: {rows}, which pad the vocabulary of {config.vocab_size:,}."]
    return "\n".join(lines)


def _progress_of(state: TitanFolder, source: str, batch: Batch | None) -> Progress:
    """Where a run stands that took such batches. Raises CheckpointError where none of its ranks can have."""
    if batch is None:
        raise CheckpointError(
            f"{source} does not say how large its batches were: give --global-batch-seqs and --seq-len, "
            "its training.global_batch_size and training.seq_len"
        )
    tokens = state.step * batch.seqs * batch.seq_len
    if not state.step <= state.rank_tokens <= tokens:  # of its share of each step, by the ranks that there were then
        raise CheckpointError(
            f"{source}: a rank of it has trained on {state.rank_tokens:,} tokens, where {state.step:,} steps of "
            f"{batch.seqs} x {batch.seq_len} are {tokens:,}; --global-batch-seqs and --seq-len are its "
            "training.global_batch_size and training.seq_len"
        )
    return Progress(step=state.step, cursor=state.step * batch.seqs, tokens_seen=tokens)


def _noted(entries: Iterable[Entry], identity: dict[str, Any]) -> Iterator[Entry]:
    """The same; how moments are kept is the run's setting from there on."""
    for entry in entries:
        if entry.box.name.startswith(f"optim/{MOMENTS[0]}/"):
            identity["optim.moments"] = entry.box.dtype
        yield entry


def _kept_as(identity: dict[str, Any]) -> str:
    """The setting that says how moments are kept, where it is not the usual one."""
    dtype = identity["optim.moments"]
    return "" if dtype == Dtype.float32 else f" optim.moments={dtype}"


def _said(adamw: AdamWSettings) -> str:
    beta1, beta2 = adamw.betas
    settings = {"lr": adamw.lr, "beta1": beta1, "beta2": beta2, "eps": adamw.eps, "weight_decay": adamw.weight_decay}
    return "".join(f" optim.{key}={value!r}" for key, value in settings.items())


def _not_carried(progress: Progress, adamw: AdamWSettings, moments: str) -> Iterator[str]:
    for key, beta in zip(("beta1", "beta2"), adamw.betas, strict=True):
        if moments == Dtype.bfloat16 and beta > BFLOAT16_BETA:
            yield (
                f"Refused as it stands: its moments are bfloat16, which hardly fall with optim.{key}={beta}; give "
                f"optim.{key}={BFLOAT16_BETA} or less."
            )
    yield (
        f"Not carried over: the place in its data (here, samples from {progress.cursor:,} on are next), and its "
        "schedule, which train.steps and optim.{schedule, warmup_fraction, decay_fraction, min_lr_ratio} are to say."
    )
    if adamw.decays_norms:
        yield "Its AdamW decayed norms too; here matrices alone are."


def average_run(run_folder: str, indexes: Sequence[Index], to: str, *, start: Start) -> str:
    """Make a run whose weights are the mean of those of several checkpoints of one run; says how to go on from it.

    The mean is taken in float64. AdamW's moments, the step and the place in the data are those of the newest one.
    Raises RegrowError where the new run's folder is not empty or its name no run's, a checkpoint is damaged, or
    there are fewer than two.
    """
    run, target = Storage.at(run_folder), Storage.at(to)
    newest, *others = sorted(indexes, key=lambda index: -index.step)
    if not others:
        raise CheckpointError(f"an average takes two checkpoints or more, and this is step {newest.step} alone")
    for other in others:
        if other.tensors != newest.tensors:
            raise CheckpointError(f"step {other.step} of {run} has other tensors than step {newest.step}")
    _check_new_run(target)
    record = _record(run)
    weights = sum(prod(shape) for name, (_, shape) in newest.tensors.items() if name.startswith("model/"))
    advance = start(newest.tensor_bytes + len(others) * weights * ITEM_BYTES["float32"])
    config = run.read_bytes(CONFIG_FILE) if run.exists(CONFIG_FILE) else None  # it says where the corpus is
    progress = Progress.of(newest.scalars)
    with may_be_deleted(run / CHECKPOINTS, *(index.step for index in indexes)):
        opened = [CheckpointTensors(run / CHECKPOINTS, index, advance) for index in (newest, *others)]
        _create(target, _averaged(opened), progress, record["identity"], record["manifest_sha256"], config)
    steps = ", ".join(str(index.step) for index in reversed((newest, *others)))
    return (
        f"{target} has the mean of the weights of steps {steps} of {run}, and all else of step {newest.step}. "
        f"Evaluate or export it, or train on with the run's settings: python -m jobs.pretrain {_named(target)} ..."
    )


def _averaged(opened: Sequence[CheckpointTensors]) -> Iterator[Entry]:
    """Of each weight the mean, of all other tensors the first checkpoint's; one after another, whole."""
    newest = opened[0]
    for name, (dtype, shape) in newest.index.tensors.items():
        mean = torch.empty(prod(shape), dtype=getattr(torch, dtype))
        averaged = opened if name.startswith("model/") else [newest]
        at = 0
        for pieces in zip(*(each.pieces(name) for each in averaged), strict=True):
            total = pieces[0].double()
            for piece in pieces[1:]:
                total += piece
            mean[at : at + len(total)] = total / len(averaged)
            at += len(total)
        yield Entry(Box.whole(name, shape, dtype), mean)


def _export_weights(run: Storage, index: Index, target: Storage, dtype: Dtype, start: Start) -> str:
    """For `LlamaForCausalLM`, with the tokenizer of the run's corpus; says which that is."""
    record = _record(run)
    model, seq_len = model_of(record["identity"]), record["identity"].get("data.seq_len")
    corpora = corpora_of(run, record)
    if corpora is not None:
        tokenizer = read_tokenizer(corpora)
        end_of_text = parse_tokenizer(tokenizer, corpora.folders[0]).id_to_token(corpora.eot_id)
        assert end_of_text is not None, "preparation found it in this file"
        huggingface.export_tokenizer(target, tokenizer, end_of_text=end_of_text, seq_len=seq_len)
    num_bytes = sum(prod(shape) for shape in parameter_shapes(model).values()) * ITEM_BYTES["float32"]
    huggingface.export_weights(
        CheckpointTensors(run / CHECKPOINTS, index, start(num_bytes)),
        model,
        target,
        dtype=dtype,
        seq_len=seq_len,
        end_of_text_id=None if corpora is None else corpora.eot_id,
    )
    if corpora is None:
        return "without a tokenizer: its corpus was not found, or cannot be read from here; copy its tokenizer.json"
    return f"with the tokenizer of {corpora.folders[0]}"


def _export_state(run: Storage, index: Index, target: Storage, start: Start) -> str:
    """All of it, with the settings of its run."""
    record = _record(run)
    tensors = CheckpointTensors(run / CHECKPOINTS, index, start(index.tensor_bytes))
    kept = {key: record[key] for key in ("identity", "manifest_sha256")}
    dcp.export_state(tensors, _local(target), run=kept)
    return "with AdamW's moments"


def _export_for_torchtitan(run: Storage, index: Index, target: Storage, start: Start) -> str:
    """All of it but the place in the data, as its checkpoint manager loads it."""
    settings, steps = _record(run)["identity"], read_config(run).get("train", {}).get("steps")
    if index.step == 0:
        raise CheckpointError(
            f"{run} has not trained a step yet, so its optimizer is not known; export its weights to hf"
        )
    if steps is None:
        raise CheckpointError(
            f"{run} has no {CONFIG_FILE} that says train.steps, so the next learning rate is not known; begin it once, "
            f"or copy {CONFIG_FILE} of the run that it is from, or export its weights to hf"
        )
    optim = OptimConfig(
        **{key.name: settings[f"optim.{key.name}"] for key in fields(OptimConfig) if f"optim.{key.name}" in settings}
    )
    optim.schedule = Schedule(optim.schedule)
    tokens_seen = int(index.scalars["tokens_seen"])
    tokens_per_step = tokens_seen // index.step
    next_lr = lr_at(tokens_seen + tokens_per_step, total_tokens=steps * tokens_per_step, config=optim)
    model = model_of(settings)
    tensors = CheckpointTensors(run / CHECKPOINTS, index, start(bytes_read(index, model)))
    export_for_torchtitan(tensors, _local(target), model=model, optim=optim, next_lr=next_lr)
    return (
        "with AdamW's moments, for torchtitan 0.3: as OUTPUT/checkpoint/step-N of its dump_folder, or by --checkpoint."
        "initial_load_path with --checkpoint.no_initial_load_model_only; either with --checkpoint.exclude_from_loading "
        "dataloader, for its place in the data is not known here"
    )


def _import_weights(source: Storage, run: Storage, moments: Dtype, start: Start) -> list[str]:
    """A run that begins with these weights at step 0.

    The model's settings are fixed by that; all others, and the corpus, are those of the run's first attempt.
    """
    model = huggingface.read_model(source)
    settings = {key: value for key, value in asdict(model).items() if key not in NOT_TOLD}
    identity = {f"model.{key}": value for key, value in settings.items()} | {"optim.moments": str(moments)}
    advance = start(huggingface.weight_bytes(source))
    entries = huggingface.import_entries(source, model, advance, moments=moments)
    _create(run, entries, Progress(), identity, None)
    return [
        f"{run} begins with the weights of {source}. With these settings as conf/model/imported.yaml,",
        "",
        *(f"    {line}" for line in yaml.safe_dump(settings, sort_keys=False).splitlines()),
        "",
        "and a corpus prepared with the same tokenizer, start it with",
        "",
        f"    python -m jobs.pretrain {_named(run)} model=imported" + _kept_as(identity),
    ]


def _import_state(source: Storage, run: Storage, start: Start) -> list[str]:
    """A run that goes on where the exported one stood, with its settings and corpus."""
    state = dcp.ExportedState(_local(source))
    progress = Progress.of(state.scalars)
    _create(run, state.entries(start(state.num_bytes)), progress, state.run["identity"], state.run["manifest_sha256"])
    return [
        f"{run} goes on from step {progress.step} of {source}. With the settings of the run that it is from:",
        "",
        f"    python -m jobs.pretrain {_named(run)} ...",
    ]


def _create(
    run: Storage,
    entries: Iterable[Entry],
    progress: Progress,
    identity: dict[str, Any],
    manifest_sha256: str | None,
    config: bytes | None = None,
) -> None:
    """The checkpoint first: were it missing, a run with a record would begin from its seed."""
    run_id = new_run_id()
    with filling(run) as check:
        save_one_by_one(run / CHECKPOINTS, entries, scalars=progress.to_dict(), run_id=run_id)
        check()
        if config is not None:
            run.write_bytes(CONFIG_FILE, config)
        if not write_record(run, run_id=run_id, identity=identity, manifest_sha256=manifest_sha256, is_new=True):
            raise CheckpointError(f"{run} has become another run's meanwhile; name a new folder")


def _record(run: Storage) -> dict[str, Any]:
    record = read_record(run)
    if record is None:
        raise CheckpointError(f"{run} has no run.json, so its model is not known; name a run's folder")
    return record


def corpora_of(run: Storage, record: dict[str, Any]) -> Corpora | None:
    """The corpora that a run trained on, proved by their checksum: those it names, or, for one, a corpus prepared
    beside it, or beside the run that it is made of."""
    config = read_config(run)
    storage_paths = [split_location(str(run))[0], config.get("run", {}).get("storage_path")]
    named = named_corpora(run)
    alone = ({next(iter(named), ""): folder} for folder in _prepared(storage_paths)) if len(named) <= 1 else ()
    for folders in itertools.chain([named] if named else [], alone):
        try:
            corpora = Corpora.of(folders, DataConfig())
            if corpora.sha256 == record["manifest_sha256"]:
                return corpora
        except (DataError, StorageError):
            continue  # no corpus, an unfinished one, or out of reach from here
    return None


def named_corpora(run: Storage) -> dict[str, str]:
    """The folders of `data.corpora`, by name; none where the run's recipe made its corpus."""
    return dict(read_config(run).get("data", {}).get("corpora") or {})


def _prepared(storage_paths: Iterable[str | None]) -> Iterator[str]:
    """The corpora that are prepared below these."""
    for path in dict.fromkeys(each for each in storage_paths if each):
        try:
            yield from list(prepared_in(path))
        except (StorageError, OSError):
            continue  # where the run was, and out of reach from here


def read_tokenizer(corpora: Corpora) -> bytes:
    """The tokenizer.json of corpora. Raises DataError where it is damaged."""
    folder, tokenizer = Storage.at(corpora.folders[0]), corpora.manifests[0].tokenizer
    data = folder.read_bytes(tokenizer.file)
    if hashlib.sha256(data).hexdigest() != tokenizer.sha256:
        raise DataError(f"{folder / tokenizer.file} is not what its manifest says; copy it from another place")
    return data


def _named(run: Storage) -> str:
    storage_path, name = split_location(str(run))
    return f"{quote(f'run.storage_path={_for_hydra(storage_path)}')} {quote(f'run.name={_for_hydra(name)}')}"


def _for_hydra(text: str) -> str:
    """A value as Hydra reads this text: in quotes where it would take it for something else."""
    if re.fullmatch(r"[A-Za-z/][\w/.:@%+$*?|-]*", text, re.ASCII) and text.lower() not in WORDS_OF_HYDRA:
        return text
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + found[2].replace('"', '\\"'), text)
    return f'"{escaped}"'


def _check_new_run(folder: Storage) -> None:
    check_run_name(split_location(str(folder))[1])
    check_empty(folder)


def _local(folder: Storage) -> Path:
    if not folder.is_local:
        raise CheckpointError(f"{folder}: torch.distributed.checkpoint is read and written on a file system alone")
    return folder.local_path
