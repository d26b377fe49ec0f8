"""Write a run's report again: `python -m jobs.report <run folder or URI> [--out FILE]`."""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from regrow.errors import RegrowError
from regrow.observe.report import make_report, write_report
from regrow.storage import Storage


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.report", description=__doc__)
    parser.add_argument("run_folder", help="<run.storage_path>/<run.name>, a local path or a URI")
    parser.add_argument("--out", type=Path, help="write only the page (or, FILE.json, the figures) to FILE")
    arguments = parser.parse_args()
    try:
        report(arguments.run_folder, arguments.out)
    except (RegrowError, OSError) as error:
        sys.exit(f"error: {error}")


def report(run_folder: str, out: Path | None) -> None:
    storage = Storage.at(run_folder)
    names = storage.list()
    if not any(name.startswith(("events", "metrics")) and name.endswith(".jsonl") for name in names):
        raise RegrowError(f"{storage} holds no run: no events.jsonl; name the folder <run.storage_path>/<run.name>")
    config: dict[str, Any] = yaml.safe_load(storage.read_bytes("config.yaml")) if "config.yaml" in names else {}
    if out is None:
        figures = write_report(storage, config)
        where = f"{storage}/report.html"
    else:
        figures, content = make_report(storage, config)
        data = content["report.json" if out.suffix == ".json" else "report.html"]
        Storage.at(out.absolute().parent).write_bytes(out.name, data)
        where = str(out)
    goodput, loss = figures["goodput"], figures["final_loss"]
    print(
        f"{figures['steps']} steps, loss {'-' if loss is None else f'{loss:.4f}'}, {figures['wall_s']:.1f} s, "
        f"goodput {'-' if goodput is None else f'{goodput:.1%}'}, {sum(figures['restarts'].values())} restarts: {where}"
    )


if __name__ == "__main__":
    main()
