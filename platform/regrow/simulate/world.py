"""What a configuration comes to for the engines: the job's size, each policy, every figure with its source. Pure."""

import contextlib
import difflib
import math
from collections.abc import Mapping
from dataclasses import replace

from regrow.config.check import check_finite, check_plan, topologies, topology_of, world_sizes
from regrow.config.conf_yaml import parse_yaml
from regrow.config.plain import CONF_DIR
from regrow.config.schema import PolicyConfig, PretrainConfig, SimulateConfig, SimulateJobConfig
from regrow.config.snapshots import fixed_every_steps, takes_snapshots
from regrow.config.spares import num_beyond, parks
from regrow.control.health import WHERE_AGAIN_S
from regrow.control.phases import BEYOND_S, FACTOR
from regrow.control.spacing import FIRST
from regrow.errors import ConfigError, RegrowError
from regrow.forecast.estimate import Forecast, check_float8, forecast, gpu_of, network_of
from regrow.forecast.settle import C, settled
from regrow.simulate.inputs import FIGURES, KINDS, Figure, Inputs, Job, Origin, Policy, parse_figure
from regrow.simulate.profile import Profile

OWN = "in_place"  # the policy that is regrow's
SUSPECT_S = 30.0  # until a slow node is named, before cluster.drain_slow_s counts: assumed
GOALS = ((16384, 0.98), (1 << 62, 0.95))  # of effective, up to so many GPUs
STEP_S = 5.0  # where there is no forecast
DAY = 86400.0
SINGLE_EVENTS = 200_000  # failures of all runs together, of closed forms


def inputs_of(config: SimulateJobConfig, profile: Profile | None = None) -> list[Inputs]:
    """One for each policy that is compared, in their order, with what a profile of runs has measured. Raises
    ConfigError for what cannot be, with the fix.
    """
    simulate = config.simulate
    _check(config)
    job = job_of(config)
    if not simulate.policy:
        raise ConfigError("simulate.policy is empty; choose some, as simulate/policy=[in_place,restart]")
    of_run = settled_for(config, job)
    full = _forecast(config, job, of_run)
    away = Figure(config.cluster.quarantine_s, Origin.assumed, "cluster.quarantine_s")
    base = _faults(simulate) | {"step_s": _step(full), "slow_away_s": away}
    base |= _figures(simulate.figures, "simulate.figures")
    found = []
    for name, policy in simulate.policy.items():
        figures = base | _figures(policy.figures, f"simulate.policy.{name}.figures")
        copies = policy.copies_lost_at
        if name == OWN:
            decided, given = _of_settings(config, job, figures, full, of_run), _given(simulate)
            figures |= {each: figure for each, figure in decided.items() if each not in given}
            copies = config.snapshot.copies + 1
            if simulate.domains if simulate.domains is not None else config.snapshot.domain_label is not None:
                copies = max(copies, int(figures["nodes_pod"].value))
            figures |= _figures(simulate.own, "simulate.own")
            copies = min(simulate.own_copies_lost_at or copies, job.nodes + job.spares)  # there are no more
        made = _policy(name, policy, job, copies)
        if name == OWN and not simulate.own and not takes_snapshots(config.snapshot):
            made = replace(made, memory=False, copies_lost_at=1 << 30)
        inputs = Inputs(job, made, figures, simulate.days)
        inputs = profile.applied(inputs) if profile is not None else inputs
        inputs = inputs.override(_asked(simulate, inputs))
        found.append(_single(inputs, simulate) if simulate.faults.single else inputs)
    return found


def job_of(config: SimulateJobConfig) -> Job:
    """The job's size. Raises ConfigError for units that do not divide it, and spares that there cannot be."""
    simulate, least, most = config.simulate, config.cluster.min_workers, config.cluster.max_workers
    if simulate.gpus is None and least > most:
        raise ConfigError(
            f"cluster.min_workers={least} is above cluster.max_workers={most}: no group trains; "
            f"set cluster.min_workers={most} or fewer"
        )
    is_given = simulate.faults.single or any((simulate.gpus, simulate.unit_gpus, simulate.num_slices))
    job = _given_job(config) if is_given else _run_job(config)
    counts = simulate.spares or [job.spares]
    for count in counts:
        if not 0 <= count <= job.nodes:
            raise ConfigError(f"simulate.spares={count}: 0 to {job.nodes}, the job's nodes")
    return replace(job, spares=counts[0])


def _run_job(config: SimulateJobConfig) -> Job:
    """Of the group that a run of this configuration forms at full size; what it leaves out are spares."""
    check_plan(config)
    cluster, slices = config.cluster, config.optim.num_slices
    most = cluster.max_workers
    per_node = config.simulate.gpus_per_node or min(config.plan.workers_per_node, most)
    _whole_nodes(most, per_node)
    if cluster.address is not None and per_node % config.parallel.tp:
        raise ConfigError(f"simulate.gpus_per_node={per_node} must be a multiple of parallel.tp={config.parallel.tp}")
    made, _ = settled(config)
    table = topologies(made)
    gpus = max(world_sizes(made, table).values())
    mesh = table[gpus].mesh
    unit, name = mesh.tp * mesh.cp * mesh.pp, f"{config.model.name} on {gpus:,} GPUs"
    job = Job(gpus, unit, slices, per_node, min_units=-(-cluster.min_workers // unit), name=name)
    return replace(job, spares=max(0, (most + num_beyond(cluster)) // per_node - job.nodes))


def _given_job(config: SimulateJobConfig) -> Job:
    """Of a size that is given, whatever a run makes of it."""
    simulate, cluster, parallel = config.simulate, config.cluster, config.parallel
    gpus = simulate.gpus or cluster.max_workers
    per_node = simulate.gpus_per_node or min(config.plan.workers_per_node, gpus)
    unit = simulate.unit_gpus or parallel.tp * parallel.cp * max(1, parallel.pp)
    slices = simulate.num_slices or (gpus // unit if simulate.faults.single else config.optim.num_slices)
    if gpus < 1 or unit < 1:
        raise ConfigError(f"simulate.gpus={gpus}, simulate.unit_gpus={unit}: at least 1")
    _whole_nodes(gpus, per_node)
    if gpus % unit:
        raise ConfigError(f"{gpus} GPUs are not whole units of {unit}; set simulate.gpus={max(1, gpus // unit) * unit}")
    if slices < gpus // unit:
        raise ConfigError(f"{slices} slices for {gpus // unit} units; set simulate.num_slices={gpus // unit} or more")
    least, beyond = 0, num_beyond(cluster)
    if simulate.gpus is None:
        least = -(-cluster.min_workers // unit)
        passes = -(-slices // (gpus // unit))
        in_use = unit * max(-(-slices // passes), least)  # the fewest that take as many
        if parks(cluster) and not (gpus - in_use) % per_node:
            gpus, beyond = in_use, beyond + gpus - in_use
    name = f"{config.model.name} on {gpus:,} GPUs"
    return Job(gpus, unit, slices, per_node, min_units=least, spares=beyond // per_node, name=name)


def _whole_nodes(gpus: int, per_node: int) -> None:
    if per_node < 1:
        raise ConfigError(f"simulate.gpus_per_node={per_node}: at least 1")
    if gpus % per_node:
        raise ConfigError(f"{gpus} GPUs are not whole nodes of {per_node}; set simulate.gpus_per_node to a divisor")


def replicas_of(simulate: SimulateConfig) -> int:
    """How many runs are played; more for closed forms, which are exact."""
    if not simulate.faults.single:
        return simulate.replicas
    return max(simulate.replicas, math.ceil(SINGLE_EVENTS * simulate.mtbf_s / (simulate.days * DAY)))


def goal_of(simulate: SimulateConfig, job: Job) -> float:
    return simulate.goal if simulate.goal is not None else next(goal for most, goal in GOALS if job.gpus <= most)


def _check(config: SimulateJobConfig) -> None:
    simulate = config.simulate
    check_finite("plan", config.plan)
    check_finite("simulate", simulate)  # figures are texts, which may be infinite
    for name, value, holds, what in (
        ("days", simulate.days, simulate.days > 0, "positive"),
        ("replicas", simulate.replicas, simulate.replicas >= 1, "at least 1"),
        ("repair", simulate.repair, simulate.repair > 0, "positive"),
        ("evict", simulate.evict, simulate.evict is None or simulate.evict >= 0, "positive, or 0 for never"),
        ("sdc", simulate.sdc, simulate.sdc is None or simulate.sdc >= 0, "at least 0"),
        ("seed", simulate.seed, simulate.seed >= 0, "at least 0"),
        ("goal", simulate.goal, simulate.goal is None or 0 < simulate.goal < 1, "between 0 and 1, as 0.98"),
        ("mtbf_s", simulate.mtbf_s, simulate.mtbf_s > 0, "positive"),
        ("restart_s", simulate.restart_s, simulate.restart_s >= 0, "at least 0"),
        ("interval_s", simulate.interval_s, simulate.interval_s > 0, "positive"),
        ("write_s", simulate.write_s, simulate.write_s >= 0, "at least 0"),
    ):
        if not holds:
            raise ConfigError(f"simulate.{name}={value} must be {what}")


def _figures(given: Mapping[str, str], where: str) -> dict[str, Figure]:
    for name in given:
        if name not in FIGURES:
            nearest = difflib.get_close_matches(name, sorted(FIGURES), n=1, cutoff=0.0)[0]
            raise ConfigError(f"{where}.{name}: there is no such figure; did you mean {nearest!r}?")
    return {name: parse_figure(text, f"{where}.{name}") for name, text in given.items()}


def _faults(simulate: SimulateConfig) -> dict[str, Figure]:
    """The rate of each kind: a share of all, known as well as its own events are many."""
    faults = simulate.faults
    total = parse_figure(faults.per_node_day, "simulate.faults.per_node_day")
    if total.value < 0:
        raise ConfigError(f"simulate.faults.per_node_day={faults.per_node_day!r} must not be negative")
    for kind, weight in faults.mix.items():
        if kind not in KINDS or weight < 0:
            raise ConfigError(f"simulate.faults.mix.{kind}={weight}: kinds are {', '.join(KINDS)}, weights at least 0")
    weights = sum(faults.mix.values())
    if total.value > 0 and not weights:
        raise ConfigError("simulate.faults.mix is empty; give weights, as {gpu: 1}")
    found = {}
    for kind in KINDS:
        share = faults.mix.get(kind, 0.0) / weights if weights else 0.0
        low, high = (None if each is None else each * share for each in (total.low, total.high))
        n = max(1, round(total.n * share)) if total.n and share else 0
        found[f"rate_{kind}"] = replace(total, value=total.value * share, n=n, low=low, high=high)
    return found | {"rate_planned": parse_figure(faults.planned_per_day, "simulate.faults.planned_per_day")}


def _forecast(config: SimulateJobConfig, job: Job, of_run: PretrainConfig | None) -> Forecast | None:
    """Of the job's group, where the cluster's name says what its GPUs are. `of_run`: of `settled_for`. Raises
    ConfigError for float8 on GPUs that have none.
    """
    if not config.cluster.gpus_per_worker:
        return None
    try:
        device = gpu_of(config, config.plan)
    except ConfigError:  # a cluster by another name
        return None
    check_float8(config, device)
    if of_run is not None:
        with contextlib.suppress(RegrowError):
            return forecast(of_run, job.gpus, device, network_of(config, config.plan))
    return None


def _step(full: Forecast | None) -> Figure:
    """A step at full size."""
    if full is None:
        return Figure(STEP_S, Origin.assumed, "no forecast for this cluster, or for such units", low=1.0, high=20.0)
    seconds = full.time.step_s
    return Figure(seconds, Origin.assumed, "jobs.plan's forecast", low=seconds / 2, high=seconds * 2)


def _spacing(config: SimulateJobConfig, full: Forecast | None) -> Figure:
    """Steps from one snapshot to the next."""
    fixed, most = fixed_every_steps(config.snapshot), config.snapshot.most_steps_lost
    if fixed is not None:
        return Figure(float(max(1, fixed)), Origin.assumed, "snapshot.every_steps")
    found, source = (full.commits.every_steps, "jobs.plan's forecast") if full else (FIRST, "as control begins")
    source = f"snapshot.every_steps=auto: {source}"
    return Figure(float(found), Origin.assumed, source, low=1.0, high=float(max(found, most)))


def _given(simulate: SimulateConfig) -> list[str]:
    """Figures of regrow's own policy that are not those of conf/ any more."""
    shipped = parse_yaml((CONF_DIR / "simulate.yaml").read_text())["simulate"]["figures"]
    shipped = shipped | parse_yaml((CONF_DIR / "simulate" / "policy" / f"{OWN}.yaml").read_text())["figures"]
    return [
        name
        for name, text in (simulate.figures | simulate.policy[OWN].figures).items()
        if str(shipped.get(name)) != text
    ]


def _of_settings(
    config: SimulateJobConfig,
    job: Job,
    figures: Mapping[str, Figure],
    full: Forecast | None,
    of_run: PretrainConfig | None,
) -> dict[str, Figure]:
    """What the run's own settings decide of regrow's figures."""
    cluster, found = config.cluster, {"snapshot_every_steps": _spacing(config, full)}
    if not takes_snapshots(config.snapshot) and config.checkpoint.every_steps:
        seconds = config.checkpoint.every_steps * figures["step_s"].value
        source = "checkpoint.every_steps x step_s, with snapshot.every_steps=0"
        found["snapshot_interval_s"] = Figure(seconds, Origin.assumed, source)
    timeout_s = config.train.collective_timeout_s
    learned_s = FACTOR * figures["step_s"].value + BEYOND_S + WHERE_AGAIN_S
    hang_s, source = timeout_s, "train.collective_timeout_s"
    if cluster.stuck_s and learned_s < timeout_s:
        hang_s, source = learned_s, "cluster.stuck_s: beyond what phases took so far, by step_s; on gloo 26 to 52 s"
    found["notice_hang_s"] = replace(figures["notice_hang_s"], value=hang_s, origin=Origin.assumed, source=source)
    if cluster.drain_slow_s > 0:
        source = f"cluster.drain_slow_s, and {SUSPECT_S:.0f} s until a slow node is named"
        found["slow_evict_s"] = Figure(cluster.drain_slow_s + SUSPECT_S, Origin.assumed, source, low=30.0, high=600.0)
    if cluster.verify_every_steps > 0:
        seconds = cluster.verify_every_steps * figures["step_s"].value
        found["sdc_unnoticed_s"] = Figure(seconds, Origin.assumed, "cluster.verify_every_steps x step_s")
        share = verify_share(config, job, of_run)
        source = "a micro-batch more each cluster.verify_every_steps; gloo had up to twice as much"
        found["verify_share"] = Figure(share, Origin.assumed, source, low=share, high=2 * share)
    return found


def settled_for(config: C, job: Job) -> C | None:
    """As a run of it is settled, with the job's slices; None where a group of so many GPUs has other units, or none."""
    with contextlib.suppress(RegrowError):
        made, _ = settled(config)
        slice_seqs = made.optim.global_batch_seqs // made.optim.num_slices
        optim = replace(made.optim, num_slices=job.num_slices, global_batch_seqs=slice_seqs * job.num_slices)
        made = replace(made, optim=optim)
        group = topology_of(made, job.gpus)
        if group.mesh.world_size == job.unit_gpus * group.batch.world_size:
            return made
    return None


def verify_share(config: PretrainConfig, job: Job, of_run: PretrainConfig | None) -> float:
    """Of the time of a step without one, what verifications add to each: a micro-batch more each so many steps, which
    costs a pipeline no filling. `of_run`: of `settled_for`; without it a micro-batch is a slice.
    """
    every_steps = config.cluster.verify_every_steps
    passes, bubble = math.ceil(job.num_slices / job.units), 0.0
    if of_run is not None:
        group = topology_of(of_run, job.gpus)
        passes, bubble = group.batch.num_micro_batches, group.bubble_share
    return (1 - bubble) / (every_steps * passes) if every_steps else 0.0


def _asked(simulate: SimulateConfig, inputs: Inputs) -> dict[str, Figure]:
    """What simulate.repair, evict and sdc say, whatever was measured."""
    found = {}
    for name in ("away_short_s", "away_long_s"):
        figure, times = inputs.figures[name], simulate.repair
        low, high = (None if each is None else each * times for each in (figure.low, figure.high))
        found[name] = replace(figure.with_value(figure.value * times), low=low, high=high)
    is_own = inputs.policy.name == OWN
    if is_own and simulate.evict is not None:
        found["slow_evict_s"] = Figure(simulate.evict or float("inf"), Origin.assumed, "simulate.evict")
    if is_own and simulate.sdc is not None:
        found["sdc_unnoticed_s"] = Figure(simulate.sdc, Origin.assumed, "simulate.sdc")
    return found


def _policy(name: str, policy: PolicyConfig, job: Job, copies: int) -> Policy:
    replicas = max(2, job.gpus // policy.replica_gpus) if policy.replica_gpus else 1
    if replicas > 1 and job.nodes < replicas:
        replicas = 1
    return Policy(
        name,
        policy.shrinks,
        policy.in_place,
        replicas,
        policy.memory,
        policy.automatic,
        copies,
        policy.park,
        policy.expels_corrupt,
        policy.rolling,
        policy.retire_after,
    )


def _single(inputs: Inputs, simulate: SimulateConfig) -> Inputs:
    """One process dies now and then, all restart from the newest checkpoint: as closed forms have it."""
    given = lambda value: Figure(value, Origin.assumed, "given")  # noqa: E731
    zero = {name: given(0.0) for name in inputs.figures if name.startswith(("rate_", "share_", "notice_"))}
    other = ("build_s", "restore_s", "first_step_s", "communicators_s", "form_per_node_s", "join_s", "respawn_s")
    policy = Policy(inputs.policy.name, shrinks=True, in_place=False, memory=False, park=False, copies_lost_at=1 << 30)
    figures = {
        **inputs.figures,
        **zero,
        **{name: given(0.0) for name in (*other, "verify_share")},
        "rate_software": given(DAY / simulate.mtbf_s / inputs.job.nodes),
        "form_base_s": given(simulate.restart_s),
        "snapshot_interval_s": given(simulate.interval_s),
        "snapshot_stall_s": given(simulate.write_s),
    }
    return replace(inputs, job=replace(inputs.job, spares=0), policy=policy, figures=figures, spread=0.0, known=True)
