"""From a drill's run folder to its verdict: on the console, in verdict.json, drill.html and timeline.svg."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from regrow.config.schema import DrillJobConfig
from regrow.config.snapshots import fixed_every_steps, most_steps_lost
from regrow.data.read.batch import direct_batches, layout_of
from regrow.data.read.corpora import find_corpora, order_of
from regrow.drill.faults import LOOK, Fault
from regrow.drill.log import RunFollower
from regrow.drill.verdict import Checkpoint, Evidence, Verdict, judge, outcomes
from regrow.errors import CheckpointError
from regrow.record.events import Row
from regrow.record.history import History
from regrow.record.ledger import Ledger
from regrow.record.log import METRICS, Tail
from regrow.record.run_folder import checkpoints_of
from regrow.record.work import RATIOS
from regrow.show.console import Console
from regrow.show.page import drill_page
from regrow.show.report import write_report
from regrow.show.timeline import Mark, draw_timeline
from regrow.show.units import or_dash, percent
from regrow.state.disk import catalog as tools
from regrow.storage import Storage


def gather(
    config: DrillJobConfig,
    folder: Path,
    plan: Sequence[Fault],
    records: list[Row],
    reference: Sequence[Row],
    last_step: int,
    console: Console,
) -> Evidence:
    """Everything that the verdict needs: computes every batch anew, reads every byte of every checkpoint."""
    watch = RunFollower(folder)
    watch.poll()
    rows, _ = Tail(folder / METRICS).read()  # as they stand there, none left out but torn ones
    checkpoints, run_id = checkpoints_of(str(folder))
    found = []
    try:
        found = list(tools.examine(checkpoints, run_id, None, lambda total: lambda done: None))
    except CheckpointError:
        console.message("there is no checkpoint to check")
    keys = [name for each in found if each.index for name in each.index.tensors]
    in_memory = [f"memory/{name}" for record in records for name in record.get("memory") or []]
    ledger = _ledger(rows, watch.events)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "drill_logs" not in path.parts)
    return Evidence(
        rows=rows,
        events=watch.events,
        records=records,
        num_faults=len(plan),
        last_step=last_step,
        most_lost=most_steps_lost(config.snapshot),
        bound="snapshot.most_steps_lost" if fixed_every_steps(config.snapshot) is None else "snapshot.every_steps",
        copies=config.snapshot.copies,
        verify_every=config.cluster.verify_every_steps,
        seqs_per_step=config.optim.global_batch_seqs,
        tokens_per_step=config.optim.global_batch_seqs * config.data.seq_len,
        digests=expected_digests(config, max((row["step"] for row in rows), default=0), console),
        reference=reference,
        compared_steps=config.drill.compared_steps,
        names=[*names, *in_memory],
        keys=keys,
        checkpoints=[
            Checkpoint(
                each.step, int(each.index.scalars["cursor"]) if each.index else None, each.problem, each.committed
            )
            for each in found
        ],
        report=write_report(Storage.at(folder), config),
        bands=ledger.bands,
    )


def expected_digests(config: DrillJobConfig, num_steps: int, console: Console) -> list[str]:
    """What a run's batches must be, from the order and the shards alone."""
    corpora = find_corpora(config, progress=console.progress)
    layout = layout_of(config)
    batches = direct_batches(
        order_of(config, corpora),
        corpora.reader("train", retry_s=None),
        layout,
        slices=range(layout.num_slices),
        start_step=0,
        stop_step=num_steps,
    )
    return [f"{batch.digest():016x}" for batch in batches] if num_steps else []


def conclude(config: DrillJobConfig, folder: Path, evidence: Evidence) -> bool:
    """Show the verdict and write it, with the picture; whether nothing speaks against any promise."""
    verdicts = judge(evidence)
    found = outcomes(evidence.records, evidence.rows, evidence.events)
    effects = [each for each in found if each.what != LOOK]
    good = all(each.holds is not False for each in verdicts)
    content = {
        "plan": config.drill.name,
        "holds": good,
        "ratios": {name: evidence.report.get(name) for name in RATIOS},
        "verdicts": [asdict(each) for each in verdicts],
        "faults": [asdict(each) for each in effects],
    }
    (folder / "verdict.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    marks = [
        Mark(each.time, each.what, None if each.seconds is None else each.time + each.seconds, each.number, each.grows)
        for each in effects
    ]
    title = f"{config.drill.name}: {len(effects)} fault{'' if len(effects) == 1 else 's'}"
    picture = draw_timeline(_ledger(evidence.rows, evidence.events), evidence.rows, marks, title=title, noun="fault")
    (folder / "timeline.svg").write_text(picture)
    (folder / "drill.html").write_text(drill_page(config.run.name, content, evidence.report, picture))
    _show(verdicts, good)
    print(", ".join(f"{name} {or_dash(evidence.report.get(name), percent)}" for name in RATIOS))
    print(f"{folder}/drill.html, timeline.svg, verdict.json, drill.jsonl")
    return good


def _ledger(rows: Sequence[Row], events: Sequence[Row]) -> Ledger:
    return History.of_logs(rows, events).ledger(max((each["time"] for each in events), default=0.0))


def _show(verdicts: Sequence[Verdict], good: bool) -> None:
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for name in ("", "promise", "figures"):
        table.add_column(name, overflow="fold")
    words = {True: ("holds", "green"), False: ("BROKEN", "bold red"), None: ("not judged", "yellow")}
    for verdict in verdicts:
        word, style = words[verdict.holds]
        claim = f"{verdict.promise}. {verdict.claim}" if verdict.promise else verdict.claim
        table.add_row(Text(word, style), Text(claim), Text("\n".join([verdict.figures, *verdict.details])))
    console = RichConsole(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(Text("every promise held" if good else "a promise was broken", "green" if good else "bold red"))
