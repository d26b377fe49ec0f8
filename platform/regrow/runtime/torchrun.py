"""Ranks that torchrun started, or one process: their group, the run's folder, and what they write there. No Ray."""

import contextlib
import datetime
import gc
import ipaddress
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from regrow.config.schema import Backend, ParallelConfig, PretrainConfig
from regrow.control.phases import PATIENCE
from regrow.control.verification import Outcome, named
from regrow.data.read.corpora import Corpora, find_corpora
from regrow.data.read.outage import Patience, PatientReader
from regrow.deadline import leave
from regrow.errors import ConfigError, DataError, NotWrittenError, RegrowError
from regrow.forecast.settle import settled
from regrow.model.linears import recipe_after
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import BACKENDS, coordinates_of, replica_group
from regrow.parallel.stream import stream_of
from regrow.program import program
from regrow.record import events
from regrow.record.log import RunLog, next_generation, read_events
from regrow.record.provenance import git_sha, versions
from regrow.record.run_folder import CHECKPOINTS, run_folder
from regrow.runtime.hardware.interfaces import address_towards, meet_at
from regrow.runtime.hardware.peak import Peak
from regrow.runtime.interrupts import StopRequest
from regrow.runtime.opened import Opened, check_is_shared, check_start, last_step, open_folder
from regrow.runtime.patient_log import PatientLog
from regrow.runtime.run_folder import Run
from regrow.runtime.trusted import by_the_log
from regrow.show.console import Console
from regrow.state.collective import from_rank_0, gather, on_first_rank, rank
from regrow.state.disk import catalog, store
from regrow.state.disk.format import COMMIT
from regrow.state.entries import Progress, training_entries
from regrow.train.callback import Called, look_up
from regrow.train.metrics import NotFinite
from regrow.train.step import TrainStep, go_on_from
from regrow.train.validation import Validation

STILL_AT_WORK_EVERY_S = 0.5  # that the other ranks hear so of the first one
Value = TypeVar("Value")


@contextlib.contextmanager
def process_group(timeout_s: float) -> Iterator[torch.device]:
    """The default group, of torchrun's ranks or of this process alone; this rank's device.

    It outlasts an error: NCCL's waits for peers to destroy it, which are in a collective that they wait for.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
    device = device or torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # small values go to a few neighbours
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, world_size = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        _meet(dist.PrefixStore("addresses", store), rank, world_size)
    dist.init_process_group(BACKENDS[device.type], timeout=timeout, store=store, rank=rank, world_size=world_size)
    yield device
    dist.destroy_process_group()


def _meet(store: dist.Store, rank: int, world_size: int) -> None:
    """Have gloo and NCCL use the interface on the way to the first rank's host; on that host, where its name may be
    127.0.1.1, the one on the way to another host."""
    mine = address_towards(os.environ["MASTER_ADDR"])
    store.set(str(rank), mine)
    if _is_loopback(mine):
        others = (store.get(str(other)).decode() for other in range(world_size))
        elsewhere = next((address for address in others if not _is_loopback(address)), None)
        mine = address_towards(elsewhere) if elsewhere else ""  # none: all ranks are on this host, any interface does
    meet_at(mine, os.environ)


def _is_loopback(address: str) -> bool:
    """Also where it is not known."""
    return not address or ipaddress.ip_address(address).is_loopback


@contextlib.contextmanager
def program_of_a_rank() -> Iterator[None]:
    """As `program`; this process ends with it, at once, without the interpreter's finalization.

    That would wait for peers, too, after an error. After none, a thread of gloo may still hold the tensors of the last
    collective: where it lets go of them during finalization, it is unwound through C++ as it asks for the interpreter's
    lock, and a run that has succeeded ends by SIGABRT.
    """
    code: str | int | None = None
    try:
        with program():
            yield
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)


def on_first_rank_at_length(work: Callable[[], Value]) -> Value:
    """As `on_first_rank`, where the work may take longer than a collective: the others hear that it goes on."""

    def heard() -> Value:
        is_done = threading.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # of a rank that is gone: the outcome's broadcast meets it, too
                while from_rank_0(not is_done.wait(STILL_AT_WORK_EVERY_S)):
                    pass

        telling = threading.Thread(target=tell, name="still-at-work", daemon=True)
        telling.start()
        try:
            return work()
        finally:
            is_done.set()
            telling.join()

    while rank() and from_rank_0(True):
        pass
    return on_first_rank(heard)


def for_this_group(config: PretrainConfig, device: torch.device) -> PretrainConfig:
    """The configuration of a run whose group has this size from its first step to its last, on such devices: of several
    kinds it is settled for the one with the least memory, so that all ranks have the same numbers.

    Collective. Raises ConfigError on all ranks.
    """
    checkpoint, world_size = config.checkpoint, dist.get_world_size()
    if checkpoint.automatic or checkpoint.every_minutes is not None:
        minutes = checkpoint.every_minutes
        by_time = "automatic=true" if minutes is None else f"every_minutes={minutes:g}"
        raise ConfigError(
            f"checkpoint.{by_time}: without Ray checkpoints come by steps alone; leave it out, and set "
            "checkpoint.every_steps"
        )
    if checkpoint.every_steps is None:
        raise ConfigError(
            "checkpoint.every_steps=null leaves only the checkpoint at the end; set checkpoint.every_steps"
        )
    if (at := config.observe.profile_at_step) is not None:
        raise ConfigError(f"observe.profile_at_step={at}: without Ray no profile is taken; leave it out")
    if config.parallel.compile_cache is not None:
        raise ConfigError(  # not with its value, which may have a password
            "parallel.compile_cache: without Ray nothing compiled is fetched or kept; leave it out, "
            "TORCHINDUCTOR_CACHE_DIR names a folder of torch's own"
        )
    if config.cluster.backend is Backend.asynchronous:
        raise ConfigError("cluster.backend=asynchronous: without Ray collectives on CPUs are gloo's; leave it out")
    name, least_bytes = config.cluster.name, None
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        least_bytes, name = min(gather((memory_bytes, torch.cuda.get_device_name(device))))
    gpus = int(device.type == "cuda")
    cluster = replace(config.cluster, name=name, min_workers=world_size, max_workers=world_size, gpus_per_worker=gpus)
    one_copy = replace(config.snapshot, copies=1)  # of no snapshot: there need be no nodes for more
    made, _ = settled(replace(config, cluster=cluster, snapshot=one_copy), at_most_bytes=least_bytes)
    return replace(made, snapshot=config.snapshot)


def patience_s(config: PretrainConfig) -> float:
    """How long a rank waits for rows: less than others wait for it, so that it ends first, by what it has to say."""
    if dist.get_world_size() == 1:
        return config.data.storage_timeout_s
    return min(config.data.storage_timeout_s, PATIENCE * config.train.collective_timeout_s)


def _corpora_of_all(config: PretrainConfig, console: Console) -> Corpora:
    """What all ranks read. Collective; raises RegrowError on all ranks, also where a host has another in a folder."""
    plain = on_first_rank_at_length(lambda: find_corpora(config, progress=console.progress).to_plain())
    corpora, host = Corpora.of_plain(plain), socket.gethostname()
    found: list[str] | RegrowError
    try:
        found = [manifest.sha256 for manifest in corpora.manifests]
    except RegrowError as error:
        found = type(error)(f"on {host}: {error}")
    whole: list[tuple[str, list[str]]] = []
    for name, each in gather((host, found)):
        if isinstance(each, RegrowError):
            raise each
        whole.append((name, each))
    first_host, first = whole[0]
    for name, each in whole:
        for folder, mine, its in zip(corpora.folders, first, each, strict=True):
            if its != mine:
                raise DataError(
                    f"{folder} on {name} is another corpus than on {first_host} (sha256 {its[:12]} and {mine[:12]}): "
                    "copy one of them to the other host, or name a folder that all hosts share"
                )
    return corpora


def _look_up_on_all(callback: str | None) -> None:
    """Collective; raises ConfigError on all ranks, also where one host has no such class."""
    problem: ConfigError | None = None
    try:
        if callback is not None:
            look_up(callback)
    except ConfigError as error:
        problem = ConfigError(f"on {socket.gethostname()}: {error}")
    if found := next((each for each in gather(problem) if each is not None), None):
        raise found


def _submitted(run_id: str) -> events.Submitted:
    world_size = dist.get_world_size()
    return events.Submitted(
        run_id=run_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        min_workers=world_size,
        max_workers=world_size,
        git=git_sha(),
        versions=versions(),
        command=shlex.join(sys.argv),
    )


def _log_submission(run: "TorchrunRun") -> None:
    """That it begins, and what could not be read of its corpora's source."""
    run.event(_submitted(run.run.run_id))
    for text in run.corpora.left_out():
        _note(run, text)


def _called(run: "TorchrunRun", start: Progress) -> Called:
    """Its callback, with the state of this step."""
    called = Called(run.config.train.callback, start)
    if called.note:
        _note(run, called.note)
    return called


def _note(run: "TorchrunRun", text: str) -> None:
    run.event(events.Note(text=text))
    run.message(text)


class TorchrunRun:
    """A run's folder, held open by the first rank; the loop's hooks, on every rank."""

    def __init__(self, config: PretrainConfig, console: Console) -> None:
        """Prepare the corpus where it is missing, and open the folder. Collective; raises RegrowError on all ranks.

        Where the last step is committed already, `is_done` is true, and it is of no other use.
        """
        self.config, self.console, self.rank = config, console, rank()
        on_first_rank_at_length(lambda: check_start(config))
        _look_up_on_all(config.train.callback)
        self.corpora = _corpora_of_all(config, console)
        self._opened: Opened | None = None  # the first rank's
        run_id, resumed_step, claimed = on_first_rank_at_length(self._open)
        self.run, self.is_done = Run(run_folder(config), run_id, resumed_step), claimed is None
        if claimed is None:
            return
        check_is_shared(config, *claimed)
        self.checkpoints = self.run.folder / CHECKPOINTS
        self.generation = on_first_rank(lambda: next_generation(read_events(self.run.folder)))
        self._cause = events.Cause.start if self.run.resumed_step is None else events.Cause.resume
        log = RunLog(self.run.folder, claim=self._opened.claim) if self._opened else None
        self._log = PatientLog(log, self.message) if log is not None else None
        self._step: TrainStep | None = None  # that the group trains
        self._validation: Validation | None = None
        self._request = StopRequest()
        self._asked: list[int] = []  # to stop: the ranks that were, as all know
        self.patience = Patience(patience_s(config), on_wait=self._waits)
        _log_submission(self)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _open(self) -> tuple[str, int | None, tuple[str, str] | None]:
        self._opened = open_folder(self.config, self.corpora.sha256, self.message)
        run, claim = self._opened.run, self._opened.claim
        return run.run_id, run.resumed_step, (claim.file, claim.content.decode()) if claim is not None else None

    def _newest_step(self) -> int:
        """Of the committed checkpoints; 0 where there is none. Collective."""
        return on_first_rank(lambda: max(catalog.committed_steps(self.checkpoints), default=0))

    def restore(self, build: Callable[[ParallelConfig], TrainStep], mesh: DeviceMesh) -> tuple[TrainStep, Progress]:
        """A step, filled with the newest checkpoint that is sound; as initialised where there is none. Collective.

        `build` is told what the steps after it are trained with, which float8's end makes another; the step before is
        let go of first, as two do not fit. Raises CheckpointError where there are some and none is sound, or one is
        another run's or of a version not read here.
        """
        parallel, num_steps = self.config.parallel, self.config.train.steps
        recipe = recipe_after(parallel, num_steps, self._newest_step())
        while True:
            self._let_go()
            step = build(recipe)
            progress = self._fill(step, mesh)
            built, recipe = recipe, recipe_after(parallel, num_steps, progress.step)
            if recipe == built:
                return step, progress
            del step  # a damaged checkpoint was passed over, and the one before it is from before float8's end

    def _let_go(self) -> None:
        self._step = self._validation = None
        gc.collect()  # hooks of FSDP's refer to what they are hooks of
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _fill(self, step: TrainStep, mesh: DeviceMesh) -> Progress:
        entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
        restored = store.restore_newest(
            self.checkpoints,
            on_first_rank(lambda: by_the_log(self.run.folder, self.checkpoints)),
            entries,
            coordinates_of(mesh),
            replica_group(mesh),
            run_id=self.run.run_id,
            global_batch_seqs=self.config.optim.global_batch_seqs,
            damaged=self._damaged,
        )
        if restored is None:
            return Progress()
        go_on_from(step, restored.step)
        return restored

    def _waits(self, reason: str) -> None:
        self.event(events.DataWaits(rank=self.rank, reason=reason))
        self.console.message(f"rank {self.rank} waits for rows that storage does not give: {reason}")

    def train_rows(self) -> PatientReader:
        """A reader of the training rows, which outlasts storage that fails for a while."""
        return PatientReader(self.corpora.reader("train"), self.patience)

    def _damaged(self, step: int, detail: str) -> None:
        self.event(events.CheckpointDamaged(step=step, detail=detail))
        if self.rank == 0:
            with contextlib.suppress(OSError):  # then the next attempt finds it again
                catalog.note_damaged(self.checkpoints, step, detail)

    def begin(self, step: TrainStep, mesh: DeviceMesh, start: Progress, validation: Validation, peak: Peak) -> None:
        """The group trains this from here on, in a generation of its own; the end of float8 begins the second."""
        self.generation += self._cause is events.Cause.end_of_float8
        self._step, self._coordinates, self._validation = step, coordinates_of(mesh), validation
        self._called = _called(self, start)
        self._stream = stream_of(next(step.model.buffers()).device)
        worker = {"host": socket.gethostname(), "node": socket.gethostname(), "pid": os.getpid()}
        workers = gather(worker | {"device": str(next(step.model.buffers()).device)})
        recomputed_steps = on_first_rank_at_length(lambda: self._begin_log(start.step))
        begun = events.Generation(
            generation=self.generation,
            start_step=start.step,
            cause=self._cause,
            recomputed_steps=recomputed_steps,
            world_size=dist.get_world_size(),
            axes=self._coordinates.mesh.sizes,
            source="checkpoint" if start.step else "seed",
            workers=workers,
            peak_flops=peak.flops,
            peak_source=peak.source,
        )
        self._cause = events.Cause.end_of_float8
        self.event(begun)
        self.message(begun.sentence())

    def _begin_log(self, start_step: int) -> int:
        assert self._log is not None
        return self._log.begin(self.generation, start_step, timeout_s=self.config.checkpoint.timeout_s).steps

    def is_over(self, progress: Progress) -> bool:
        """Whether nothing is left to train, for now. Collective."""
        self._asked = [number for number, asked in enumerate(gather(self._request.asked_to_stop)) if asked]
        return progress.step >= last_step(self.config) or bool(self._asked)

    def step_done(self, row: Mapping[str, float]) -> None:
        self._called.after_step(row)

    def log(self, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.row(row)
            self.console.row(row)

    def verified(self, step: int, outcome: Outcome) -> None:
        """Units that differ are named, and nothing more."""
        if outcome.differs:
            parts = named(outcome.odd or outcome.undecided, outcome.pp)
            said = "differ from most others" if outcome.odd else "differ from each other, and there is no third one"
            compared = " and ".join(outcome.compared)
            text = f"verification of step {step}: {compared} of {parts} {said}: a device computes wrong"
            self.event(events.Note(text=text))
            self.message(text)

    def wants_to_leave(self) -> bool:
        return self._request.asked_to_stop

    def validate(self, step: int) -> float:
        assert self._step is not None
        assert self._validation is not None
        begun = time.perf_counter()
        loss = self._validation.loss(self._step, self._stream, step)
        self.event(events.Validation(step=step, loss=loss, seconds=time.perf_counter() - begun))
        return loss

    def write(self, progress: Progress) -> None:
        """Write and commit a checkpoint. Collective; raises as `store.save`."""
        assert self._step is not None
        begun = time.perf_counter()
        entries = training_entries(self._step.model, self._step.optimizer, inner_tensor=inner_tensor)
        try:
            index = store.save(
                self.checkpoints,
                entries,
                scalars=progress.to_dict(),
                run_id=self.run.run_id,
                generation=self.generation,
                coordinates=self._coordinates,
                commit=self._commit,
            )
        except NotWrittenError as error:
            with contextlib.suppress(OSError):  # of the same storage
                self.event(events.CheckpointFailed(step=progress.step, detail=str(error)))
            self.message(str(error))
            raise
        took_s = time.perf_counter() - begun
        written = events.Checkpoint(step=progress.step, seconds=took_s, stall_s=took_s, bytes=index.num_bytes)
        self.event(written)
        self.message(written.sentence())
        kept = self.config.checkpoint
        if self.rank == 0 and (
            problem := catalog.try_retain(
                self.checkpoints, keep=kept.keep, keep_every_steps=kept.keep_every_steps, run_id=self.run.run_id
            )
        ):
            self.event(events.Note(text=problem))

    def _commit(self, folder: str, pointer: bytes) -> None:
        """On the first rank, unless another job has taken the run over."""
        assert self._opened is not None
        assert self._opened.claim is not None
        assert self._log is not None
        self._log.flush()  # a committed step's row is never missing
        self._opened.claim.check()
        self.checkpoints.write_bytes(f"{folder}/{COMMIT}", pointer)

    def close(self, progress: Progress) -> None:
        """Training has ended at this step, which is in storage."""
        finished = progress.step >= self.config.train.steps
        reason = "finished" if finished else "interrupted" if self._asked else "stop_at_step"
        self.event(events.Stopped(step=progress.step, reason=reason))
        by = f" by a signal to rank {self._asked[0]}" if reason == "interrupted" else ""
        told = f"{reason.replace('_', ' ')}{by}"
        self.message(f"{told}: step {progress.step} of {self.config.train.steps} is committed")
        if self._log is not None:
            self._log.close()

    @contextlib.contextmanager
    def errors_in_its_log(self) -> Iterator[None]:
        """Have in the log that the run ends by an error. Not collective: other ranks may have none, or another one."""
        try:
            yield
        except NotFinite as error:
            detail = (
                f"{error}; look at the loss before it (python -m jobs.report {self.run.folder}), then lower optim.lr "
                "under another run.name, or allow more with train.nonfinite_skips"
            )
            self.event(events.Failure(cause=events.Cause.nonfinite, detail=str(error), generation=self.generation))
            self._failed(detail)
            raise RegrowError(detail) from error
        except (RegrowError, OSError) as error:
            self._failed(str(error))
            raise

    def _failed(self, detail: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError, RegrowError):  # as of storage, or a job that has taken the run over
                step = max(catalog.committed_steps(self.checkpoints), default=0)
                self.event(events.Stopped(step=step, reason="failed", detail=detail))
                self._log.close()

    def message(self, text: str) -> None:
        if self.rank == 0:
            self.console.message(text)

    def event(self, event: events.Event) -> None:
        if self._log is not None:
            self._log.event(event)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if not self._request.heard():
            return
        left = ""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            left = "; where it was asked, torchrun ends the ranks after its --shutdown-timeout, by default 30 s"
        self.message(f"stopping after this step with a checkpoint; once more to end at once{left}")
