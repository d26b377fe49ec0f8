"""Look after runs' checkpoints: `python -m jobs.checkpoint list|inspect|verify|diff|export|average|import ...`."""

import argparse
import signal
import sys
from functools import partial

from regrow.config.schema import Dtype
from regrow.program import program
from regrow.progress import Task
from regrow.runtime.interrupts import terminable
from regrow.show.console import Console
from regrow.state.commands import COMMANDS


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return value


@program()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, (run, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, command=name)
        if name == "import":
            command.add_argument("--from", dest="source", required=True, metavar="FOLDER")
            command.add_argument(
                "--moments",
                type=Dtype,
                choices=list(Dtype),
                default=Dtype.float32,
                help="of weights alone: as optim.moments will be",
            )
            command.add_argument("--model", metavar="NAME", help="of torchtitan and megatron: a file of conf/model")
            command.add_argument(
                "--global-batch-seqs",
                type=positive,
                metavar="N",
                help="of torchtitan: its training.global_batch_size",
            )
            command.add_argument("--seq-len", type=positive, metavar="T", help="of torchtitan: its training.seq_len")
        else:
            command.add_argument("run_folder", help="<run.storage_path>/<run.name>, a path or a URI")
        if name == "diff":
            command.add_argument("other", nargs="?", metavar="run_folder_b", help="left out: two --step of one run")
            command.add_argument("--step", type=int, nargs="+", metavar="N", help="one for both, or one for each")
        if name in ("inspect", "verify", "export"):
            default = "all" if name == "verify" else "the newest sound one"
            command.add_argument("--step", type=int, metavar="N", help=f"default: {default}")
        if name == "inspect":
            command.add_argument("--stats", action="store_true", help="of every tensor: norm, largest, not finite")
        if name == "average":
            which = command.add_mutually_exclusive_group(required=True)
            which.add_argument("--step", type=int, nargs="+", metavar="N", help="of these steps")
            which.add_argument("--last", type=int, metavar="K", help="of the newest K sound ones")
        if name in ("export", "import", "average"):
            where = "a new one" if name == "export" else "of the new run: <run.storage_path>/<run.name>"
            command.add_argument("--to", required=True, metavar="FOLDER", help=where)
        if name in ("export", "import"):
            forms = ["hf", "torchtitan", *["megatron"] * (name == "import"), "dcp"]
            command.add_argument("--format", choices=forms, required=True)
        if name == "export":
            dtypes = list(Dtype)
            command.add_argument("--dtype", type=Dtype, choices=dtypes, default=Dtype.float32, help="of hf's weights")
    options = parser.parse_args()
    with terminable(SystemExit, 128 + signal.SIGTERM), Console(sys.stderr) as console:
        status = options.run(options, partial(console.counter, Task(options.command, "B")))
    sys.exit(status)


if __name__ == "__main__":
    main()
