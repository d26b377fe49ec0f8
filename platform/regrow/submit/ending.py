"""How a run's driver ended, by its last lines: to Ray, a job that was asked to stop is STOPPED, whatever came of it."""

import re

LINES = 100  # of a log's end: behind the driver's own there may be Ray's
SILENT = (
    "error: the driver ended without a word, as one that is killed: submit.stop_s after it was asked to end, or before "
    "it had begun; jobs.status says which step is in storage"
)
_WELL = re.compile(r"stopped (at step \d+|before any) of \d+|finished \d+ steps|ended at once; all ")
_ILL = re.compile(r"error: |step \d+ is committed in memory|what is committed in memory is not known")
_TAKEN = re.compile(r"error: .*; ends with status 0, so that nothing starts it anew")
_UNBEGUN = "interrupted"  # and, where a run had begun, behind one of the others


def ending(log: str) -> tuple[int, str]:
    """By the log of a job that was stopped: 0 if all that its run had committed is in storage, else 1; and the line
    that says so."""
    lines = log.splitlines()[-LINES:]
    for line in reversed(lines):
        if _WELL.match(line) or _ILL.match(line):
            return (0 if _WELL.match(line) else 1), line
    return (0, _UNBEGUN) if _UNBEGUN in lines else (1, SILENT)


def taken_over(log: str) -> str:
    """Of a job that succeeded to Ray: the line that says that another one has its run, or empty."""
    return next((line for line in reversed(log.splitlines()[-LINES:]) if _TAKEN.match(line)), "")
