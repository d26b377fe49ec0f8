"""Drills as they are started: every plan that is shipped, what is refused, and the job's own arguments."""

import json
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest

from regrow.config.check import check
from regrow.config.schema import DrillJobConfig, MixtureStage, PretrainConfig
from regrow.config.spares import most_workers
from regrow.config.store import CONF_DIR, chosen, pretrain_config, pretrain_overrides, register, to_dataclass
from regrow.drill import job, run
from regrow.drill.faults import KINDS, parse_plan
from regrow.drill.findings import SOUGHT
from regrow.drill.job import undisturbed_run
from regrow.drill.log import Record
from regrow.drill.run import check_fits, check_memory, check_settings, keep_plan, plan_of, with_end
from regrow.errors import ConfigError
from regrow.record.lock import lock_run
from regrow.record.log import encode
from regrow.record.run_folder import write_record
from regrow.show.console import Console
from regrow.storage import LocalStorage

PLANS = sorted(path.stem for path in (CONF_DIR / "drill").glob("*.yaml"))


def composed(*overrides: str) -> DrillJobConfig:
    register(DrillJobConfig)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dataclass(hydra.compose("drill", list(overrides)), DrillJobConfig)


def pretrain_composed(overrides: list[str]) -> PretrainConfig:
    register(PretrainConfig)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dataclass(hydra.compose("pretrain", overrides))


def test_the_plans_that_the_documentation_promises_are_there() -> None:
    named = (
        "kill_worker kill_node grow_shrink pair_nodes stop_worker zombie drain black_hole kill_keeper kill_coordinator"
    )
    named += " auto_spacing"
    named += " one_after_another kill_controller kill_driver corrupt_snapshot fill_memory slow_worker two_at_once soak"
    named += (
        " stopped_actors notices partition_node partition_head partition_peer blink_node slow_link storage newcomers"
        " light_soak gray_soak gray_link hangs flips long_stops live"
    )
    assert sorted(named.split()) == PLANS
    documented = (Path(CONF_DIR).parent / "docs/drills.md").read_text()
    assert all(f"`{plan}`" in documented for plan in PLANS)
    assert all(f"`{kind}`" in documented for kind in KINDS)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_is_shipped_fits_its_cluster_and_its_run(name: str) -> None:
    config = composed(f"+drill={name}")
    plan, _ = plan_of(config)
    config = with_end(config, plan)
    check(config)
    last_step = config.train.stop_at_step or config.train.steps
    check_fits(config, plan, last_step)
    check_settings(config, plan)
    assert config.drill.name == name
    assert config.run.name == f"drill-{name}"
    assert config.snapshot.every_steps == ("auto" if name == "auto_spacing" else 1)
    assert most_workers(config.cluster) >= config.drill.nodes * config.drill.workers_on_node


VALIDATING = "train.validate_every_steps=25"  # a drill does not by itself


@pytest.mark.parametrize(
    ("fault", "setting", "value"),
    [
        ("hang_validation rank=1", "train.validate_every_steps", 25),
        ("hang_validation rank=1", "train.validation_seqs", 96),
        ("hang_snapshot", "snapshot.every_steps", 1),
        ("corrupt_snapshot", "snapshot.every_steps", 1),
        ("kill_keeper", "snapshot.every_steps", 1),
        ("stop_keeper node=1", "snapshot.every_steps", 1),
    ],
)
def test_what_never_comes_in_a_run_cannot_be_waited_for(fault: str, setting: str, value: int) -> None:
    """The drill looked for it for 200 s, and said that the run had broken a promise."""
    given = (f"drill.plan=['at step 20: kill_worker', 'at step 30: {fault}']", "drill.reference=false", VALIDATING)
    config = composed(*given, f"{setting}=0")
    plan, _ = plan_of(config)
    says = f"fault 'at step 30: {fault}' would never happen: {setting}=0; set {setting}={value}"
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        run.run_drill(config)
    check_settings(composed(*given, f"{setting}={value}"), plan)


def test_the_job_is_given_what_differs_and_nothing_else() -> None:
    config = composed("+drill=pair_nodes", "optim.lr=0.001")
    config = replace(config, run=replace(config.run, storage_path="a b/it's, \\ {x: 1}"))
    arguments = pretrain_overrides(config)
    given = pretrain_composed(arguments)
    assert given == PretrainConfig(**{name: getattr(config, name) for name in vars(given)})
    assert "optim.lr=0.001" in arguments
    assert not any(argument.startswith(("drill.", "data.recipe", "optim.beta1")) for argument in arguments)


@pytest.mark.parametrize("choice", ["model=1b", "+cluster=h100x64"])
def test_a_model_with_settings_that_cannot_be_given_one_by_one_reaches_the_job(choice: str) -> None:
    given = ["+drill=kill_node", choice, "drill.reference=false"]
    config = composed(*given)
    assert config.model.rope_scaling is not None
    arguments = pretrain_overrides(config, chosen(given))
    assert pretrain_composed(arguments).model == config.model
    with pytest.raises(ConfigError, match=r"model\.rope_scaling is null"):
        pretrain_config(pretrain_overrides(config))


@pytest.mark.parametrize("name", ["debug", "150m", "8b"])
def test_a_model_that_is_chosen_is_trained_as_it_is(name: str) -> None:
    """Before, its width, layers and heads were those of the small one that drills train."""
    given = ["+drill=kill_node", f"model={name}"]
    model = pretrain_config(given[1:]).model
    assert composed(*given).model == model
    assert pretrain_composed(pretrain_overrides(composed(*given), chosen(given))).model == model
    assert composed("+drill=kill_node").model.dim == 128


@pytest.mark.parametrize("name", ["150m", "1b", "8b"])
def test_a_file_of_ones_own_reaches_the_job_by_what_it_sets(name: str) -> None:
    """Of --config-dir, which the job does not have. Before, it was refused, and later those that scale RoPE still."""
    config = composed("+drill=kill_node", f"model={name}", "+cluster=cpu3", "cluster.silence_s=9", "optim.lr=0.002")
    config = replace(config, model=replace(config.model, name="mine", num_layers=8))
    given, files = ["model=mine", "+cluster=mine", "optim.lr=0.002"], {"model": "mine", "data": "mine"}
    for arguments in (pretrain_overrides(config, given, files), pretrain_overrides(config, chosen(given))):
        assert not any(argument.partition("=")[2] == "mine" for argument in arguments)
        found = pretrain_composed(arguments)
        assert found == PretrainConfig(**{name: getattr(config, name) for name in vars(found)})


@pytest.mark.parametrize(
    ("setting", "corpora"),
    [
        ("data.corpora.web=/b", {"web": "/b", "own": "/o"}),
        ("++data.corpora.web=/b", {"web": "/b", "own": "/o"}),
        ("~data.corpora.web", {"own": "/o"}),
    ],
)
def test_what_is_said_of_a_key_that_only_a_file_of_ones_own_has_reaches_the_job(
    setting: str, corpora: dict[str, str]
) -> None:
    """Before, there was no new entry without a plus for the job, and no second one with it where it was composed."""
    config = composed("+drill=kill_node")
    config = replace(config, data=replace(config.data, corpora=corpora))
    found = pretrain_composed(pretrain_overrides(config, ["data=mine", setting, "optim.lr=0.002"], {"data": "mine"}))
    assert (found.data.corpora, found.optim.lr) == (corpora, 0.001)


def test_corpora_and_mixtures_reach_the_job() -> None:
    config = composed("+drill=kill_worker", "+data.corpora.web=/data/web")
    config = replace(config, data=replace(config.data, mixture=[MixtureStage(0, {"web": 2.5})]))
    given = pretrain_composed(pretrain_overrides(config))
    assert given.data.corpora == {"web": "/data/web"}
    assert given.data.mixture == [MixtureStage(0, {"web": 2.5})]


def test_one_of_three_ways_to_say_what_is_to_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"nothing to do; choose a plan with \+drill=NAME: auto_spacing, black_hole"):
        plan_of(composed())
    with pytest.raises(ConfigError, match=r"only one of drill\.plan and drill\.faults"):
        plan_of(composed("+drill=kill_worker", "drill.faults=3"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        plan_of(composed("drill.plan_file=/nowhere/plan.json"))
    drawn = plan_of(composed("+drill=soak", "drill.faults=9"))
    keep_plan(tmp_path, *drawn)
    assert plan_of(composed(f"drill.plan_file={tmp_path}/plan.json")) == drawn
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_of(composed("drill.plan_file='~/plan.json'")) == drawn
    (tmp_path / "plan.json").write_text(json.dumps({"plan": "x"}))
    with pytest.raises(ConfigError, match="is not a plan that a drill wrote"):
        plan_of(composed(f"drill.plan_file={tmp_path}/plan.json"))


def test_a_soak_on_hosts_apart_is_partitions_and_broken_storage_for_a_third() -> None:
    drawn, _ = plan_of(composed("+drill=soak", "drill.faults=3000", "drill.hosts=apart"))
    broken = [fault for fault in drawn if fault.kind.startswith(("partition", "blink")) or "storage" in fault.kind]
    assert len(broken) > len(drawn) / 3
    never = {"fill_memory", "bad_link", "look"}  # it has no room of its own; netem; it is no fault
    gray, _ = plan_of(composed("+drill=gray_soak", "drill.faults=3000"))
    gray_only = SOUGHT - {"slow_link"}  # they are found before the next one comes
    assert {fault.kind for fault in gray} >= SOUGHT
    never |= gray_only
    assert {fault.kind for fault in drawn} == KINDS.keys() - never
    together, _ = plan_of(composed("+drill=soak", "drill.faults=3000"))
    assert not any(KINDS[fault.kind].apart for fault in together)


def test_a_drill_may_get_longer_and_nothing_else(tmp_path: Path) -> None:
    keep_plan(tmp_path, *plan_of(composed("+drill=soak", "drill.faults=5")))
    keep_plan(tmp_path, *plan_of(composed("+drill=soak", "drill.faults=9")))
    with pytest.raises(ConfigError, match=r"of a drill with other faults; choose another run\.name"):
        keep_plan(tmp_path, *plan_of(composed("+drill=soak", "drill.faults=9", "drill.seed=8")))
    with pytest.raises(ConfigError, match="other faults"):
        keep_plan(tmp_path, parse_plan(["at step 5: kill_worker"]), 7)


def test_a_soak_ends_some_steps_after_its_last_fault_and_needs_room_for_it() -> None:
    config = composed("+drill=soak", "drill.faults=5")
    plan, _ = plan_of(config)
    assert with_end(config, plan).train.stop_at_step == (plan[-1].at_step or 0) + 40
    with pytest.raises(ConfigError, match=r"drill\.faults=5 need 1.. steps, train\.steps=60; set train\.steps=1"):
        with_end(replace(config, train=replace(config.train, steps=60)), plan)


def test_a_soak_whose_faults_wait_for_what_was_found_ends_after_its_last_one_wherever_that_was(tmp_path: Path) -> None:
    config = composed("+drill=gray_soak", "drill.faults=5")
    assert with_end(config, plan_of(config)[0]).train.stop_at_step is None
    record = Record(tmp_path)
    assert record.ended_at() is None
    for step in (70, 90):  # of five faults, then of more
        record.write("plan over", step=step)
    assert record.ended_at() == 90


@pytest.mark.parametrize("what", ["fault", "not injected"])
def test_a_shorter_plan_s_end_is_not_the_end_of_a_longer_one(tmp_path: Path, what: str) -> None:
    record = Record(tmp_path)
    record.write("fault", number=0, kind="kill_worker")
    record.write("plan over", step=70)
    record.write("outcome", number=0)
    assert record.ended_at() == 70
    record.write(what, number=1, kind="kill_worker")  # of the longer one, which was interrupted behind it
    assert record.ended_at() is None
    record.write("plan over", step=130)
    assert record.ended_at() == 130


@pytest.mark.parametrize("hosts", ["together", "apart"])
def test_memory_that_is_more_than_a_drill_fills_is_refused_before_anything_begins(hosts: str) -> None:
    settings = ("+drill=fill_memory", f"drill.hosts={hosts}")
    plan, _ = plan_of(composed(*settings))
    check_memory(composed(*settings, "drill.memory_mb=4096"), plan)
    with pytest.raises(ConfigError, match=r"drill\.memory_mb=5000 .* fills at most 4096; set drill\.memory_mb=256"):
        check_memory(composed(*settings, "drill.memory_mb=5000"), plan)
    check_memory(composed(*settings, "drill.memory_mb=5000"), parse_plan(["at step 5: kill_worker"]))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("drill.first_step=0", r"drill\.first_step=0 must be 1 or more: steps count from 1"),
        ("drill.faults=-5", r"drill\.faults=-5 must be 1 or more"),
    ],
)
def test_a_random_plan_begins_with_a_step_and_has_a_fault(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_of(composed("+drill=soak", setting))


def test_a_drill_may_be_repeated_without_its_plan_but_kinds_must_be_known() -> None:
    with pytest.raises(ConfigError, match="did you mean kill_node"):
        plan_of(composed("drill.faults=3", "+drill.kinds.kill_noed=1"))


@pytest.mark.parametrize(
    "parallel",
    [
        "parallel.pp=2 parallel.schedule=interleaved parallel.stages_per_rank=2",
        "parallel.tp=2 parallel.cp=2",
        "parallel.dp_replicate=2 cluster.verify_every_steps=10",
    ],
)
def test_the_undisturbed_run_of_any_layout_is_one_worker_s(parallel: str) -> None:
    config = undisturbed_run(composed("+drill=kill_worker", "cluster.max_workers=4", *parallel.split()))
    check(config)
    assert pretrain_composed(pretrain_overrides(config)).parallel == config.parallel


def test_sigterm_ends_a_drill_as_ctrl_c_does_while_the_run_to_compare_with_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: DrillJobConfig, console: Console) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heeded")

    monkeypatch.setattr(run, "reference_rows", train)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.run_drill(composed("+drill=kill_worker", f"run.storage_path={tmp_path}"))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_job_has_the_places_of_the_directory_that_its_drill_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it trained in the checkout's runs/, and the drill looked for it in its own."""
    started: list[list[str]] = []

    def start(arguments: list[str], output: Path, ray_folder: str) -> None:
        started.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "start_pretrain", start)
    monkeypatch.chdir(tmp_path)
    places = ["data=text_files", "data.source=texts/*.txt", "data.cache_dir=cache", "parallel.compile_cache=s3://b/c"]
    with pytest.raises(KeyboardInterrupt):
        run.run_drill(composed("+drill=kill_worker", "run.storage_path=runs", *places))
    (arguments,) = started
    config = pretrain_composed(arguments)
    assert config.run.storage_path == f"{tmp_path}/runs"
    assert (config.data.source, config.data.cache_dir) == (f"{tmp_path}/texts/*.txt", f"{tmp_path}/cache")
    assert (config.data.tokenizer, config.parallel.compile_cache) == (None, "s3://b/c")
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    given = ["data.tokenizer=x.json", "+data.corpora.web=web", "snapshot.folder='~/memory'"]
    moved = run.with_absolute_places(composed("+drill=kill_worker", *given))
    assert moved.snapshot.folder == f"{tmp_path}/home/memory"
    assert (moved.data.tokenizer, moved.data.corpora) == (f"{tmp_path}/x.json", {"web": f"{tmp_path}/web"})


class InterruptedProcess:
    """Of a run that has been stopped as soon as it has a snapshot."""

    def poll(self) -> None:
        raise KeyboardInterrupt

    def kill(self) -> None: ...

    def wait(self) -> None: ...


def test_an_undisturbed_run_that_is_stopped_leaves_no_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keepers are killed, which would delete them. Before, they stayed in /dev/shm for good."""
    memory = tmp_path / "memory"
    config = composed("+drill=kill_worker", f"run.storage_path={tmp_path}", f"snapshot.folder={memory}")
    of_another = memory / "regrow-another-node"
    of_another.mkdir(parents=True)

    def start(arguments: list[str], output: Path, ray_folder: str) -> InterruptedProcess:
        folder = LocalStorage(tmp_path / undisturbed_run(config).run.name)
        write_record(folder, run_id="mine", identity={}, manifest_sha256="aa", is_new=True)
        (memory / "regrow-mine-node").mkdir()
        (memory / "regrow-mine-node/slot-0").write_bytes(b"state")
        return InterruptedProcess()

    monkeypatch.setattr(job, "start_pretrain", start)
    with pytest.raises(KeyboardInterrupt), Console(sys.stderr) as console:
        job.reference_rows(config, console)
    assert list(memory.iterdir()) == [of_another]


def row_of(step: int) -> bytes:
    return encode({"step": step, "loss": 8.0, "generation": 1, "time": 1.0})


def test_an_undisturbed_run_that_another_drill_makes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of two drills of the same settings failed: the reference's folder was in use."""
    config = composed("+drill=kill_worker", f"run.storage_path={tmp_path}", "train.steps=3")
    folder = LocalStorage(tmp_path / undisturbed_run(config).run.name)
    lock = lock_run(folder)
    assert lock is not None
    waits = threading.Event()

    def train() -> None:
        assert waits.wait(60.0)
        with open(folder.root / "metrics.jsonl", "ab") as metrics:
            metrics.write(b"".join(map(row_of, (1, 2, 3))))

    monkeypatch.setattr(job, "start_pretrain", lambda *_: pytest.fail("it runs already"))
    monkeypatch.setattr(job.time, "sleep", lambda seconds: waits.set())
    other = threading.Thread(target=train)
    other.start()
    with Console(sys.stderr) as console:
        rows = job.reference_rows(config, console)
    other.join()
    lock.close()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "waiting for the first 3 steps of another job, maybe a drill's: " in capsys.readouterr().err


@pytest.mark.parametrize("other_trains_on", [True, False])
def test_an_undisturbed_run_that_another_drill_began_a_moment_sooner_is_waited_for(
    other_trains_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshots are left alone; where its drill is stopped, ours makes the rest."""
    memory = tmp_path / "memory"
    of_other = memory / "regrow-theirs-node"
    settings = ("train.steps=3", f"snapshot.folder={memory}", f"run.storage_path={tmp_path}")
    config = composed("+drill=kill_worker", *settings)
    folder = LocalStorage(tmp_path / undisturbed_run(config).run.name)
    locks: list[Any] = []
    started: list[int] = []

    def write(*steps: int) -> None:
        with open(folder.root / "metrics.jsonl", "ab") as metrics:
            metrics.write(b"".join(map(row_of, steps)))

    def start(arguments: list[str], output: Path, ray_folder: str) -> Any:
        """The first is refused, as another one has begun."""
        started.append(len(started))
        output.write_bytes(b"error: run folder is in use")
        if len(started) == 1:
            write_record(folder, run_id="theirs", identity={}, manifest_sha256="aa", is_new=True)
            of_other.mkdir(parents=True)
            locks.append(lock_run(folder))
            write(1)
        else:
            write(2, 3)
        return SimpleNamespace(poll=lambda: 1, kill=lambda: None, wait=lambda: None)

    def sleep(seconds: float) -> None:
        assert of_other.is_dir()
        if other_trains_on:
            write(2, 3)
        else:
            locks.pop().close()

    monkeypatch.setattr(job, "start_pretrain", start)
    monkeypatch.setattr(job.time, "sleep", sleep)
    with Console(sys.stderr) as console:
        assert [row["step"] for row in job.reference_rows(config, console)] == [1, 2, 3]
    assert len(started) == (1 if other_trains_on else 2)
