"""A drill: the real job on raylets of this machine, faults when their time comes, and a verdict at the end.

The drill is not the job. It starts nodes, starts `python -m jobs.pretrain` on them, reads the run folder as any user
could, and befalls processes from outside. What it did stands in drill.jsonl; the same command goes on where that ends.
"""

import sys
from dataclasses import replace
from pathlib import Path

from regrow.config.check import check
from regrow.config.schema import DrillHosts, DrillJobConfig
from regrow.data.prepare.files import absolute
from regrow.drill.faults import Fault, RandomFaults, check_plan, draw_faults, from_json, parse_plan, to_json
from regrow.drill.findings import sought
from regrow.drill.hosts import check_possible
from regrow.drill.inject import MOST_FILLED, free_bytes
from regrow.drill.job import memory_of_its_own, reference_rows
from regrow.drill.log import Record, RunFollower
from regrow.drill.result import conclude, gather
from regrow.drill.session import TAIL_STEPS, DrillSession
from regrow.errors import ConfigError
from regrow.forecast.settle import settled
from regrow.progress import last_step
from regrow.record.run_folder import run_folder
from regrow.runtime.interrupts import terminable
from regrow.runtime.run_folder import check_may_start
from regrow.show.console import Console
from regrow.storage import path_of

TAIL_STEPS_APART = 300  # broken storage keeps the log, by which faults are timed, from the drill for a while


def run_drill(config: DrillJobConfig) -> bool:
    """Carry out a drill, or go on with one; whether every promise held. Raises RegrowError for a user's mistake."""
    config = with_absolute_places(config)
    plan, seed = plan_of(config)
    config = with_end(config, plan)
    if not config.parallel.pp:
        config, _ = settled(config)
    check(config)
    end = last_step(config.train.steps, config.train.stop_at_step)
    apart = config.drill.hosts is DrillHosts.apart
    if apart:
        check_possible()
    check_fits(config, plan, end)
    check_settings(config, plan)
    check_may_start(config)
    folder = run_folder(config).local_path
    check_memory(config, plan)
    record = Record(folder)
    keep_plan(folder, plan, seed)
    with terminable(), Console(sys.stderr) as console:  # what was started ends, too
        reference = reference_rows(config, console) if config.drill.reference else []
        with memory_of_its_own(None if apart else config.drill.memory_mb) as memory:
            if memory:
                config = replace(config, snapshot=replace(config.snapshot, folder=memory))
            if not _is_over(folder, record, plan, end):
                DrillSession(config, plan, seed, folder, record, console).run()
            else:
                console.message("this drill is over: its verdict again; choose another run.name for another one")
        console.message("looking at every batch and every checkpoint")
        evidence = gather(config, folder, plan, record.read(), reference, record.ended_at() or end, console)
    return conclude(config, folder, evidence)


def with_absolute_places(config: DrillJobConfig) -> DrillJobConfig:
    """The same places for the job, which has another working directory; URIs as they are."""
    data, parallel = config.data, config.parallel

    def there(place: str | None) -> str | None:
        return absolute(place) if place else place

    return replace(
        config,
        run=replace(config.run, storage_path=absolute(config.run.storage_path)),
        data=replace(
            data,
            source=there(data.source),
            tokenizer=there(data.tokenizer),
            corpora={name: absolute(folder) for name, folder in data.corpora.items()},
            cache_dir=there(data.cache_dir),
        ),
        parallel=replace(parallel, compile_cache=there(parallel.compile_cache)),
        snapshot=replace(config.snapshot, folder=absolute(config.snapshot.folder)),
    )


def plan_of(config: DrillJobConfig) -> tuple[list[Fault], int]:
    """The faults of a drill, and the seed that draws what they leave open. Raises ConfigError."""
    drill = config.drill
    given = [name for name in ("plan", "plan_file", "faults") if getattr(drill, name)]
    if len(given) != 1:
        plans = ", ".join(sorted(path.stem for path in (Path(__file__).parents[3] / "conf/drill").glob("*.yaml")))
        what = "nothing to do" if not given else f"set only one of drill.{' and drill.'.join(given)}"
        raise ConfigError(f"{what}; choose a plan with +drill=NAME: {plans}")
    if drill.plan_file:
        try:
            return from_json(path_of(drill.plan_file).read_bytes(), drill.plan_file)
        except OSError as error:
            raise ConfigError(f"drill.plan_file={drill.plan_file} cannot be read: {error.strerror}") from error
    if drill.plan:
        return parse_plan(drill.plan), drill.seed
    if len(drill.every_steps) != 2:
        raise ConfigError(f"drill.every_steps={drill.every_steps} must be two numbers, the fewest steps and the most")
    wanted = RandomFaults(
        count=drill.faults,
        seed=drill.seed,
        kinds=drill.kinds,
        every_steps=(drill.every_steps[0], drill.every_steps[1]),
        first_step=drill.first_step,
        nodes=drill.nodes,
        least_nodes=drill.least_nodes,
        most_nodes=drill.most_nodes,
        host_silence_s=drill.host_silence_s,
        apart=drill.hosts is DrillHosts.apart,
        workers_on_node=drill.workers_on_node,
    )
    return draw_faults(wanted), drill.seed


def with_end(config: DrillJobConfig, plan: list[Fault]) -> DrillJobConfig:
    """A random plan ends some steps after its last fault, which is known beforehand where nothing has to be found.
    Raises ConfigError where the run is too short for it."""
    is_delayed = any(sought(fault.kind, fault.what) for fault in plan)
    if not config.drill.faults or config.train.stop_at_step is not None or is_delayed:
        return config
    tail = TAIL_STEPS_APART if config.drill.hosts is DrillHosts.apart else TAIL_STEPS
    end = max(fault.at_step or 0 for fault in plan) + tail
    if end > config.train.steps:
        raise ConfigError(
            f"drill.faults={config.drill.faults} need {end} steps, train.steps={config.train.steps}; set "
            f"train.steps={end} or more, or fewer drill.every_steps"
        )
    return replace(config, train=replace(config.train, stop_at_step=end))


def check_fits(config: DrillJobConfig, plan: list[Fault], last_step: int) -> None:
    """Raises ConfigError where a plan is not for this cluster or a run of so many steps."""
    check_plan(
        plan,
        nodes=config.drill.nodes,
        max_workers=config.cluster.max_workers,
        last_step=last_step,
        apart=config.drill.hosts is DrillHosts.apart,
        host_silence_s=config.drill.host_silence_s,
    )


def check_settings(config: DrillJobConfig, plan: list[Fault]) -> None:
    """Raises ConfigError where a fault waits for what is switched off."""
    train, of_validation = config.train, ("hang_validation",)
    of_snapshots = ("hang_snapshot", "corrupt_snapshot", "kill_keeper", "stop_keeper")
    for kinds, name, value, some in (
        (of_validation, "train.validate_every_steps", train.validate_every_steps, 25),
        (of_validation, "train.validation_seqs", train.validation_seqs, 96),
        (of_snapshots, "snapshot.every_steps", config.snapshot.every_steps, 1),
    ):
        for fault in plan:
            if fault.kind in kinds and value == 0:
                line = f"{fault.when}: {fault.what}"
                raise ConfigError(f"fault '{line}' would never happen: {name}=0; set {name}={some}")


def check_memory(config: DrillJobConfig, plan: list[Fault]) -> None:
    """Raises ConfigError where a plan fills memory, and that is more than a drill fills."""
    folder, memory_mb = config.snapshot.folder, config.drill.memory_mb
    if not any(fault.kind == "fill_memory" for fault in plan):
        return
    if memory_mb is not None and memory_mb << 20 > MOST_FILLED:
        raise ConfigError(
            f"drill.memory_mb={memory_mb} is more than fill_memory may take: a drill fills at most "
            f"{MOST_FILLED >> 20}; set drill.memory_mb=256"
        )
    is_machines = memory_mb is None and config.drill.hosts is DrillHosts.together
    if is_machines and free_bytes(folder) > MOST_FILLED:
        raise ConfigError(
            f"{folder} has {free_bytes(folder) / 1e9:.1f} GB free, a drill fills at "
            f"most {MOST_FILLED / 1e9:.1f}; give the nodes a small memory of their own: drill.memory_mb=256, as root"
        )


def keep_plan(folder: Path, plan: list[Fault], seed: int) -> None:
    """Write plan.json. Raises ConfigError where the folder holds another drill's that this one does not begin with."""
    path = folder / "plan.json"
    if path.exists():
        earlier, earlier_seed = from_json(path.read_bytes(), str(path))
        if plan[: len(earlier)] != earlier or seed != earlier_seed:
            raise ConfigError(f"{path} is of a drill with other faults; choose another run.name")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_json(plan, seed=seed))


def _is_over(folder: Path, record: Record, plan: list[Fault], last_step: int) -> bool:
    watch = RunFollower(folder)
    watch.poll()
    return record.next_fault() >= len(plan) and (record.ended_at() is not None or watch.step >= last_step)
