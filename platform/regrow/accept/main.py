"""What `jobs.accept` does: find out what is here, run what can be run, show the table, write accept.json."""

import difflib
import json
import sys
import time
from collections.abc import Sequence

from regrow.accept.arguments import Options
from regrow.accept.catalog import CHECKS, NEXT
from regrow.accept.claims import Check, Finding, Part
from regrow.accept.report import describe, show, to_lines, write_json
from regrow.accept.runner import Machine, Outcome, look_at, run_checks
from regrow.errors import ConfigError

SPARE_MINUTES = 0.5  # of a part, for looking at the machine and for the last check to be ended


def accept(options: Options, arguments: Sequence[str]) -> int:
    """Run the checks; the exit status. Raises ConfigError for a claim that there is not."""
    checks, skipped = chosen(options), {}
    began, machine = time.monotonic(), look_at(options.gpus)
    print(f"{describe(machine)}; torch {machine.torch or 'none'}", flush=True)
    for part in Part:
        if why := why_skipped(part, options, machine):
            skipped[part] = why
    outcome, running = Outcome(), dict[str, str]()

    def tell(now: str, found: list[Finding]) -> None:
        if now:
            running["now"] = now
            print(now, flush=True)
            return
        write_json(options.out, outcome.findings, machine, arguments=arguments)
        lines = to_lines(found) if running.pop("now", "") else []
        print("\n".join(lines) + "\n" if lines else "", end="", flush=True)

    environment = {
        "REGROW_ACCEPT_MODEL": options.model,
        "REGROW_ACCEPT_PRETRAIN": json.dumps(options.pretrain),
        "REGROW_ACCEPT_GPUS": str(options.gpus or 0),
    }
    run_checks(
        checks,
        machine,
        minutes=options.minutes - SPARE_MINUTES,
        tell=tell,
        environment=environment,
        skipped=skipped,
        outcome=outcome,
    )
    path = write_json(options.out, outcome.findings, machine, arguments=arguments)
    show(outcome.findings)
    print(NEXT)
    print(f"{path}; {time.monotonic() - began:.0f} s")
    for broke in outcome.broke:
        print(f"a check itself broke, {broke}", file=sys.stderr)
    return 1 if outcome.broke else 0


def chosen(options: Options) -> list[Check]:
    """The checks of the claims that are wanted, with the claims of theirs that are. Raises ConfigError."""
    known = [claim.name for check in CHECKS for claim in check.claims]
    for name in options.only:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; there are {', '.join(known)}"
            raise ConfigError(f"accept.only={name} is no claim{hint}")
    return [check for check in CHECKS if not options.only or any(each.name in options.only for each in check.claims)]


def why_skipped(part: Part, options: Options, machine: Machine) -> str:
    """Why a part is not run; empty where it is. What one machine shows is not asked for where a cluster is."""
    if options.parts:
        return "" if part in options.parts else f"not among accept.parts={','.join(options.parts)}"
    if part is Part.cluster:
        return "needs a Ray cluster: +cluster=NAME"
    if part is Part.no_gpu and machine.gpus and not options.only:
        return "there are GPUs here; accept.parts=no_gpu runs it"
    return ""
