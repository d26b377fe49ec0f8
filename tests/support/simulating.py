"""What tests of the simulator share: its configuration, and inputs with nothing but what a test gives."""

import random
from copy import deepcopy
from dataclasses import replace
from functools import cache

from hydra import compose, initialize_config_dir

from regrow.config.schema import ClusterConfig, PretrainConfig, SimulateJobConfig
from regrow.config.store import CONF_DIR, register, to_dataclass
from regrow.simulate.faults import Fault
from regrow.simulate.inputs import KINDS, Figure, Inputs, Job, Policy
from regrow.simulate.world import inputs_of

AT_16K = ("simulate.gpus=16384", "simulate.unit_gpus=128", "simulate.num_slices=2048", "simulate.spares=[24]")
AT_98K = ("simulate.gpus=98304", "simulate.unit_gpus=128", "simulate.num_slices=6144")


def configured(*arguments: str) -> SimulateJobConfig:
    return deepcopy(_configured(arguments))


@cache
def _configured(arguments: tuple[str, ...]) -> SimulateJobConfig:
    register(SimulateJobConfig)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_dataclass(compose("simulate", overrides=list(arguments)), SimulateJobConfig)


def inputs(*arguments: str, policy: str = "in_place") -> Inputs:
    """Of one policy."""
    return next(each for each in inputs_of(configured(*arguments)) if each.policy.name == policy)


def bare(job: Job, *, days: float = 60.0, policy: Policy | None = None, **figures: float) -> Inputs:
    """Nothing happens and nothing takes time, but what is given."""
    known = inputs(*AT_16K).figures
    neutral = (
        "slow_factor",
        "step_s",
        "communicators_gpus",
        "nodes_rack",
        "nodes_pod",
        "nodes_power",
        "sdc_first_share",
    )
    values = {name: figure.value if name in neutral else 0.0 for name, figure in known.items()}
    values |= {"snapshot_every_steps": 1.0} | figures
    made = policy or Policy("bare", park=False, copies_lost_at=1 << 30)
    found = {name: Figure(value) for name, value in values.items()} | {"slow_evict_s": Figure(float("inf"))}
    return Inputs(job, made, found, days, spread=0.0, known=True)


def on_64_nodes(*, step_s: float, spares: int = 2) -> tuple[Inputs, PretrainConfig]:
    """A group of 64 nodes of one rank, for a player and an estimate, and the configuration that a Control has."""
    slices = 1024
    job = Job(64, 1, slices, gpus_per_node=1, spares=spares)
    known = bare(
        job, form_base_s=15.0, communicators_s=5.0, communicators_power=0.0, join_s=2.0, durable_back_s=1020.0,
        step_s=step_s, respawn_s=60.0,
    )  # fmt: skip
    config = PretrainConfig()
    config.cluster = ClusterConfig(max_workers=64, spare_workers=spares, min_workers=32, quarantine_failures=0)
    config.optim.num_slices = config.optim.global_batch_seqs = slices
    return replace(known, policy=replace(known.policy, copies_lost_at=3)), config


def some_faults(count: int, mtbf_s: float, seed: int) -> list[Fault]:
    """As Llama 3's mix has them; nodes are away for an hour on average, one fault in 50 takes two of a rack."""
    rng, at, found = random.Random(seed), 0.0, []
    notice = {"gpu": 3.0, "network": 30.0, "host": 3.0, "software": 1.0, "hang": 60.0, "sdc": 3.0}
    for _ in range(count):
        at += rng.expovariate(1 / mtbf_s)
        kind = rng.choices(list(notice), (276, 42, 32, 56, 7, 6))[0]
        takes = kind not in ("software", "hang")
        found.append(
            Fault(
                at,
                kind,
                rng.random(),
                nodes=2 if takes and rng.random() < 0.02 else 1,
                notice_s=notice[kind] * rng.lognormvariate(-0.125, 0.5),
                away_s=rng.expovariate(1 / 3600.0) if takes else 60.0,
                unnoticed_s=rng.expovariate(1 / 600.0) if kind == "sdc" else 0.0,
                vary=rng.lognormvariate(-0.125, 0.5),
            )
        )
    return found


def rates(**kinds: float) -> dict[str, float]:
    """Failures per node and day by kind, none of the others."""
    return {f"rate_{kind}": kinds.get(kind, 0.0) for kind in KINDS}
