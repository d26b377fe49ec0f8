"""Fault plans as data: which fault, its victim, when. Pure.

    at step 20: kill_worker rank=1
    at step 40: kill_node node=0 and kill_keeper rank=2
    after 10 s: return_node
    with 4 ranks: kill_worker

A fault waits for the one before it. `at step N` is due once step N is logged, `after S s` so long after the one
before it, or after the first step, `with N ranks` once a group of so many or more that began since has done a step.
Where a line names no victim, one is drawn when it is due, from the plan's seed.
"""

import json
import math
import random
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate

from regrow.errors import ConfigError

WORKER, NODE = "worker", "node"  # what a victim is


LOOK = "look"
SLOW_RANK, SLOW_LINK, DEAD_MOUNT, FLIP_WEIGHTS = "slow_rank", "slow_link", "dead_mount", "flip_weights"
WRONG_UNITS = ("flip_gradients", "flip_activations")  # a host that computes wrong, and is given up
FLIPS = (FLIP_WEIGHTS, *WRONG_UNITS)
AT_ITS_SPEED, WHOLE_AGAIN = "at its own speed", "the network is whole again"  # notes of their ends
HANGS = {  # phases, as `control.phases` has them
    "hang_first_step": "first_step",
    "hang_step": "step",
    "hang_validation": "validation",
    "hang_snapshot": "snapshot",
}


@dataclass(frozen=True)
class Kind:
    """What a fault does, its victim, and its options with their defaults; None: never, or not at all."""

    does: str
    victim: str = ""
    options: Mapping[str, float | None] = field(default_factory=dict)
    nodes: int = 0  # how many more nodes there are after it, as a rule
    apart: bool = False  # it takes hosts apart
    ranks: int = 0  # fewest of the group that it may befall
    least_nodes: int = 0  # fewest that it is drawn for


KINDS: dict[str, Kind] = {
    "kill_worker": Kind("a worker is killed", WORKER),
    "stop_worker": Kind("a worker is stopped, and perhaps continued later", WORKER, {"continue_after_s": None}),
    "slow_worker": Kind(
        "a worker is stopped for a share of each period", WORKER, {"for_s": 10.0, "share": 0.5, "period_s": 0.4}
    ),
    "corrupt_snapshot": Kind(
        "the newest snapshots on a worker's node are damaged, then another node's worker is killed",
        WORKER,
        least_nodes=2,
    ),
    FLIP_WEIGHTS: Kind("a bit of a worker's weights is flipped", WORKER, {"replicas": 1.0}),
    "flip_gradients": Kind(
        "a worker computes a gradient wrong in each pass, by a chance; its host goes once it is given up",
        WORKER,
        {"chance": 1.0},
        nodes=-1,
        ranks=3,
    ),
    "flip_activations": Kind(
        "a worker computes an activation wrong in each pass, by a chance; its host goes once it is given up",
        WORKER,
        {"chance": 1.0},
        nodes=-1,
        ranks=3,
    ),
    SLOW_RANK: Kind("a worker's steps take longer, by a share", WORKER, {"share": 0.3, "for_s": 120.0}),
    "hang_step": Kind("a worker hangs in a step", WORKER, ranks=2),
    "hang_first_step": Kind(
        "a worker hangs in the first step of the next group; another node's worker is killed",
        WORKER,
        ranks=3,
        least_nodes=2,
    ),
    "hang_validation": Kind("a worker hangs in the next validation", WORKER, ranks=2),
    "hang_snapshot": Kind("a worker hangs where it begins a snapshot", WORKER, ranks=2),
    "kill_node": Kind("a node dies with all its processes and its memory", NODE, nodes=-1),
    "drain_node": Kind("Ray is told that a node will go, and it goes", NODE, {"deadline_s": 15.0}, nodes=-1),
    "black_hole_node": Kind(
        "a node goes silent, as a host that is cut off; killed or continued later",
        NODE,
        {"kill_after_s": None, "continue_after_s": None},
        nodes=-1,
    ),
    "return_node": Kind("a node is added", nodes=+1),
    LOOK: Kind("nothing: the plan has come so far"),
    "kill_keeper": Kind("a node's keeper is killed", NODE),
    "kill_coordinator": Kind("the coordinator is killed"),
    "kill_controller": Kind("Ray Train's controller is killed"),
    "kill_driver": Kind("the job's own process is killed, and the job started again", options={"restart_after_s": 2.0}),
    "fill_memory": Kind("the nodes' memory is filled up", options={"leave_mb": 4.0, "for_s": 10.0}),
    "stop_coordinator": Kind("the coordinator is stopped, and continued later", options={"for_s": 10.0}),
    "stop_controller": Kind("Ray Train's controller is stopped, and continued later", options={"for_s": 10.0}),
    "stop_keeper": Kind("a node's keeper is stopped, and continued later", NODE, {"for_s": 10.0}),
    "stop_driver": Kind("the job's own process is stopped, and continued later", options={"for_s": 10.0}),
    "interrupt_driver": Kind(
        "the job is asked to stop, as by Ctrl-C, and started again once it has", options={"restart_after_s": 2.0}
    ),
    "drain_all": Kind(
        "Ray is told that every node will go; none does, or from the deadline on another comes for one after the other",
        options={"deadline_s": 20.0, "replace_every_s": None},
    ),
    "partition_node": Kind(
        "a node is cut off from all others, Ray gives it up, it is back, and goes",
        NODE,
        {"for_s": 25.0},
        nodes=-1,
        apart=True,
    ),
    "partition_head": Kind(
        "a node and the head do not reach each other, its peers still do; it is back, and goes",
        NODE,
        {"for_s": 25.0, "one_way": 0.0},
        nodes=-1,
        apart=True,
    ),
    "partition_peer": Kind(
        "a node and the next one do not reach each other, all others do",
        NODE,
        {"for_s": 20.0, "one_way": 0.0},
        apart=True,
        least_nodes=2,
    ),
    "blink_node": Kind(
        "a node is cut off from all others for less than Ray takes to give it up", NODE, {"for_s": 4.0}, apart=True
    ),
    "partition_storage": Kind("a node's storage does not answer for a while", NODE, {"for_s": 20.0}, apart=True),
    DEAD_MOUNT: Kind(
        "a node's storage does not answer for a while, and another node's worker is killed",
        NODE,
        {"for_s": 120.0},
        apart=True,
        ranks=3,
        least_nodes=2,
    ),
    SLOW_LINK: Kind("a node's link is slow for a while", NODE, {"rate_mbit": 20.0, "for_s": 20.0}, apart=True),
    "bad_link": Kind(
        "a node's link delays and loses for a while",
        NODE,
        {"delay_ms": 20.0, "loss_percent": 1.0, "for_s": 20.0},
        apart=True,
    ),
    "full_storage": Kind("storage has no room for a while, for all nodes", options={"for_s": 20.0}, apart=True),
    "read_only_storage": Kind("storage is read-only for a while, for all nodes", options={"for_s": 20.0}, apart=True),
    "failing_storage": Kind("storage fails for a while, for all nodes", options={"for_s": 20.0}, apart=True),
    "slow_storage": Kind(
        "storage answers late for a while, for all nodes", options={"delay_s": 5.0, "for_s": 20.0}, apart=True
    ),
    "hung_storage": Kind("storage does not answer for a while, for all nodes", options={"for_s": 20.0}, apart=True),
    "restart_raylet": Kind(
        "a raylet dies with all that it started and comes back on the same host, as another node", NODE, apart=True
    ),
    "return_small_node": Kind(
        "a node with too little memory for snapshots is added; it goes later",
        options={"memory_mb": 8.0, "for_s": 30.0},
        apart=True,
    ),
    "return_node_without_storage": Kind(
        "a node whose storage fails is added; it goes later", options={"for_s": 30.0}, apart=True
    ),
}
_WHEN = r"at\s+step\s+(?P<step>\d+)|after\s+(?P<after>\d+(?:\.\d+)?)\s*s|with\s+(?P<ranks>\d+)\s+ranks"
_LINE = re.compile(rf"\s*(?:{_WHEN})\s*:\s*(?P<faults>.*\S)\s*")


@dataclass(frozen=True)
class Fault:
    """One fault. Due at a step, some time after the one before it, or with so many ranks; together with the one before
    it if none of these is given."""

    kind: str
    at_step: int | None = None
    after_s: float | None = None
    with_ranks: int | None = None
    rank: int | None = None
    node: int | None = None  # by its number among those that are up, the oldest first
    options: Mapping[str, float] = field(default_factory=dict)

    def option(self, name: str) -> float | None:
        return self.options.get(name, KINDS[self.kind].options[name])

    def nodes(self, host_silence_s: float) -> int:
        """How many more nodes there are after it, where Ray takes a node for dead that is silent for so long."""
        back_s = self.options.get("continue_after_s", math.inf) if "kill_after_s" not in self.options else math.inf
        return 0 if back_s < host_silence_s else KINDS[self.kind].nodes

    @property
    def what(self) -> str:
        """The fault without its trigger."""
        given = {"rank": self.rank, "node": self.node, **self.options}
        return " ".join([self.kind, *(f"{key}={_plain(value)}" for key, value in given.items() if value is not None)])

    @property
    def when(self) -> str:
        if self.at_step is not None:
            return f"at step {self.at_step}"
        if self.with_ranks is not None:
            return f"with {self.with_ranks} ranks"
        return f"after {_plain(self.after_s)} s" if self.after_s is not None else "at once"

    @property
    def is_at_once(self) -> bool:
        """Whether it comes together with the one before it."""
        return self.at_step is None and self.after_s is None and self.with_ranks is None


@dataclass(frozen=True)
class RandomFaults:
    """How to draw a plan. The same numbers draw the same plan; a higher count only adds to its end."""

    count: int
    seed: int
    kinds: Mapping[str, float]  # what happens, as in a line of a plan, and its weight
    every_steps: tuple[int, int]  # fewest and most steps from one to the next
    first_step: int
    nodes: int  # at the start
    least_nodes: int
    most_nodes: int
    host_silence_s: float  # after which Ray takes a silent node for dead
    apart: bool = False  # whether faults that take hosts apart are drawn, too
    workers_on_node: int = 1


def parse_plan(lines: Sequence[str]) -> list[Fault]:
    """The faults of a plan. Raises ConfigError, naming the line, for the first mistake."""
    faults: list[Fault] = []
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is None:
            raise ConfigError(
                f"fault {line!r} must read 'at step 20: KIND', 'after 10 s: KIND', 'with 4 ranks: KIND' or "
                "'at step 20: KIND rank=1 and KIND'"
            )
        step = int(found["step"]) if found["step"] else None
        after_s = float(found["after"]) if found["after"] else None
        ranks = int(found["ranks"]) if found["ranks"] else None
        first, *others = parse_faults(found["faults"])
        faults += [replace(first, at_step=step, after_s=after_s, with_ranks=ranks), *others]
    _in_order(faults)
    return faults


def parse_faults(text: str) -> list[Fault]:
    """What happens at one trigger: `KIND [key=value ...] [and ...]`. Raises ConfigError."""
    return [_parse_fault(part.split(), text) for part in re.split(r"\s+and\s+", text.strip())]


def plan_lines(faults: Sequence[Fault]) -> list[str]:
    """The inverse of `parse_plan`."""
    lines: list[str] = []
    for fault in faults:
        if fault.is_at_once:
            lines[-1] += f" and {fault.what}"
        else:
            lines.append(f"{fault.when}: {fault.what}")
    return lines


def check_plan(
    faults: Sequence[Fault], *, nodes: int, max_workers: int, last_step: int, apart: bool, host_silence_s: float
) -> None:
    """Check a plan against the cluster and the run that it is for. Raises ConfigError for the first mistake."""
    here = nodes
    for fault in faults:
        line = f"{fault.when}: {fault.what}"
        if KINDS[fault.kind].apart and not apart:
            raise ConfigError(f"fault '{line}' takes hosts apart: drill.hosts=apart")
        if fault.at_step is not None and fault.at_step >= last_step:
            raise ConfigError(f"fault '{line}' would never be due: the run ends with step {last_step}")
        if fault.with_ranks is not None and not 1 <= fault.with_ranks <= max_workers:
            raise ConfigError(f"fault '{line}' would never be due: cluster.max_workers={max_workers}")
        if fault.rank is not None and fault.rank >= max_workers:
            raise ConfigError(f"fault '{line}' names a rank beyond cluster.max_workers={max_workers}")
        if fault.node is not None and fault.node >= here:
            raise ConfigError(f"fault '{line}' names a node that is not there: {here} are up by then, numbered from 0")
        if KINDS[fault.kind].victim == NODE and here == 0:
            raise ConfigError(f"fault '{line}' has no node left to befall")
        here += fault.nodes(host_silence_s)


def draw_faults(wanted: RandomFaults) -> list[Fault]:
    """A random plan. Never fewer nodes than `least_nodes`, never more than `most_nodes`. Raises ConfigError."""
    named = [(parse_faults(text), weight) for text, weight in wanted.kinds.items()]
    choices = [each for each in named if wanted.apart or not any(KINDS[fault.kind].apart for fault in each[0])]
    if not choices or not all(weight > 0 for _, weight in choices):
        raise ConfigError(f"drill.kinds={dict(wanted.kinds)} must name faults, each with a weight above 0")
    for name, number, why in (("faults", wanted.count, ""), ("first_step", wanted.first_step, ": steps count from 1")):
        if number < 1:
            raise ConfigError(f"drill.{name}={number} must be 1 or more{why}")
    low, high = wanted.every_steps
    if not 1 <= low <= high:
        raise ConfigError(f"drill.every_steps=[{low}, {high}] must be two numbers of steps, the smaller one first")
    dice = random.Random(wanted.seed)  # of it, only random() is promised to stay the same
    faults: list[Fault] = []
    step, here = wanted.first_step, wanted.nodes
    while len(faults) < wanted.count:
        possible = [
            (each, weight)
            for each, weight in choices
            if wanted.least_nodes <= here + _nodes(each, wanted) <= wanted.most_nodes
            and all(may_befall(fault, here * wanted.workers_on_node) for fault in each)
            and all(here >= KINDS[fault.kind].least_nodes for fault in each)
        ]
        if not possible:
            raise ConfigError(
                f"drill.kinds has no fault that keeps {here} nodes between {wanted.least_nodes} and {wanted.most_nodes}"
            )
        sums = list(accumulate(weight for _, weight in possible))
        chosen, _ = possible[bisect_right(sums, dice.random() * sums[-1], hi=len(sums) - 1)]
        faults += [replace(chosen[0], at_step=step), *chosen[1:]]
        here += _nodes(chosen, wanted)
        step += low + int(dice.random() * (high - low + 1))
    return faults[: wanted.count]


def may_befall(fault: Fault, ranks: int) -> bool:
    """Whether a group of so many ranks is one that the fault is for; `replicas` of the model share them evenly."""
    options = KINDS[fault.kind].options
    replicas = int(fault.option("replicas") or 1) if "replicas" in options else 1
    return ranks >= KINDS[fault.kind].ranks and ranks % replicas == 0


def to_json(faults: Sequence[Fault], *, seed: int) -> bytes:
    """The content of plan.json."""
    return json.dumps({"seed": seed, "plan": plan_lines(faults)}, indent=1).encode() + b"\n"


def from_json(content: bytes, source: str) -> tuple[list[Fault], int]:
    """The faults and the seed of a plan.json. Raises ConfigError."""
    try:
        plan = json.loads(content)
        if not isinstance(plan["plan"], list):
            raise TypeError("its plan is no list")
        return parse_plan(plan["plan"]), int(plan["seed"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{source} is not a plan that a drill wrote: {error}") from error


def _parse_fault(words: Sequence[str], text: str) -> Fault:
    kind, given = words[0] if words else "", words[1:]
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}"
        raise ConfigError(f"fault {text!r}: no kind of fault is called {kind!r}; {hint}")
    spec = KINDS[kind]
    victims = {WORKER: ["rank"], NODE: ["node", "rank"], "": []}[spec.victim]
    numbers: dict[str, float] = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not equals or key not in [*victims, *spec.options]:
            allowed = ", ".join([*victims, *spec.options]) or "nothing"
            raise ConfigError(f"fault {text!r}: {kind} takes {allowed}, not {word!r}")
        try:
            numbers[key] = float(value)
            if not math.isfinite(numbers[key]):
                raise ValueError
        except ValueError:
            raise ConfigError(f"fault {text!r}: {key}={value} is not a finite number") from None
        if numbers[key] < 0 or (key in victims and numbers[key] % 1):
            raise ConfigError(
                f"fault {text!r}: {key}={value} must be {'a whole number' if key in victims else '0 or more'}"
            )
    if "share" in numbers and not 0 < numbers["share"] < 1:
        raise ConfigError(f"fault {text!r}: share={numbers['share']:g} must be above 0 and below 1")
    if len(numbers.keys() & {"rank", "node"}) == 2:
        raise ConfigError(f"fault {text!r}: give rank or node, not both")
    rank, node = (int(numbers.pop(key)) if key in numbers else None for key in ("rank", "node"))
    return Fault(kind, rank=rank, node=node, options=numbers)


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _in_order(faults: Sequence[Fault]) -> None:
    last = 0
    for fault in faults:
        if fault.at_step is not None and fault.at_step < max(1, last):
            raise ConfigError(
                f"fault '{fault.when}: {fault.what}' stands behind one at step {last}; steps count from 1, "
                "and a plan is in the order of its steps"
            )
        last = fault.at_step or last


def _nodes(faults: Sequence[Fault], wanted: RandomFaults) -> int:
    return sum(fault.nodes(wanted.host_silence_s) for fault in faults)
