"""What `jobs.pretrain` does: check, start the cluster, prepare data, open the run, train, and show it all the while."""

import contextlib
import importlib
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from queue import SimpleQueue
from types import FrameType
from typing import Any

import ray

from regrow.config.check import check, geometry
from regrow.config.schema import Float8, PretrainConfig
from regrow.config.spares import most_workers
from regrow.config.store import STARTED_AT
from regrow.control.membership import ENDS_WITH_JOB
from regrow.control.states import Settling
from regrow.data.preflight import check_corpus
from regrow.data.prepare.distribute import on_ray
from regrow.data.read.corpora import Corpora, find_corpora, order_of
from regrow.data.stream.actor import start_stream, stop_stream
from regrow.errors import RegrowError, first_line
from regrow.model.linears import float8_line, float8_steps
from regrow.plan.topology import Table
from regrow.process_log import say
from regrow.progress import last_step
from regrow.record.claim import OWNER, is_taken_over
from regrow.record.events import Cause, from_row, startup_line
from regrow.record.log import LogReader
from regrow.record.provenance import git_sha, versions
from regrow.record.run_folder import CHECKPOINTS, run_folder
from regrow.record.work import RATIOS
from regrow.runtime.actor import await_coordinator, make_coordinator
from regrow.runtime.backend import last_line
from regrow.runtime.cluster import Connection, check_room, cluster_for, room_for, why_not_in_place
from regrow.runtime.ended import end_again
from regrow.runtime.entry import train_fn
from regrow.runtime.interrupts import StopRequest
from regrow.runtime.job import Job
from regrow.runtime.keeper import FREE_S
from regrow.runtime.reporter import Reporter
from regrow.runtime.run_folder import Run, check_may_start, find_or_create, write_config
from regrow.runtime.shell import CLOSE_S, DELETE_S
from regrow.show.console import Console
from regrow.show.report import write_report
from regrow.state.disk.catalog import committed_steps
from regrow.storage import Storage

POLL_S = 0.2
INTERRUPTED = "interrupted"
STOPPING = "stopping after this step with a checkpoint; once more to end at once"
ENDING = "the run has ended, its log and its report are being written; once more to leave at once"
NOT_AGAIN = (
    "ends with status 0, so that nothing starts it anew; once the other one has ended, submit.action=apply goes on "
    "with the run"
)
LEFT = "left at once: the log's end and the last report may be missing"
LEAVE_S = 20.0  # for the workers to end by themselves once the run is over
UNBEGUN_S = 20.0  # for the log of a run that is interrupted before its workers start
TELL_S = 5.0  # for the last checkpoint, before it is told of
ASK_S = 2.0  # for the coordinator to say what is in memory, where it is left at once
END_S = CLOSE_S + DELETE_S + FREE_S + 60.0  # for the coordinator to write the rest of the log, and to end keepers
ANSWER_S = 60.0  # for the coordinator to answer, before a word is said of it
AGAIN_S, MOST_AGAIN_S = 1.0, 30.0  # before another controller of Ray Train, where the one before formed no group
NUM_IN_VAIN = 30  # such controllers in a row, before the run is given up: storage may be away for minutes


class Startup:
    """The seconds of each phase before the first step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = STARTED_AT

    def done(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase] = now - self._last
        self._last = now


def pretrain(config: PretrainConfig) -> None:
    """Train until the configured step and return; raises RegrowError for whatever a user can mend.

    An interrupt commits a checkpoint first and then exits with status 130. A job whose run another submission has taken
    over returns, too: KubeRay would start one that failed anew.
    """
    try:
        _pretrain(config)
    except RegrowError as error:
        if not _is_taken_over(config):
            raise
        say(f"error: {error}; {NOT_AGAIN}", sys.stderr)


def _pretrain(config: PretrainConfig) -> None:
    startup = Startup()
    topologies = check(config)
    check_may_start(config)
    with Console(sys.stderr) as console:
        startup.done("config")
        if config.cluster.in_place and why_not_in_place():
            console.message(why_not_in_place())
            config = replace(config, cluster=replace(config.cluster, in_place=False, spare_workers=0))
            topologies = check(config)  # no workers are parked at sizes that do not divide
        expected = check_corpus(config).line()
        startup.done("corpus")
        if config.cluster.address is None:
            console.message("starting Ray on this machine")
            # Ray Train takes seconds to import and Ray's own processes to start: both at once
            glue = "regrow.runtime.ray_train" if config.cluster.in_place else "regrow.runtime.trainer"
            threading.Thread(target=importlib.import_module, args=(glue,), name="imports").start()
        with cluster_for(config.cluster, config.parallel.tp, console.message) as connection:
            lines = geometry(config, topologies)
            if config.parallel.float8 is not Float8.none:
                lines.append(float8_line(config.model, config.parallel.float8.value, config.parallel.tp))
                if (last := float8_steps(config.parallel, config.train.steps)) < config.train.steps:
                    lines.append(f"float8 up to step {last:,}, then bfloat16")
            console.start(lines, steps=config.train.steps, stop_at_step=config.train.stop_at_step)
            if connection.dashboard:
                console.message(connection.dashboard)
            if expected:
                console.message(expected)
            startup.done("ray")
            corpora = find_corpora(config, progress=console.progress, distribute=on_ray)
            startup.done("data")
            run = find_or_create(config, manifest_sha256=corpora.sha256)
            console.message(_opening(config, run, corpora))
            if (run.resumed_step or 0) >= _last_step(config):
                end_again(config, run, console.message)
                console.message(
                    f"step {run.resumed_step} is already committed: nothing to do; "
                    "raise train.steps or train.stop_at_step to go on, or choose another run.name"
                )
                return
            reason = Session(config, run, corpora, console, startup, connection, lines, topologies).train()
    if reason == INTERRUPTED:
        sys.exit(130)


class Session:
    """One attempt at a run, from its submission until its workers have left."""

    given_up = ""  # why, once the coordinator has said so

    def __init__(
        self,
        config: PretrainConfig,
        run: Run,
        corpora: Corpora,
        console: Console,
        startup: Startup,
        connection: Connection,
        geometry: list[str],
        topologies: Table,
    ) -> None:
        self.config, self.run, self.console, self.connection = config, run, console, connection
        self.coordinator = make_coordinator(
            run.folder,
            run.run_id,
            checkpoints=CHECKPOINTS,
            config=config,
            submitted=_submitted(config, geometry),
        )
        try:
            await_coordinator(self.coordinator, run.folder)
            self._prepare(corpora, startup, topologies)
        except (RegrowError, OSError, KeyboardInterrupt) as error:
            _end_unbegun(self, error)  # else the log ends with `submitted`, and the next job counts a death
            raise

    def _prepare(self, corpora: Corpora, startup: Startup, topologies: Table) -> None:
        """All that `train` needs. Raises ClusterError as `_trainer`, and OSError where storage fails."""
        config, run = self.config, self.run
        write_config(run, config)  # the run is ours: a job that is refused has ended before
        _note_what_is_left_out(self.coordinator, corpora)
        self.stream = start_stream(config, corpora, start_step=run.resumed_step or 0, stop_step=_last_step(config))
        startup.done("actors")
        self.startup_s: dict[str, float] | None = None
        self.job = Job(
            config=config,
            topologies=topologies,
            run_id=run.run_id,
            folder=str(run.folder),
            checkpoints=str(run.folder / CHECKPOINTS),
            compile_cache=str(Storage.at(kept)) if (kept := config.parallel.compile_cache) else None,
            corpora=corpora,
            coordinator=self.coordinator,
            stream=self.stream,
            first_generation=0,
            fit_at=0.0,
            driver_s=startup.seconds,
        )
        self.interrupts, self.is_over = Interrupts(self.console), False
        self.shown = 0  # the newest update
        self.messages: SimpleQueue[str] = SimpleQueue()  # from other threads
        self.trainer = self._trainer()
        startup.done("imports")

    def _trainer(self, *, is_first: bool = True) -> Any:
        """Ray Train, for as many workers as there is room for now. Raises ClusterError where there is none for
        `min_workers` and this `is_first`: a run that has begun waits for nodes."""
        from regrow.runtime.trainer import build_trainer  # takes seconds, and has begun where Ray is ours

        config, generation = self.config, ray.get(self.coordinator.ready.remote()) + 1
        cluster, unit, tell = config.cluster, config.parallel.tp, self.console.message
        room = check_room(cluster, unit, tell) if is_first else max(cluster.min_workers, room_for(cluster, unit))
        return build_trainer(
            replace(self.job, first_generation=generation, fit_at=time.time()),
            num_workers=min(most_workers(cluster), room),
            train_fn=train_fn,
            storage=str(self.run.folder / "ray_train"),
            name=f"{config.run.name}-g{generation}",
        )

    def train(self) -> str:
        """Run the worker group to its end; why it ended: finished, stop_at_step or interrupted."""
        with self.interrupts.taken():
            log = LogReader(self.run.folder)
            reporter = Reporter(
                lambda: write_report(self.run.folder, self.config, log=log),
                every_s=self.config.observe.report_every_s,
                written=self._reported,
                tell=self.messages.put,
            )
            fatal = ""
            try:
                fatal, error = self._fit_until_over()
                if error is not None and not fatal:
                    fatal = f"Ray Train gave up: {last_line(error)}"
                settling = self._settle()
            except KeyboardInterrupt as left:
                _tell_what_stays(self)
                raise _cut_short(self, fatal or self.given_up, left) from None
            return self._end(reporter, fatal, settling)

    def _end(self, reporter: Reporter, fatal: str, settling: Settling) -> str:
        """Write the end of the log and the last report, and say how the run stands; why it ended.

        Raises RegrowError where that is a failure: `fatal`, or that a step is not in storage as it should be.
        """
        asked = self.interrupts.asked_to_stop
        self.interrupts.told = ENDING
        for found in filter(None, (_missing(self.config, settling), settling.lost)):
            if fatal:
                self.console.message(found)
            fatal = fatal or found
        try:
            stop_stream(self.stream)
            step, problem = _newest_step(self, asked, settling)
            fatal = fatal or problem
            reason = _reason(self.config, step or 0, fatal)
            if lost := self.close(step or 0, reason, fatal):
                self.console.message(lost)
            report = reporter.last()
        except KeyboardInterrupt as left:
            self.console.message(LEFT)
            raise _cut_short(self, fatal, left) from None
        self._show_messages()
        if fatal:
            raise _failure(self, fatal)
        loss = report["final_loss"] if report is not None else None
        self.console.message(_farewell(self.config, self.run, step, reason, loss))
        return reason

    def _fit_until_over(self) -> tuple[str, BaseException | None]:
        """Have Ray Train run its workers, again where its controller died; as for `_fit`."""
        most, died, in_vain = self.config.cluster.max_failures, 0, 0
        while True:
            before = self.answer(self.coordinator.ready.remote())
            fatal, error = self._fit()
            if fatal or not isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
                return fatal, error
            detail = f"Ray Train's controller, and its workers with it: {_why_it_died(error)}"
            self.answer(self.coordinator.group_failed.remote(Cause.controller_died, detail, []))
            died += 1
            in_vain = in_vain + 1 if self.answer(self.coordinator.ready.remote()) == before else 0
            if in_vain >= NUM_IN_VAIN or died > most >= 0:  # below 0: no limit, as to Ray Train
                times = f"{died} times, with cluster.max_failures={most}"
                if in_vain >= NUM_IN_VAIN:
                    times = f"{in_vain} times in a row before a group was formed"
                return f"Ray Train's controller died {times}: {_why_it_died(error)}", error
            fatal = self._pause(min(AGAIN_S * 2 ** (in_vain - 1), MOST_AGAIN_S) if in_vain else 0.0)
            if fatal or self.is_over:
                return fatal, None
            self.job = replace(self.job, driver_s={})
            self.trainer = self._trainer(is_first=False)

    def _pause(self, seconds: float) -> str:
        """Show what happens meanwhile; why the run is given up. Ends where the run is over."""
        fatal, until = self._show(), time.monotonic() + seconds
        while not (fatal or self.is_over) and time.monotonic() < until:
            time.sleep(POLL_S)
            fatal = self._show()
        return fatal

    def _fit(self) -> tuple[str, BaseException | None]:
        """Have Ray Train run its workers, and show what happens; why the run is given up, what Ray Train raised."""
        outcome: list[BaseException] = []

        def fit() -> None:
            try:
                self.trainer.fit()
            except BaseException as error:  # carried over to the main thread
                outcome.append(error)

        thread = threading.Thread(target=fit, name="ray-train", daemon=True)
        thread.start()
        fatal, leave_at = "", float("inf")
        while thread.is_alive() and time.monotonic() < leave_at:
            thread.join(POLL_S)
            fatal = self._show() or fatal
            if fatal:  # a coordinator that was restarted does not know
                self.coordinator.fail.remote(fatal)
            if (fatal or self.is_over) and leave_at == float("inf"):  # where all workers are dead, nothing returns
                leave_at = time.monotonic() + LEAVE_S
        return self._show() or fatal, outcome[0] if outcome else None

    def _reported(self, report: Mapping[str, Any]) -> None:
        self.console.goodput, self.console.effective = report["goodput"], report["effective"]
        self.coordinator.reported.remote({key: report[key] for key in RATIOS})

    def _settle(self) -> Settling:
        """Have keepers write what is committed, and wait until they have, or it has been tried for long enough."""
        begun, tell_at = time.monotonic(), TELL_S
        while True:
            settling: Settling = self.answer(self.coordinator.settle.remote())
            self._show()
            if not settling.busy:
                return settling
            if (waited_s := time.monotonic() - begun) > tell_at:
                tell_at = 2 * waited_s
                what = "a checkpoint" if settling.unstored is None else f"step {settling.unstored}"
                self.console.message(
                    f"{what} is on its way from memory to storage since {waited_s:.0f} s; tried for "
                    f"checkpoint.timeout_s={self.config.checkpoint.timeout_s:.0f} (Ctrl-C twice: leave at once)"
                )
            time.sleep(POLL_S)

    def close(self, step: int, reason: str, fatal: str, within_s: float = END_S) -> str:
        """End the coordinator; what was not done of it."""
        try:
            closing = self.coordinator.close.remote(step, reason, fatal, keep=not _ray_is_ours(self.config))
            return str(ray.get(closing, timeout=within_s))
        except ray.exceptions.GetTimeoutError:
            return f"the run's coordinator has not ended within {within_s:.0f} s: its log may lack the last events"

    def answer(self, reference: Any) -> Any:
        """What the coordinator answers, however long that takes: storage may keep one that was started anew waiting.

        Raises RegrowError where it is gone for good.
        """
        is_told = False
        while True:
            try:
                return ray.get(reference, timeout=ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                if not is_told:
                    self.console.message(f"the run's coordinator has not answered for {ANSWER_S:.0f} s: waiting for it")
                is_told = True
            except ray.exceptions.RayActorError as error:
                raise RegrowError(f"the run's coordinator has ended: {last_line(error)}") from error

    def _show(self) -> str:
        """Show what happened since the last call; the fatal message if the run is over."""
        if self.interrupts.asked_to_stop:  # again and again: a coordinator that was restarted does not know
            self.coordinator.request_stop.remote(INTERRUPTED)
        self._show_messages()
        updates, fatal, self.is_over = self.answer(self.coordinator.updates.remote(self.shown))
        for update in updates:
            self.shown = update.number
            if update.kind == "row":
                self.console.row(update.content)
                if self.startup_s is not None:
                    self.console.message(startup_line(self.startup_s, update.content["step_s"]))
                    self.startup_s = None
            else:
                line = from_row(update.content).sentence()
                if line:
                    self.console.message(line)
                if update.content["event"] == "spares":
                    self.console.num_spares = update.content["count"]
                if update.content["event"] == "generation":
                    self.startup_s = update.content.get("startup_s")  # none of one that `Takeover.unseen` told of
        self.given_up = str(fatal)
        return self.given_up

    def _show_messages(self) -> None:
        while not self.messages.empty():
            self.console.message(self.messages.get())


class Interrupts(StopRequest):
    """Ctrl-C or SIGTERM: the run is asked to commit a checkpoint and leave; once more: leave at once. `told` is what is
    said of the first."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console, self.told = console, STOPPING

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.heard():
            self._console.message(self.told)


def _is_taken_over(config: PretrainConfig) -> bool:
    """Whether another submission writes the run now, which this job's next attempt would be refused for."""
    owner = os.environ.get(OWNER, "")
    with contextlib.suppress(RegrowError, OSError):
        return bool(owner) and is_taken_over(run_folder(config), owner)
    return False


def _note_what_is_left_out(coordinator: Any, corpora: Corpora) -> None:
    """In the log, with whose other events it is shown."""
    for text in corpora.left_out():
        coordinator.note.remote("note", {"text": text})


def _end_unbegun(session: Session, error: BaseException) -> None:
    """Write the log's end where no group was formed yet; the coordinator may not be up. What an earlier job has left in
    memory is said, as far as it is known."""
    step, console = session.run.resumed_step or 0, session.console
    with contextlib.suppress(ray.exceptions.RayError):
        if isinstance(error, KeyboardInterrupt):
            console.message("ending the run's log; once more to leave at once")
            lost = session.close(step, INTERRUPTED, "", UNBEGUN_S)
        else:
            lost = session.close(step, "failed", str(error))
        if lost:
            console.message(lost)
        if missing := _missing(session.config, ray.get(session.coordinator.settling.remote(), timeout=ASK_S)):
            console.message(missing)


def _newest_step(session: Session, asked: bool, settling: Settling) -> tuple[int | None, str]:
    """The newest one that is in storage, if any, and how the run has failed, if none is that should be."""
    try:
        steps = committed_steps(session.run.folder / CHECKPOINTS)
    except OSError as away:
        return None, f"storage does not say which checkpoint is the newest: {first_line(away)}"
    step = steps[0] if steps else None
    if asked or (step or 0) >= (last := _last_step(session.config)):
        return step, ""
    return step, settling.failure or f"the run ended at step {step or 0} of {last}, and nothing says why"


def _failure(session: Session, fatal: str) -> RegrowError:
    return RegrowError(f"{fatal} (logs: {session.connection.session_dir}/logs)")


def _cut_short(session: Session, fatal: str, left: KeyboardInterrupt) -> BaseException:
    """What the end of a run that is left at once is told by: its own failure, if it has any."""
    return _failure(session, fatal) if fatal else left


def _tell_what_stays(session: Session) -> None:
    """Where the driver leaves at once."""
    try:
        missing = _missing(session.config, ray.get(session.coordinator.settling.remote(), timeout=ASK_S))
    except (ray.exceptions.RayError, TimeoutError) as error:
        missing = f"what is committed in memory is not known: {first_line(error)}"
    session.console.message(missing or "ended at once; all that is committed is in storage")


def _why_it_died(error: ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError) -> str:
    """What Ray says of an actor that is gone, a line: the last one is its constructor's error."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return last_line(error)
    return str(error).strip().splitlines()[-1][:200] if error.actor_init_failed else first_line(error)


def _missing(config: PretrainConfig, settling: Settling) -> str:
    """What is in memory and not in storage, and for how long; empty if all is there."""
    if settling.unstored is None:
        return ""
    why = f" ({settling.failure})" if settling.failure else ""
    found = f"step {settling.unstored} is committed in memory and is not in storage{why}"
    if _ray_is_ours(config):
        return f"{found}; it is lost with the Ray that this job started on this machine"
    if ENDS_WITH_JOB in os.environ:
        return f"{found}; it is lost with the Ray cluster, which ends with this job"
    nodes = ", ".join(node[:12] for node in settling.nodes)
    return (
        f"{found}; node {nodes} keeps it for snapshot.abandon_after_s={config.snapshot.abandon_after_s:.0f}: "
        "the same command goes on from it until then"
    )


def _ray_is_ours(config: PretrainConfig) -> bool:
    """Whether keepers end with this job."""
    return config.cluster.address is None


def _reason(config: PretrainConfig, step: int, fatal: str) -> str:
    if fatal:
        return "failed"
    if step >= config.train.steps:
        return "finished"
    return "stop_at_step" if step >= _last_step(config) else INTERRUPTED


def _farewell(config: PretrainConfig, run: Run, step: int | None, reason: str, loss: float | None) -> str:
    shown = f", loss {loss:.4f}" if loss is not None else ""
    if reason == "finished":
        return f"finished {step} steps{shown}; report: {run.folder}/report.html"
    stands = (
        f"stopped at step {step} of {config.train.steps}{shown}; its checkpoint is committed"
        if step is not None
        else f"stopped before any of {config.train.steps} steps was committed"
    )
    return f"{stands}. Resume with the same run.name={config.run.name}: {_resume_command(reason)}"


def _submitted(config: PretrainConfig, geometry: list[str]) -> dict[str, Any]:
    """What the log says of this job."""
    return {
        "time": STARTED_AT,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ray": ray.get_runtime_context().gcs_address,
        "min_workers": config.cluster.min_workers,
        "max_workers": config.cluster.max_workers,
        "git": git_sha(),
        "versions": versions(),
        "command": shlex.join(sys.argv),
        "geometry": geometry,
    }


def _last_step(config: PretrainConfig) -> int:
    return last_step(config.train.steps, config.train.stop_at_step)


def _opening(config: PretrainConfig, run: Run, corpora: Corpora) -> str:
    state = "new run" if run.resumed_step is None else f"resuming from step {run.resumed_step}"
    drawn = order_of(config, corpora).mixture.drawn(config.train.steps * config.optim.global_batch_seqs)
    parts = []
    for name, manifest, samples in zip(corpora.names, corpora.manifests, drawn, strict=True):
        rows = manifest.splits["train"].num_rows
        parts.append(f"{name or manifest.recipe}: {rows:,} rows, {samples / rows:.2f} epochs of them")
    return f"run {config.run.name!r} at {run.folder} ({state}); model {config.model.name}; {'; '.join(parts)}"


def _resume_command(reason: str) -> str:
    """This one, but for where it was to stop, if it has, and for what refuses a run that has begun."""
    left_out = ("run.resume", *(["train.stop_at_step"] if reason == "stop_at_step" else []))
    overrides = [each for each in sys.argv[1:] if each.lstrip("+").partition("=")[0] not in left_out]
    return shlex.join(["python", "-m", "jobs.pretrain", *overrides])
