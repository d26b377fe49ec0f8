"""Write a run's report again, or compare several: `python -m jobs.report RUN [RUN ...] [--out FILE]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from regrow.errors import RegrowError
from regrow.show.comparison import load_runs, make_comparison
from regrow.show.report import make_report, write_report
from regrow.show.status_folder import run_config
from regrow.storage import Storage

COMPARISON = Path("comparison.html")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="<run.storage_path>/<run.name>, a local path or a URI")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"write only the page (or, FILE.json, the figures) to FILE; default: into the folder of a run, "
        f"of several to ./{COMPARISON}",
    )
    options = parser.parse_args()
    try:
        if len(options.runs) == 1:
            report(options.runs[0], options.out)
        else:
            compare(options.runs, options.out or COMPARISON)
    except (RegrowError, OSError) as error:
        sys.exit(f"error: {error}")


def report(run_folder: str, out: Path | None) -> None:
    storage = Storage.at(run_folder)
    config = run_config(storage)
    if out is None:
        figures = write_report(storage, config)
        where = f"{storage}/report.html"
    else:
        figures, content = make_report(storage, config)
        write(out, content["report.json" if out.suffix == ".json" else "report.html"])
        where = str(out)
    goodput, loss = figures["goodput"], figures["final_loss"]
    print(
        f"{figures['steps']} steps, loss {'-' if loss is None else f'{loss:.4f}'}, {figures['wall_s']:.1f} s, "
        f"goodput {'-' if goodput is None else f'{goodput:.1%}'}, {sum(figures['restarts'].values())} restarts: {where}"
    )


def compare(run_folders: Sequence[str], out: Path) -> None:
    runs = load_runs(run_folders)
    write(out, make_comparison(runs)[".json" if out.suffix == ".json" else ".html"])
    print(f"{len(runs)} runs compared: {out}")


def write(out: Path, data: bytes) -> None:
    Storage.at(out.absolute().parent).write_bytes(out.name, data)


if __name__ == "__main__":
    main()
