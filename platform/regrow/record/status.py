"""What a run does now, as data: `status_logs` makes it of a run's logs, `status_text` says it. See docs/watching.md."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from regrow.record.log import encode


class State(StrEnum):
    starting = "starting"  # submitted; no group has trained since
    training = "training"
    regrouping = "regrouping"  # a group is to train with other ranks, or again
    stalled = "stalled"  # no step for long, though the run's coordinator is there
    silent = "silent"  # nothing was heard for long
    gone = "gone"  # nobody is there: it ended without a word
    unseen = "unseen"  # a job of a cluster over which its folder cannot be read; `detail` says why
    stopped = "stopped"  # in good order, before its last step
    finished = "finished"
    failed = "failed"

    @property
    def over(self) -> bool:
        """Nothing more comes unless somebody starts it again."""
        return self in (State.gone, State.stopped, State.finished, State.failed)


@dataclass(frozen=True)
class Interruption:
    """A group that ended, and what came of it. The last five are None as long as no other group trains."""

    time: float
    cause: str
    detail: str = ""
    ranks_before: int | None = None
    ranks_after: int | None = None
    back_s: float | None = None  # until another group was ready for its first step
    lost_steps: int | None = None
    source: str | None = None  # of the state that it went on from


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    step: int
    time: float
    num_bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Speed:
    """Medians over the newest steps of one generation."""

    tokens_per_s: float | None
    step_s: float
    mfu: float | None
    data_wait_share: float  # of the step
    snapshot_share: float


@dataclass(frozen=True)
class Status:
    """All times are unix seconds. What the logs do not tell is None."""

    run: str
    folder: str
    as_of: float
    state: State
    since: float | None = None
    detail: str = ""  # a sentence on the state
    heard_at: float | None = None  # the newest line of its logs
    submitted_at: float | None = None
    attempts: int = 0
    step: int = 0
    steps: int | None = None  # of the whole run
    stop_at_step: int | None = None
    tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    generation: int | None = None
    world_size: int | None = None  # of the newest group
    min_workers: int | None = None
    max_workers: int | None = None
    speed: Speed | None = None
    eta_s: float | None = None  # to the step where it ends, at its present pace
    goodput: float | None = None
    goodput_as_of: float | None = None
    checkpoints: list[Saved] = field(default_factory=list)  # newest first
    interruptions: list[Interruption] = field(default_factory=list)  # newest first
    causes: dict[str, int] = field(default_factory=dict)  # of all interruptions
    warnings: list[str] = field(default_factory=list)
    job: list[str] = field(default_factory=list)  # what Kubernetes or Ray say of its job, where they were asked

    @property
    def last_step(self) -> int | None:
        """Where this attempt ends."""
        steps = [step for step in (self.steps, self.stop_at_step) if step is not None]
        return min(steps, default=None)

    def to_json(self) -> str:
        """One line, without values that JSON does not have."""
        return encode(asdict(self)).decode().rstrip("\n")

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> "Status":
        """What `to_json` wrote, perhaps in another version. KeyError, TypeError or ValueError say that it is none."""
        given = {each.name: content[each.name] for each in fields(Status) if each.name in content}
        given["state"] = State(given["state"])
        given["speed"] = None if given.get("speed") is None else _made(Speed, given["speed"])
        given["checkpoints"] = [_made(Saved, each) for each in given.get("checkpoints", [])]
        given["interruptions"] = [_made(Interruption, each) for each in given.get("interruptions", [])]
        return Status(**given)


def _made(kind: Any, content: Mapping[str, Any]) -> Any:
    return kind(**{each.name: content[each.name] for each in fields(kind) if each.name in content})
