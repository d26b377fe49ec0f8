"""Planned maintenance of a running group: `python -m jobs.drain RUN NODE...`, one node after another, no step lost.

The group leaves a node at a step's end, with a committed snapshot, and goes on with a spare where one is ready. The
next node is asked for once the group is whole again, or no more workers come. A node stays out of service until
`--undrain`; with `--each COMMAND` it is back once that has ended with 0.
"""

import argparse
import json
import math
import sys
from typing import Any

from regrow.errors import RegrowError
from regrow.program import program
from regrow.record.run_folder import find_run

NODE = "the beginning of a node's id, its host name or address, or all; without one, the nodes that there are"


@program()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.drain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, a path or a URI, or the name of one below runs/")
    parser.add_argument("nodes", nargs="*", metavar="NODE", help=NODE)
    parser.add_argument("--each", metavar="COMMAND", help="for each node that is out: run this, then put the node back")
    parser.add_argument("--undrain", action="store_true", help="put nodes back into service that were drained before")
    parser.add_argument(
        "--patience", type=float, default=15.0, metavar="S", help="without a new worker: no more come (default: 15)"
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of the run's Ray cluster (default: as the run's log says)"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for all that happens")
    options = parser.parse_intermixed_args()  # nodes may stand behind options
    if options.each is not None and options.undrain:
        parser.error("--each and --undrain exclude one another")
    if options.run.startswith(("http://", "https://", "ray://", "rayjob/")):
        parser.error("RUN is a run folder: name it on a node of the run's Ray cluster, in a pod of it on Kubernetes")
    if not 0 < options.patience < math.inf:
        parser.error("--patience takes a number of seconds above 0")
    sys.exit(_drain(options))  # Ctrl-C beforehand: nothing was asked for


def _drain(options: argparse.Namespace) -> int:
    from ray.exceptions import RayError  # for which --help need not wait

    from regrow.runtime import maintenance as m

    def tell(what: str, text: str, fields: dict[str, Any]) -> None:
        print(json.dumps({"event": what, **fields, "text": text}) if options.json else text, flush=True)

    with m.attached(find_run(options.run), options.address) as coordinator:
        view = coordinator.maintenance()
        known = [node for node in view.nodes if node.asked or not options.undrain]
        if not options.nodes:
            for node in known:
                tell("node", m.describe([node]), vars(node))
            return 0
        if not options.undrain:  # `all` are those with workers
            known = [node for node in known if node.ranks or node.waiting or options.nodes != [m.ALL]]
        else:  # those that have died since are in service again by themselves
            known += view.gone
        nodes, rolling = m.find_nodes(options.nodes, known), m.Rolling(coordinator, tell, options.patience)
        try:
            if options.undrain:
                rolling.give_back(nodes)
            else:
                rolling.drain(nodes, m.run_for(options.each) if options.each else None)
        except (KeyboardInterrupt, RegrowError, RayError) as error:  # Ray: the coordinator has died, or hangs
            tell("left", *m.left(rolling, nodes, options.run, undrain=options.undrain))
            if not isinstance(error, KeyboardInterrupt):
                raise
            return 130
        tell("done", *m.left(rolling, nodes, options.run, undrain=options.undrain))
    return 0


if __name__ == "__main__":
    main()
