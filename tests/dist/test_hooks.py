"""What the job does for the loop where keepers stand still: slots fill up, nothing is committed, training goes on."""

import contextlib
import errno
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from regrow.accept.tiny import tiny_model
from regrow.config.schema import ObserveConfig, OptimConfig, ParallelConfig, PretrainConfig, TrainConfig
from regrow.control.phases import Phase
from regrow.errors import CheckpointError
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh, coordinates_of
from regrow.parallel.stream import HostStream
from regrow.plan.mesh import Coordinates, plan_mesh
from regrow.record.events import Cause
from regrow.runtime import calls
from regrow.runtime import hooks as hooks_module
from regrow.runtime import restore as restore_module
from regrow.runtime.abort import Breaker
from regrow.runtime.liveness.heartbeat import Heartbeat
from regrow.runtime.liveness.pulse import read_pulses
from regrow.runtime.process import Process
from regrow.runtime.trusted import Checkpoints
from regrow.state.disk import reading as reading_module
from regrow.state.disk.catalog import committed_steps, note_damaged, open_checkpoint
from regrow.state.disk.format import COMMIT, STORED_CHUNK_BYTES
from regrow.state.disk.store import restore, save
from regrow.state.entries import Entry, Progress, training_entries
from regrow.state.memory.writer import Snapshots
from regrow.storage import LocalStorage
from regrow.train import profile as profile_module
from regrow.train import saver as saver_module
from support.counted import expected
from support.gloo import RankError, run_ranks

RUN, GENERATION, SLOTS = "0123456789abcdef", 3, 2
OLD = (1, 2, 3, 4)  # steps of checkpoints that are there; the first one alone is known to be right


class Coordinator:
    """The calls of hooks, answered at once; COMMIT is written as the real one does."""

    def __init__(self, storage: LocalStorage) -> None:
        self.storage = storage
        self.calls: list[tuple[Any, ...]] = []
        self.knows_it_takes_long = False

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """In the heartbeat's place."""
        self.knows_it_takes_long = phase is Phase.checkpoint
        yield
        self.knows_it_takes_long = False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._called, name))

    def _called(self, name: str, *arguments: Any) -> int | None:
        self.calls.append((name, *arguments))
        if name == "commit":
            assert self.knows_it_takes_long, "who writes a checkpoint would be given up as stuck"
            _, step_folder, pointer = arguments
            self.storage.write_bytes(f"{step_folder}/{COMMIT}", pointer)
        return OLD[0] if name == "spared_step" else None


def stuck_keepers(memory: Path, storage: Path) -> tuple[list[tuple[Any, ...]], float, bool]:
    """Calls to the coordinator, seconds waited for room before the last step, and whether it came back bit for bit."""
    hooks_module.ray = calls.ray = SimpleNamespace(get=lambda call, timeout=None: call)  # type: ignore[assignment]
    saver_module.SAFE_S, saver_module.LAST_ROOM_S = 0.1, 0.5
    mesh = build_mesh(plan_mesh(dist.get_world_size(), 1), "cpu")
    built = partial(build_model, tiny_model(), ParallelConfig(), mesh=mesh, device=torch.device("cpu"))
    model = built(seed=0)
    optimizer = build_optimizer(model, OptimConfig())
    entries, coordinates = training_entries(model, optimizer, inner_tensor=inner_tensor), coordinates_of(mesh)
    writers = dist.get_world_size()
    snapshots = Snapshots(
        memory, entries, coordinates=coordinates, run_id=RUN, generation=GENERATION, writers=writers, num_slots=SLOTS
    )
    coordinator = Coordinator(LocalStorage(storage))
    job: Any = SimpleNamespace(config=PretrainConfig(), coordinator=coordinator, checkpoints=str(storage), run_id=RUN)
    step: Any = SimpleNamespace(model=model, optimizer=optimizer)
    memory_tier: Any = SimpleNamespace(phase=coordinator.phase, heartbeat=SimpleNamespace(stepped=lambda step: None))
    process = Process(job, torch.device("cpu"), HostStream(), cast(Any, None), memory_tier, None)
    hooks = hooks_module.GenerationHooks(process, GENERATION, step, coordinates, cast(Any, None), Breaker(), Progress())
    saver = saver_module.SnapshotSaver(
        saver_module.Cadence(SLOTS + 3, snapshot_every_steps=1, checkpoint_every_steps=1),
        snapshots,
        start_step=SLOTS + 3,  # nothing is committed, and nobody waits for that
        num_ahead=0,
        want_checkpoint=hooks.want_checkpoint,
        write=hooks.write,
        timeout_s=1.0,
        phase=hooks.phase,
    )

    def keep(number: int) -> float:
        progress = Progress(number, 0, 0)
        waited_s = saver.after_step(progress, blocked=not saver.has_room(number), read=True)
        snapshots.wait()
        snapshots.confirm(number)
        return waited_s

    for number in range(1, SLOTS + 3):
        keep(number)
    assert snapshots.begun == SLOTS
    by = {"run_id": RUN, "generation": GENERATION, "coordinates": coordinates}
    for old in OLD:
        save(coordinator.storage, entries, scalars=Progress(old, 0, 0).to_dict(), **by)
    waited_s = keep(SLOTS + 3)
    snapshots.close()
    dist.barrier()
    newest, *rest = committed_steps(coordinator.storage)
    assert rest == [OLD[-1], OLD[0]]
    index = open_checkpoint(coordinator.storage, newest, run_id=RUN)
    other = built(seed=1)
    restored = training_entries(other, build_optimizer(other, OptimConfig()), inner_tensor=inner_tensor)
    restore(coordinator.storage, index, restored, coordinates)
    same = all(torch.equal(a.memory, b.memory) for a, b in zip(restored, entries, strict=True))
    return coordinator.calls, waited_s, same and index.step == newest == SLOTS + 3


def test_checkpoints_are_asked_for_and_the_last_is_written_by_the_ranks_themselves(tmp_path: Path) -> None:
    memory, storage = tmp_path / "memory", tmp_path / "checkpoints"
    memory.mkdir()
    first, second = run_ranks(stuck_keepers, 2, memory, storage)
    assert [call[:3] for call in first[0][: SLOTS + 2]] == [
        ("want_checkpoint", GENERATION, step) for step in range(1, SLOTS + 3)
    ]
    assert [call[0] for call in first[0][SLOTS + 2 :]] == ["commit", "event", "spared_step"]
    assert second[0] == []
    for seen, waited_s, restored in (first, second):
        assert waited_s >= 0.5, seen
        assert restored


@pytest.mark.parametrize("stop_at_step", [None, 7])
@pytest.mark.parametrize("why", [Cause.grow, Cause.drain])
def test_a_groups_last_step_is_written_though_it_was_asked_to_leave_and_go_on_from_memory(
    tmp_path: Path, why: str, stop_at_step: int | None
) -> None:
    """It was asked for by another group, which all ranks formed to train nothing."""
    coordinator, end = Coordinator(LocalStorage(tmp_path)), stop_at_step or 9
    config = PretrainConfig(train=TrainConfig(steps=9, stop_at_step=stop_at_step))
    job: Any = SimpleNamespace(config=config, coordinator=coordinator)
    process: Any = SimpleNamespace(job=job, memory=None)
    hooks = hooks_module.GenerationHooks(process, GENERATION, *[cast(Any, None)] * 3, Breaker(), Progress())
    hooks._stop = why
    for step in (end - 1, end):
        hooks.want_checkpoint(step)
    assert coordinator.calls == [("want_checkpoint", GENERATION, end)]


@pytest.mark.parametrize("why", ["", Cause.grow, Cause.drain, "interrupted"])
@pytest.mark.parametrize("cause", ["", Cause.end_of_float8])
def test_a_group_that_is_asked_to_leave_at_the_last_step_in_float8_leaves_for_what_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, why: str, cause: str
) -> None:
    """A drain then waits a minute for its last snapshot to be committed, another end of a group five seconds."""
    monkeypatch.setattr(hooks_module, "ray", SimpleNamespace(get=lambda call, timeout: call))
    coordinator = Coordinator(cast(Any, None))
    job: Any = SimpleNamespace(config=PretrainConfig(), coordinator=coordinator)
    process: Any = SimpleNamespace(job=job, memory=None, rows=SimpleNamespace(newest=list))
    hooks = hooks_module.GenerationHooks(process, GENERATION, *[cast(Any, None)] * 3, Breaker(), Progress())
    hooks._stop = why
    hooks.close(left_at=5, cause=cause)
    told = why if why in (Cause.grow, Cause.drain) else cause
    assert coordinator.calls == [("leaving", GENERATION, 5, told)]


class Memory:
    """A tier that holds one step, and is asked for what is at least as new as storage."""

    def __init__(self, step: int) -> None:
        self.step, self.phases = step, list[Phase]()

    def phase(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        self.phases.append(phase)
        return contextlib.nullcontext()

    def restore(self, entries: list[Entry], place: Coordinates, *, at_least: int) -> Progress | None:
        return Progress(self.step, 0, 0) if self.step >= at_least else None


def restored_after_damage(storage: Path) -> tuple[list[tuple[int, str]], list[Phase]]:
    """Checkpoints of steps 30 and 60, of which the newer one is damaged: what a first group begins with, which has
    nothing in memory; a second one, which has step 48 there; and one after 60 was passed and written again. What the
    last group's pulse said that its rank did."""
    restore_module.ray = calls.ray = SimpleNamespace(get=lambda call, timeout=None: call)  # type: ignore[assignment]
    mesh = build_mesh(plan_mesh(1, 1), "cpu")
    model = build_model(tiny_model(), ParallelConfig(), mesh=mesh, device=torch.device("cpu"), seed=0)
    optimizer = build_optimizer(model, OptimConfig())
    entries = training_entries(model, optimizer, inner_tensor=inner_tensor)
    folder, config = LocalStorage(storage), PretrainConfig()

    def write(step: int) -> None:
        scalars = Progress(step, step * config.optim.global_batch_seqs, 0).to_dict()
        save(folder, entries, scalars=scalars, run_id=RUN, generation=1, coordinates=coordinates_of(mesh))

    for step in (30, 60):
        write(step)
    file = next((storage / "step-00000060").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def event(generation: int, name: str, fields: dict[str, Any]) -> None:
        """As the real coordinator does, on its storage thread."""
        assert name == "checkpoint_damaged"
        note_damaged(folder, fields["step"], fields["detail"])

    stored = 60  # as the real coordinator counts: what the newest group began with, until more is written
    coordinator = SimpleNamespace(
        event=SimpleNamespace(remote=event),
        stored_step=SimpleNamespace(remote=lambda: stored),
        trusted_step=SimpleNamespace(remote=lambda: None),
    )
    job: Any = SimpleNamespace(config=config, checkpoints=str(storage), run_id=RUN, coordinator=coordinator)
    step: Any = SimpleNamespace(model=model, optimizer=optimizer)
    begun = []
    for memory in (None, Memory(48), Memory(61)):
        if memory is not None and memory.step > 60:
            write(60)
            stored = 60
        progress, source = restore_module.restore(job, 2, step, entries, mesh, coordinates_of(mesh), cast(Any, memory))
        begun.append((progress.step, source))
        stored = min(stored, progress.step)
    memory = Memory(59)
    progress, source = restore_module.restore(job, 2, step, entries, mesh, coordinates_of(mesh), cast(Any, memory))
    return [*begun, (progress.step, source)], memory.phases


def test_a_damaged_checkpoint_that_is_newer_than_the_run_does_not_keep_it_from_its_memory(tmp_path: Path) -> None:
    ((begun, phases),) = run_ranks(restored_after_damage, 1, tmp_path)
    assert begun == [(30, "checkpoint"), (48, "snapshot"), (61, "snapshot"), (60, "checkpoint")]
    assert phases == [Phase.restore] * 2  # which there are, and the one


def restored_after_a_corruption(storage: Path, verify_every_steps: int) -> list[Any]:
    """Storage holds steps 30 and 60, of which no state of a step after 20 is known to be right: where 20 was there and
    is gone, and where there was none; and once a group has begun since, where they are noted so."""
    restore_module.ray = calls.ray = SimpleNamespace(get=lambda call, timeout=None: call)  # type: ignore[assignment]
    restore_module.init_weights = restore_module.reset_moments = lambda *_: None
    config = PretrainConfig()
    config.cluster.verify_every_steps = verify_every_steps
    mesh, begun = build_mesh(plan_mesh(1, 1), "cpu"), []
    for stored, trusted, wrong in ((20, 20, []), (-1, 20, []), (-1, None, [60, 30])):
        found = Checkpoints([] if wrong else [60], wrong or [30], wrong)
        Checkpoints.look = lambda folder, found=found: found  # type: ignore[method-assign,assignment,misc]
        known = {"stored_step": stored, "trusted_step": trusted}
        asked = {name: SimpleNamespace(remote=lambda step=step: step) for name, step in known.items()}
        job: Any = SimpleNamespace(
            checkpoints=str(storage), run_id=RUN, coordinator=SimpleNamespace(**asked), config=config
        )
        built: Any = SimpleNamespace(model=None, optimizer=None)
        try:
            begun.append(restore_module.restore(job, 2, built, [], mesh, coordinates_of(mesh), None))
        except CheckpointError as error:
            begun.append(str(error))
    return begun


@pytest.mark.parametrize("verify_every_steps", [10, 0])
def test_a_run_whose_verified_checkpoint_is_gone_does_not_begin_from_its_seed(
    tmp_path: Path, verify_every_steps: int
) -> None:
    """Nor from what some rank computed wrong, also where the job that goes on verifies nothing."""
    ((refused, begun, later),) = run_ranks(restored_after_a_corruption, 1, tmp_path, verify_every_steps)
    assert "the checkpoint of step 20, the newest whose state is known to be right, is gone" in refused
    assert begun == later == (Progress(), "seed")


def restored_while_its_group_breaks(storage: Path, at: str) -> tuple[str, int]:
    """What a rank meets that reads a checkpoint, or looks which there are, as its group breaks; its requests."""
    restore_module.ray = calls.ray = SimpleNamespace(get=lambda call, timeout=None: call)  # type: ignore[assignment]
    mesh, config, breaker = build_mesh(plan_mesh(1, 1), "cpu"), PretrainConfig(), Breaker()
    model = build_model(tiny_model(), ParallelConfig(), mesh=mesh, device=torch.device("cpu"), seed=0)
    optimizer = build_optimizer(model, OptimConfig())
    entries, place = training_entries(model, optimizer, inner_tensor=inner_tensor), coordinates_of(mesh)
    scalars = Progress(30, 30 * config.optim.global_batch_seqs, 0).to_dict()
    save(LocalStorage(storage), entries, scalars=scalars, run_id=RUN, generation=1, coordinates=place)
    reading_module.READ_BYTES = STORED_CHUNK_BYTES
    read_into, requests = LocalStorage.read_into, list[str]()

    def slow(folder: LocalStorage, name: str, offset: int, buffer: memoryview) -> int:
        num_bytes = read_into(folder, name, offset, buffer)
        requests.append(name)
        breaker.start()
        return num_bytes

    def look(folder: Any) -> Checkpoints:
        breaker.start()
        folder.read_bytes("step-00000030/COMMIT")
        raise AssertionError("it is read")

    LocalStorage.read_into = slow  # type: ignore[method-assign]
    if at == "look":
        Checkpoints.look = look  # type: ignore[method-assign,assignment]
    none = SimpleNamespace(remote=lambda: None)
    coordinator = SimpleNamespace(stored_step=SimpleNamespace(remote=lambda: 30), trusted_step=none)
    job: Any = SimpleNamespace(config=config, checkpoints=str(storage), run_id=RUN, coordinator=coordinator)
    step: Any = SimpleNamespace(model=model, optimizer=optimizer)
    try:
        restore_module.restore(job, 2, step, entries, mesh, place, None, is_over=lambda: breaker.begun)
    except Exception as error:
        return type(error).__name__, len(requests)
    finally:
        breaker.left()
    return "", len(requests)


@pytest.mark.parametrize(("at", "requests"), [("read", 1), ("look", 0)])
def test_a_rank_that_reads_a_checkpoint_leaves_a_group_that_is_over_between_two_requests(
    tmp_path: Path, at: str, requests: int
) -> None:
    """Before, it read on, and was ended after 45 s. And it is no error of this rank's: that could end the run."""
    assert run_ranks(restored_while_its_group_breaks, 1, tmp_path, at) == [("GroupOver", requests)]


def restored_while_storage_is_away(known_to_be_stored: int) -> tuple[int, str]:
    """A group forms; storage does not answer, and memory holds step 48."""
    restore_module.ray = calls.ray = SimpleNamespace(get=lambda call, timeout=None: call)  # type: ignore[assignment]

    def away(folder: Any) -> list[int]:
        raise OSError(errno.EIO, "Input/output error")

    Checkpoints.look = away  # type: ignore[method-assign,assignment]
    asked = SimpleNamespace(remote=lambda: known_to_be_stored)
    trusted = SimpleNamespace(remote=lambda: None)
    coordinator, config = SimpleNamespace(stored_step=asked, trusted_step=trusted), PretrainConfig()
    job: Any = SimpleNamespace(checkpoints="/storage", run_id=RUN, coordinator=coordinator, config=config)
    mesh = build_mesh(plan_mesh(dist.get_world_size(), 1), "cpu")
    progress, source = restore_module.restore(
        job, 2, cast(Any, None), [], mesh, coordinates_of(mesh), cast(Any, Memory(48))
    )
    return progress.step, source


def test_a_rank_that_is_lost_while_storage_is_away_costs_what_it_costs_otherwise() -> None:
    """Before, all ranks had the error, so that it was taken for the run's, which ended."""
    assert run_ranks(restored_while_storage_is_away, 2, 40) == [(48, "snapshot")] * 2
    with pytest.raises(RankError, match="Input/output error"):  # memory holds nothing as new: it is the run's
        run_ranks(restored_while_storage_is_away, 2, 60)


def profiled(folder: Path, starts: bool) -> tuple[list[tuple[Any, ...]], bool]:
    """Calls to the coordinator while steps 1 to 3 are logged and the profile of step 2 cannot be written, or begun."""
    if not starts:
        profile_module.ProfilerActivity = SimpleNamespace(CPU="none that there is")  # type: ignore[assignment,misc]
    hooks_module.ray = calls.ray = SimpleNamespace(get=lambda call, timeout=None: call)  # type: ignore[assignment]
    (folder / "profiles").write_text("a file where the folder should be")
    config = PretrainConfig(observe=ObserveConfig(profile_at_step=2, profile_steps=1))
    coordinator = Coordinator(LocalStorage(folder))
    job: Any = SimpleNamespace(config=config, coordinator=coordinator, folder=str(folder), run_id=RUN)
    process = Process(job, torch.device("cpu"), HostStream(), cast(Any, None), None, None)
    none = cast(Any, None)
    hooks = hooks_module.GenerationHooks(
        process, GENERATION, none, Coordinates(plan_mesh(1, 1), 0), none, Breaker(), Progress()
    )
    for step in (1, 2, 3):
        hooks.log({"step": step})
    return coordinator.calls, hooks.window is None


@pytest.mark.parametrize("starts", [True, False])
def test_a_profile_that_cannot_be_written_is_told_and_training_goes_on(tmp_path: Path, starts: bool) -> None:
    ((told, is_over),) = run_ranks(profiled, 1, tmp_path, starts)
    assert [call[0] for call in told] == (["row", "row", "event", "row"] if starts else ["row", "event", "row", "row"])
    (note,) = [call for call in told if call[0] == "event"]
    assert note[2] == "note"
    assert note[3]["text"].startswith(f"no profile after step {2 if starts else 1}: ")
    assert is_over


def noted_where_training_begins(folder: Path, start_step: int, first_generation: int) -> list[str]:
    """Notes to the coordinator, of a job that profiles steps 5 to 7 and goes on after `start_step`."""
    config = PretrainConfig(observe=ObserveConfig(profile_at_step=5))
    job: Any = SimpleNamespace(config=config, coordinator=(coordinator := Coordinator(LocalStorage(folder))))
    job.folder, job.run_id, job.first_generation = str(folder), RUN, first_generation
    process, none = Process(job, torch.device("cpu"), HostStream(), cast(Any, None), None, None), cast(Any, None)
    place, progress = Coordinates(plan_mesh(1, 1), 0), Progress(start_step)
    hooks_module.GenerationHooks(process, GENERATION, none, place, none, Breaker(), progress)
    return [call[3]["text"] for call in coordinator.calls if call[2] == "note"]


def test_a_job_that_goes_on_past_the_first_step_of_its_profile_says_that_it_takes_none(tmp_path: Path) -> None:
    """Before, the setting had no effect, without a word. A later group may go back to before it, or has profiled it."""
    said = "observe.profile_at_step=5: this job goes on after step 5, and takes no profile"
    assert run_ranks(noted_where_training_begins, 1, tmp_path, 5, GENERATION) == [[said]]
    assert run_ranks(noted_where_training_begins, 1, tmp_path, 4, GENERATION) == [[]]
    assert run_ranks(noted_where_training_begins, 1, tmp_path, 5, GENERATION - 1) == [[]]


def test_nothing_is_said_of_a_profile_that_is_there(tmp_path: Path) -> None:
    """Before, a job that had taken it was said to take none after its controller had died."""
    taken = LocalStorage(tmp_path / "profiles" / "step-00000005")
    taken.write_bytes("trace.json.gz", b"")
    (said,) = run_ranks(noted_where_training_begins, 1, tmp_path, 7, GENERATION)
    assert len(said) == 1, "the page, which is written last, is not there"
    taken.write_bytes("summary.md", b"")
    assert run_ranks(noted_where_training_begins, 1, tmp_path, 7, GENERATION) == [[]]


def noted_of_another_callback(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Notes to the coordinator, and what is kept, of a job that goes on from the state of another callback."""
    config = PretrainConfig(train=TrainConfig(callback="support.counted:Another"))
    job: Any = SimpleNamespace(config=config, coordinator=(coordinator := Coordinator(LocalStorage(folder))))
    process, none = Process(job, torch.device("cpu"), HostStream(), cast(Any, None), None, None), cast(Any, None)
    place, progress = Coordinates(plan_mesh(dist.get_world_size(), 1), dist.get_rank()), Progress(3, user=expected(3))
    hooks_module.GenerationHooks(process, GENERATION, none, place, none, Breaker(), progress)
    return [call[3]["text"] for call in coordinator.calls], progress.user


def test_a_callback_whose_class_is_another_one_begins_anew_which_the_first_rank_notes(tmp_path: Path) -> None:
    said = "begins without a state: the one that is kept is of support.counted:Counted"
    first, second = run_ranks(noted_of_another_callback, 2, tmp_path)
    assert first == ([f"train.callback=support.counted:Another: {said}"], {})
    assert second == ([], {})


class Looks:
    """A callback that waits until this process' pulse says what it does."""

    folder, found = Path(), list[Phase]()

    def after_step(self, row: Any) -> None:
        while (pulse := read_pulses(self.folder)[0]).phase is Phase.step:
            time.sleep(0.01)
        self.found.append(pulse.phase)

    def state(self) -> dict[str, int]:
        return {}


def in_a_callback(folder: Path) -> tuple[list[Phase], Phase]:
    """What this process' pulse says in the callback of its first step, and then."""
    hooks_module.ray = calls.ray = SimpleNamespace(get=lambda call, timeout=None: call)  # type: ignore[assignment]
    sys.modules["looks"] = cast(Any, SimpleNamespace(Looks=Looks))
    Looks.folder, heartbeat = folder, Heartbeat(folder)
    config = PretrainConfig(train=TrainConfig(callback="looks:Looks"))
    job: Any = SimpleNamespace(config=config, coordinator=Coordinator(LocalStorage(folder)), run_id=RUN)
    memory: Any = SimpleNamespace(phase=heartbeat.phase, heartbeat=heartbeat)
    process, none = Process(job, torch.device("cpu"), HostStream(), cast(Any, None), memory, None), cast(Any, None)
    hooks = hooks_module.GenerationHooks(
        process, GENERATION, none, Coordinates(plan_mesh(1, 1), 0), none, Breaker(), Progress()
    )
    heartbeat.enter(GENERATION, Breaker())
    heartbeat.trains(lambda: True, lambda: (0, 0))
    heartbeat.stepped(1)
    while read_pulses(folder)[0].phase is not Phase.step:
        time.sleep(0.01)
    hooks.step_done({"step": 2})
    while (pulse := read_pulses(folder)[0]).phase is Phase.callback:
        time.sleep(0.01)
    return Looks.found, pulse.phase


def test_a_pulse_says_that_its_process_is_in_the_users_code(tmp_path: Path) -> None:
    assert run_ranks(in_a_callback, 1, tmp_path) == [([Phase.callback], Phase.step)]
