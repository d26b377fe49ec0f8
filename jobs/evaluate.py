"""Evaluate a checkpoint with lm-evaluation-harness: `python -m jobs.evaluate RUN_FOLDER_OR_EXPORT [--tasks A,B]`."""

import argparse
import sys
from contextlib import ExitStack
from functools import partial

from regrow.config.schema import Dtype
from regrow.evaluate import catalog, results
from regrow.program import program
from regrow.progress import Task
from regrow.show.console import Console
from regrow.storage import Storage


@program()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.evaluate", description=__doc__)
    parser.add_argument(
        "model", nargs="?", metavar="RUN_FOLDER_OR_EXPORT", help="a run's folder, or an exported model's"
    )
    parser.add_argument("--tasks", metavar="A,B", help="names, patterns or YAML files; default: the shipped ones")
    parser.add_argument("--list", action="store_true", help="name the tasks that come with regrow, and end")
    parser.add_argument("--step", type=int, metavar="N", help="of a run; default: the newest sound checkpoint")
    parser.add_argument("--corpus", metavar="FOLDER", help="a prepared one, for the corpus tasks; default: the run's")
    parser.add_argument("--limit", type=partial(natural, least=1), metavar="N", help="of each task's examples")
    parser.add_argument("--num-fewshot", type=natural, metavar="N", help="examples in the prompt; default: the task's")
    parser.add_argument("--batch-size", type=batch_size, metavar="N|auto", help="default: by the size of the logits")
    parser.add_argument("--device", help="as cpu or cuda:1; default: cuda where there is any")
    parser.add_argument("--dtype", type=Dtype, choices=list(Dtype), help="default: float32, or the export's own")
    parser.add_argument("--out", metavar="FOLDER", help="for results.json; default: <run>/evaluations/step-XXXXXXXX")
    options = parser.parse_args()
    if options.model is None and not options.list:
        parser.error("name a run's folder or an exported model's")
    print("\n".join(catalog.lines() if options.list else evaluate(options)))


def evaluate(options: argparse.Namespace) -> list[str]:
    from regrow.evaluate import harness

    names = options.tasks.split(",") if options.tasks else []
    harness.set_up(names)
    from regrow.evaluate.source import find_source  # torch, which takes seconds

    source = find_source(options.model, step=options.step, corpus=options.corpus)
    folder = source.results(options.limit) if options.out is None else Storage.at(options.out)
    results.earlier_results(folder, source.describe())
    results.check_writable(folder)
    names = names or harness.usual_tasks(source.corpora)
    step = "" if source.step is None else f", step {source.step}"
    settings = harness.Settings(options.limit, options.num_fewshot, options.batch_size, options.device, options.dtype)
    with ExitStack() as left:
        with Console(sys.stderr) as console:  # what follows has lm_eval's own progress
            console.message(f"evaluating {source.folder}{step}: {', '.join(names)}")
            tasks = harness.load_tasks(names, source.corpora)
            export = source.model_folder(options.dtype, partial(console.counter, Task("exporting", "B")))
            exported = left.enter_context(export)
        found = harness.evaluate(exported, tasks, settings)
    results.write_results(folder, source.describe(), found)
    return [f"{source.folder}{step}", "", *results.table(found), "", f"written to {folder / results.RESULTS}"]


def natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not {least} or more")
    return int(text)


def batch_size(text: str) -> str:
    return text if text == "auto" else str(natural(text, least=1))


if __name__ == "__main__":
    main()
