"""What a run does now: `python -m jobs.status RUN [--watch] [--json]`."""

import argparse
import math
from collections.abc import Callable

from regrow.config.schema import SubmitConfig
from regrow.errors import ClusterError
from regrow.program import program
from regrow.record.log import LogReader
from regrow.record.run_folder import find_run, read_status
from regrow.record.status import Status
from regrow.show.status import show

RUN = """a run folder (<run.storage_path>/<run.name>, a path or a URI), the name of one below runs/, the address of a
Ray cluster's dashboard (http://HOST:8265, or auto), or rayjob/NAME on Kubernetes"""


@program()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.status", description=__doc__)
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--watch", action="store_true", help="look again and again, until the run has ended")
    parser.add_argument("--every", type=float, metavar="S", help="seconds between looks (default: 2, of a cluster 15)")
    parser.add_argument("--json", action="store_true", help="a line of JSON instead, with --watch one for each look")
    parser.add_argument("--name", metavar="NAME", help="on a Ray cluster: of the run (default: the newest one)")
    parser.add_argument("--namespace", default=SubmitConfig().namespace, help="of Kubernetes (default: %(default)s)")
    parser.add_argument("--context", help="kubectl's (default: its current one)")
    options = parser.parse_args()
    if options.every is not None and not 0 < options.every < math.inf:
        parser.error("--every takes a number of seconds above 0")
    look, every_s = source(options)
    every_s = every_s if options.every is None else options.every
    show(look, watch=options.watch, every_s=every_s, as_json=options.json)


def source(options: argparse.Namespace) -> tuple[Callable[[], Status], float]:
    """How to look at the run, and how often."""
    run = options.run
    if run.startswith("rayjob/"):
        from regrow.submit.job_status import on_kubernetes  # hydra, which the others do without

        return on_kubernetes(run.partition("/")[2], namespace=options.namespace, context=options.context), 15.0
    if run == "auto" or run.startswith(("http://", "https://")):
        from regrow.submit.job_status import on_ray

        return on_ray(run, run=options.name), 15.0
    if run.startswith("ray://"):
        raise ClusterError(f"{run} is a Ray Client's address; name the dashboard's, http://HOST:8265")
    storage = find_run(run)
    log = LogReader(storage)
    return lambda: read_status(storage, log=log), 2.0


if __name__ == "__main__":
    main()
