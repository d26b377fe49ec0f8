"""A run that is over as another job of it begins: what the one before has left undone is done.

A job whose driver dies behind its last COMMIT leaves a log without an end, and one that ends while old checkpoints are
still being deleted leaves some of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regrow.config.schema import PretrainConfig
from regrow.control.read_back import OLDER_STAY, StoredSteps
from regrow.errors import RegrowError, first_line
from regrow.record.claim import Claim
from regrow.record.events import Note, Stopped, Submitted, from_row
from regrow.record.lock import is_held, lock_run
from regrow.record.log import RunLog, newest_row, positive, read_events
from regrow.record.run_folder import CHECKPOINTS, read_status
from regrow.record.status import GONE_S, START_SILENCE_S, State, Status
from regrow.runtime.run_folder import Run
from regrow.show.report import write_report
from regrow.state.disk.catalog import committed_steps, has_old, try_retain
from regrow.storage import Storage

Events = Sequence[Mapping[str, Any]]

UNREAD = "the checkpoint of step {} was not read back before its job ended without a word: " + OLDER_STAY


def end_again(config: PretrainConfig, run: Run, tell: Callable[[str], object]) -> None:
    """Of a run whose last step is committed: give the log its end, and the report, where the job before had not; and
    delete the old checkpoints that it was still deleting. What was done, or is left, is told.

    Nothing is done to a run that another process writes, or that was heard of so lately that one may; nor to one whose
    job ended half-way.
    """
    try:
        events = _newest_job(run.folder)
        if not events:
            return
        submitted = from_row(events[0])
        held = is_held(run.folder, submitted if isinstance(submitted, Submitted) else None)
        status = read_status(run.folder)
        if held or _may_live(status, held) or not _is_left(config, run, events, status):
            return
        lock = lock_run(run.folder, tell)
        try:
            if _newest_job(run.folder) != events:  # another job has come before this one
                return
            claim = Claim.take(run.folder)
            if _has_no_end(events):
                _write_end(config, run, claim, events, status)
                tell("the job before this one ended without a word: the run's log and its report have their end now")
            if (apart := _apart(config, run, events)) is not None:
                found = try_retain(run.folder / CHECKPOINTS, **_kept(config), apart=apart, run_id=run.run_id)
                if found:
                    tell(found)
        finally:
            if lock is not None:
                lock.close()
    except (OSError, RegrowError) as error:
        tell(f"what the job before this one left undone stays so: {first_line(error)}")


def _newest_job(folder: Storage) -> Events:
    """Its events; none where no job has begun."""
    events = read_events(folder)
    begins = [number for number, event in enumerate(events) if event["event"] == "submitted"]
    return events[begins[-1] :] if begins else []


def _is_left(config: PretrainConfig, run: Run, events: Events, status: Status) -> bool:
    """Whether there is something to do, as far as a quick look tells."""
    if _has_no_end(events):  # the config in the folder, which `status` is of, is that job's
        return status.step == run.resumed_step == status.last_step
    apart = _apart(config, run, events)
    return apart is not None and has_old(run.folder / CHECKPOINTS, **_kept(config), apart=apart)


def _may_live(status: Status, held: bool | None) -> bool:
    """Whether the job before was heard of so lately that it, or the coordinator that it starts anew, may go on."""
    silent_s = time.time() - (status.heard_at or 0.0)
    may_do_something = not status.state.over and status.state is not State.silent
    return may_do_something or silent_s <= (GONE_S if held is False else START_SILENCE_S)


def _has_no_end(events: Events) -> bool:
    return bool(events) and all(event["event"] != "stopped" for event in events)


def _kept(config: PretrainConfig) -> dict[str, int]:
    return {"keep": config.checkpoint.keep, "keep_every_steps": config.checkpoint.keep_every_steps}


def _write_end(config: PretrainConfig, run: Run, claim: Claim, events: Events, status: Status) -> None:
    """As of when the job was heard last: what came since is no time of the run. Raises OSError and Superseded."""
    step = status.step
    heard_at = max(positive(row.get("time")) for row in (*events, newest_row(run.folder) or {}))
    reason = "finished" if step == status.steps else "stop_at_step"
    with RunLog(run.folder, claim=claim) as log:
        log.event(Note(time=heard_at, text=UNREAD.format(step)))
        log.event(Stopped(time=heard_at, step=step, reason=reason))
    write_report(run.folder, config)


def _apart(config: PretrainConfig, run: Run, events: Events) -> set[int] | None:
    """Steps that no other one is deleted for, and that are not deleted: the newest, unless the job before has read it
    back, and the newest whose state is verified, where units verify each other. None: nothing is to be deleted."""
    steps = committed_steps(run.folder / CHECKPOINTS)
    newest = next((event for event in reversed(events) if event["event"] == "checkpoint"), {})
    stays = any(event["event"] == "note" and event["text"].endswith(OLDER_STAY) for event in events)
    is_read = newest.get("step") in steps[:1] and events[-1]["event"] == "stopped" and not stays
    unread = set() if is_read else set(steps[:1])
    if (verified := newest.get("verified_step")) is None:
        return unread
    stored = StoredSteps(steps, verified)
    stored.keep, stored.compared = config.checkpoint.keep, True
    return None if stored.spared is None else unread | {stored.spared}
