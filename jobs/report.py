"""Write a run's report again, or compare several: `python -m jobs.report RUN [RUN ...] [--json] [--out FILE]`."""

import argparse
import json
import sys

from rich.console import Console

from regrow.program import program
from regrow.record.run_folder import run_config
from regrow.show.compare import as_json, as_table, load_runs
from regrow.show.report import make_report, write_report
from regrow.show.units import or_dash, percent
from regrow.storage import Storage, split_location


@program()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="<run.storage_path>/<run.name>, a local path or a URI")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and write nothing by default")
    parser.add_argument(
        "--out",
        help="of one run: write only the page (or, FILE.json, the figures) to FILE, a path or a URI, not into its "
        "folder; of several: the figures to FILE.json",
    )
    options = parser.parse_args()
    if len(options.runs) > 1 and options.out and not is_json(options.out):
        parser.error(f"--out {options.out}: a comparison is a table and JSON; name a file that ends in .json")
    report(options) if len(options.runs) == 1 else compare(options)


def report(options: argparse.Namespace) -> None:
    storage, out = Storage.at(options.runs[0]), options.out
    config = run_config(storage)
    if out is None and not options.json:
        figures, where = write_report(storage, config), str(storage / "report.html")
    else:
        figures, content = make_report(storage, config)
        where = out or ""
        if out:
            write(out, content["report.json" if is_json(out) else "report.html"])
    if options.json:
        print(json.dumps(figures, indent=2, allow_nan=False))
        return
    print(
        f"{figures['steps']} steps, loss {or_dash(figures['final_loss'], '{:.4f}'.format)}, {figures['wall_s']:.1f} s, "
        f"goodput {or_dash(figures['goodput'], percent)}, effective {or_dash(figures['effective'], percent)}, paid "
        f"{or_dash(figures['paid'], percent)}, {sum(figures['restarts'].values())} restarts: {where}"
    )


def compare(options: argparse.Namespace) -> None:
    runs = load_runs(options.runs)
    if options.out:
        write(options.out, as_json(runs).encode() + b"\n")
    if options.json:
        print(as_json(runs))
    else:
        Console(width=None if sys.stdout.isatty() else 60 + 28 * len(runs), highlight=False).print(as_table(runs))


def is_json(out: str) -> bool:
    return split_location(out)[1].endswith(".json")


def write(out: str, data: bytes) -> None:
    folder, name = split_location(out)
    Storage.at(folder or ".").write_bytes(name, data)


if __name__ == "__main__":
    main()
