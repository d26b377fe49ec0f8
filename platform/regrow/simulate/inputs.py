"""What a simulation is told: figures by name, each with its provenance, and the job, the policy and the world.

A figure is a number that somebody counted, wrote or guessed: `measured` of runs' own logs, `published` by a source, or
`assumed`, with a range to sweep. Engines ask for figures by name, so that a profile of runs, a sweep and a tornado
replace any of them in one way: `Inputs.override`. Pure.

Names end in their unit; `KINDS` are the kinds of faults:

    rate_<kind>                                   failures per node and day
    rate_planned rate_head rate_storage           of the whole job, per day: planned stops, deaths of the head, outages
    share_slow                                    nodes that become slow, for each failure
    share_rack share_pod share_power nodes_rack nodes_pod nodes_power   of faults that take a node, those that take so
                                                  many at once; the rate of nodes that fail stays what it is
    share_burst burst_within_s                    of faults, those that follow another one within so long
    lemon_share lemon_times                       of nodes, those that fail so many times as often as the others
    notice_<kind>_s                               from the fault to where the group is told
    form_base_s form_per_node_s build_s restore_s first_step_s       a group forms: each a part, they add up
    communicators_{s,gpus,power}                   of that, what communicators take at so many GPUs, and its growth
    join_s                                        taking newcomers in, beside communicators
    respawn_s restart_s                           until a process on a sound node is ready; until all processes are anew
    away_short_s away_short_sigma away_long_s away_long_sigma away_short_share   a node's absence until it is ready to
                                                  join again: two lognormals, by their medians
    sdc_unnoticed_s sdc_first_share               that wrong results go unseen, and are done again; of such incidents,
                                                  those that are the first of their host
    verify_share                                  of the time of a step without one, what verifications add to each
    slow_factor slow_lasts_s slow_evict_s         a slow node: the job's step time over what it was, how long, and until
                                                  it is left, where a spare waits
    slow_away_s                                   and until that node may join again
    stop_fixed_s stop_per_gpu_s storage_lasts_s   a planned stop; an outage of storage
    snapshot_interval_s snapshot_stall_s          between states that count where memory is not used, and their stall
    durable_back_s                                what it costs that all copies in memory are lost
    snapshot_every_steps                          steps from one snapshot in memory to the next
    lost_committed_steps                          of a loss, on average, steps that are done again though the snapshot
                                                  that has them was taken: its commit takes so long
    step_s                                        a step's time at full size, undisturbed
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from regrow.errors import ConfigError

KINDS = ("gpu", "network", "host", "software", "hang", "sdc", "drain")
TAKES_NODE = ("gpu", "network", "host", "sdc", "drain")  # it is away then; of the others a process is, or hangs
FIGURES = frozenset(  # those above
    re.findall(
        r"\w+",
        """
    rate_planned rate_head rate_storage
    share_slow share_rack share_pod share_power nodes_rack nodes_pod nodes_power share_burst burst_within_s
    lemon_share lemon_times form_base_s form_per_node_s build_s restore_s first_step_s
    communicators_s communicators_gpus communicators_power join_s respawn_s restart_s
    away_short_s away_short_sigma away_long_s away_long_sigma away_short_share sdc_unnoticed_s sdc_first_share
    verify_share slow_factor slow_lasts_s slow_evict_s slow_away_s stop_fixed_s stop_per_gpu_s storage_lasts_s
    snapshot_interval_s snapshot_stall_s durable_back_s snapshot_every_steps lost_committed_steps step_s
    """,
    )
) | {name.format(kind) for kind in KINDS for name in ("rate_{}", "notice_{}_s")}
PRIOR_EVENTS = 3.0  # that a published rate is worth beside a run's own count
LEAST_SAMPLES = 5  # of a run's own, below which what was published is mixed in


class Origin(StrEnum):
    """Where a figure is from."""

    measured = "measured"  # by regrow, in runs or benchmarks
    published = "published"
    assumed = "assumed"


@dataclass(frozen=True)
class Figure:
    """A number and where it is from. Durations are drawn from `samples`, else from a lognormal of the mean `value`."""

    value: float
    origin: Origin = Origin.assumed
    source: str = ""  # a citation, run folders, or why it is believed
    n: int = 0  # samples, or events counted; 0: one number, whatever it was made of
    low: float | None = None  # assumed: the range that a sweep tries
    high: float | None = None
    samples: tuple[float, ...] = ()

    def with_value(self, value: float) -> "Figure":
        """The same figure, were it this number: samples are stretched."""
        stretch = value / self.value if self.value else 0.0
        return replace(self, value=value, samples=tuple(stretch * each for each in self.samples))


Figures = Mapping[str, Figure]


def at(figure: Figure, value: float) -> Figure:
    """A figure, were it this number."""
    if figure.value and math.isfinite(figure.value):
        return figure.with_value(value)
    return replace(figure, value=value, samples=())


def measured(samples: Iterable[float], source: str) -> Figure:
    """Of a run's own durations, in seconds.

    >>> measured([1.0, 3.0], "runs/a").value
    2.0
    """
    kept = tuple(samples)
    return Figure(sum(kept) / len(kept), Origin.measured, source, len(kept), samples=kept)


def rate_of(prior: Figure, count: int, exposure: float, source: str) -> Figure:
    """The posterior mean of a rate: a Gamma prior worth 3 events of the published rate, and a run's own count over its
    exposure (node-days, or days). It stays what it was where there is no exposure.

    >>> round(rate_of(Figure(0.003, Origin.published), 12, 2000.0, "runs/a").value, 6)
    0.005
    """
    if exposure <= 0:
        return prior
    known = PRIOR_EVENTS / prior.value if prior.value > 0 else 0.0
    events = (PRIOR_EVENTS if prior.value > 0 else 0.0) + count
    text = f"{source}: {count} in {exposure:.3g}; prior worth {PRIOR_EVENTS:.0f}: {prior.source}"
    return Figure(events / (known + exposure), Origin.measured, text, max(1, round(events)))


def mixed(prior: Figure, samples: Iterable[float], source: str) -> Figure:
    """A run's own durations; with fewer than 5, the prior's mean stands for those that are missing."""
    kept = tuple(samples)
    if not kept:
        return prior
    missing = max(0, LEAST_SAMPLES - len(kept))
    own = measured(kept + (prior.value,) * missing, source)
    return replace(own, n=len(kept), source=source + (f"; {missing} of 5 from {prior.source}" if missing else ""))


_FIGURE = re.compile(
    r"\s*(?P<value>[-+0-9.e]+|inf)\s*(\((?P<low>[-+0-9.e]+)\s*to\s*(?P<high>[-+0-9.e]+|inf)\))?"
    r"\s*(?P<origin>measured|published|assumed)?\s*(n=(?P<n>\d+))?\s*:?\s*(?P<source>.*)",
    re.DOTALL,
)


def parse_figure(text: str, name: str) -> Figure:
    """A figure as configurations have it: `17 (4 to 60) published n=3: arXiv:2602.00277`. A number alone is assumed.

    Raises ConfigError, naming the setting.

    >>> parse_figure("2 (0 to 60) assumed: no GPU was measured", "build_s").high
    60.0
    """
    found = _FIGURE.fullmatch(text)
    try:
        assert found is not None
        low, high = found["low"], found["high"]
        origin, source = Origin(found["origin"] or "assumed"), found["source"].strip()
        return Figure(
            float(found["value"]),
            origin,
            source if found["origin"] else source or "given",
            int(found["n"] or 0),
            None if low is None else float(low),
            None if high is None else float(high),
        )
    except (AssertionError, ValueError):
        raise ConfigError(
            f"{name}={text!r} is no figure; write a number, or as '17 (4 to 60) assumed: why' with measured, published "
            "or assumed"
        ) from None


@dataclass(frozen=True)
class Job:
    """The job, as far as its speed goes. A unit is made of any nodes that are up."""

    gpus: int
    unit_gpus: int  # tp x cp x pp
    num_slices: int  # of a global batch
    gpus_per_node: int = 8  # a node's ranks; of a drill: its workers
    min_units: int = 0  # that train, with fewer nothing is; 0: half of them
    slices_per_pass: int = 1
    spares: int = 0  # nodes that have joined and wait
    name: str = ""

    @property
    def nodes(self) -> int:
        """The last one may be beside spares."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def units(self) -> int:
        return self.gpus // self.unit_gpus

    @property
    def least_units(self) -> float:
        return self.min_units or self.units / 2


@dataclass(frozen=True)
class Policy:
    """What is done about a fault."""

    name: str
    shrinks: bool = True  # goes on with fewer nodes; else waits for a node in its place
    in_place: bool = True  # survivors keep their processes
    replicas: int = 1  # above 1: replica groups, of which the others go on while one is re-formed (FT-HSDP)
    memory: bool = True  # snapshots are in other nodes' memory; else what was checkpointed counts
    automatic: bool = False  # checkpoint as often as wastes least: Daly's interval
    copies_lost_at: int = 2  # nodes at once that take a snapshot and all its copies
    park: bool = True  # run the fewest units that have the same number of passes
    expels_corrupt: bool = False  # a host that computed wrong once does not come back
    rolling: bool = False  # planned stops take a node at a time
    retire_after: int = 0  # a node that failed so often is replaced for good; 0: never


@dataclass(frozen=True)
class Inputs:
    """All that an engine is told. `figures` are those of this policy in this world."""

    job: Job
    policy: Policy
    figures: Figures
    days: float = 60.0
    spread: float = 0.5  # sigma of the lognormal about a delay of which there are no samples
    known: bool = False  # rates are taken for exact: for closed forms and synthetic truths

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def override(self, figures: Figures) -> "Inputs":
        """With these figures in place of those of the same names. Raises ConfigError for a name that there is not."""
        for name in figures:
            if name not in self.figures:
                raise ConfigError(f"no figure is called {name!r}; there are {', '.join(sorted(self.figures))}")
        return replace(self, figures={**self.figures, **figures})

    def with_values(self, **values: float) -> "Inputs":
        """With other numbers for some figures."""
        return self.override({name: at(self.figures[name], value) for name, value in values.items()})

    def communicators_s(self, gpus: int) -> float:
        """Seconds until the communicators of so many GPUs are made, by the law that was chosen; see `conf/simulate`."""
        return self["communicators_s"] * (gpus / self["communicators_gpus"]) ** self["communicators_power"]

    def form_s(self, gpus: int) -> float:
        """Mean seconds from the news of a loss to the first step of the next group, at this size."""
        fixed = self["form_base_s"] + self["form_per_node_s"] * gpus / self.job.gpus_per_node
        return (
            fixed
            + self.communicators_s(gpus)
            + sum(self[name] for name in ("build_s", "restore_s", "first_step_s") if name in self.figures)
        )
