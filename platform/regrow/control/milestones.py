"""Which checkpoints, of steps at multiples of `checkpoint.keep_every_steps`, were to be kept and are passed over."""

from regrow.control.commands import Outbox
from regrow.control.read_back import StoredSteps
from regrow.control.upload import Upload
from regrow.control.values import NOTHING


class Milestones:
    """Says of each that will never be in storage why."""

    def __init__(self, every_steps: int, steps: StoredSteps, out: Outbox) -> None:
        """`every_steps`: 0 where none is kept for good."""
        self._every_steps, self._steps, self._out = every_steps, steps, out
        self._looked: int | None = None  # up to this step; None: at none of this job's yet
        self._written = NOTHING  # the one that was being written then

    def look(self, step: int, upload: Upload | None, problem: str) -> None:
        """`step` is the newest that is committed in memory: of those before it none is begun any more. `upload`: what
        is being written; `problem`: of the newest checkpoint that was begun, where it failed."""
        if not self._every_steps:
            return
        writing = NOTHING if upload is None else upload.version.step
        if self._written != writing:
            if self._written < step:  # else it comes once more
                self._look_at(self._written, problem)
            self._written = NOTHING
        looked = min(step if self._looked is None else self._looked, step)  # a run goes back
        for milestone in range(looked // self._every_steps * self._every_steps, step, self._every_steps):
            if milestone <= looked:
                continue
            if milestone == writing:
                self._written = milestone
            else:
                busy = f"that of step {writing} was still being written" if writing != NOTHING else ""
                self._look_at(milestone, busy or problem or "its snapshot was not committed in memory")
        self._looked = max(looked, step - 1)

    def _look_at(self, milestone: int, why: str) -> None:
        if milestone != NOTHING and not self._steps.has(milestone):
            text = f"the checkpoint of step {milestone} was to be kept for good, and is not in storage: {why}"
            self._out.record("note", text=text)
