"""What data costs: preparing a corpus, streaming it through resizes, waiting for it while training.

    python benchmarks/data.py --source FOLDER --tokenizer FILE --out benchmarks/results/FILE.json [--quick]
                              [--peers-python PYTHON] [--only prepare|stream|job ...]

The source is a folder of parquet files with a column `text`. Peers run in the same run, in turn, each side in processes
of its own; figures are medians over the rounds.

prepare   tokens per CPU-second of the whole preparation on Ray over those of a bare `encode_batch` loop, on the source
          repeated until the loop takes four CPU-minutes, and how it scales with cores
stream    tokens per CPU-second from shards to tensors, the CPU time of all of Ray's processes counted, against a torch
          DataLoader over a memory-mapped array and MosaicML's StreamingDataset on the same rows (in the environment of
          --peers-python, which needs torch and mosaicml-streaming); stored bytes read over stored bytes; seconds to the
          first batch, cold and after a resize
job       the share of the default job's step time that waits for data
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import Result, run_side, summary, write_result  # noqa: E402

HERE = Path(__file__).parent
CPU_SECONDS = 240.0  # of the loop, at least: what starting costs is to be a small part, as in any real corpus
SEQ_LEN, ROWS = 2048, 16_384  # of the corpus that is streamed: 33.6M tokens
FIRST_STEPS = 1  # of the job that do not count: nothing can be ready for the first one


def shown(side: str, result: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: round(value, 3) for key, value in result.items() if isinstance(value, (int, float))}
    print(f"{side}: {json.dumps(numbers)}", flush=True)
    return result


def prepare_part(result: Result, source: Path, tokenizer: Path, work: Path, rounds: int, quick: bool) -> None:
    repeated = work / "source"
    repeated.mkdir()

    def side(name: str, cpus: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=work) as storage:
            arguments = [name, str(repeated), str(tokenizer), "--cpus", str(cpus), "--storage", storage]
            return shown(f"{name} on {cpus} cpus", run_side(str(HERE / "data_prepare.py"), *arguments))

    cores = os.cpu_count() or 1
    repeat(source, repeated, 1)
    times = 1 if quick else math.ceil(CPU_SECONDS / side("loop", cores)["cpu_s"])
    repeat(source, repeated, times)
    pairs = [(side("prepare", cores), side("loop", cores)) for _ in range(rounds)]
    one_cpu = side("prepare", 1)
    result.add("prepare_per_s_ratio", [a["tokens_per_cpu_s"] / b["tokens_per_cpu_s"] for a, b in pairs])
    daemons = [a["tokens"] / a["with_idle_daemons_cpu_s"] / b["tokens_per_cpu_s"] for a, b in pairs]
    result.add("prepare_per_s_ratio_with_idle_daemons", daemons)
    result.add("prepare_tokens_per_cpu_s", [a["tokens_per_cpu_s"] for a, _ in pairs])
    result.add(f"prepare_speedup_{cores}_over_1_cpus", [a["tokens_per_s"] / one_cpu["tokens_per_s"] for a, _ in pairs])
    result.peers["loop_tokens_per_cpu_s"] = summary([b["tokens_per_cpu_s"] for _, b in pairs])
    result.runs["prepare"] = {"pairs": pairs, "on_one_cpu": one_cpu, "source_repeated": times}


def repeat(source: Path, folder: Path, times: int) -> None:
    """So many copies of every file, under names of their own."""
    for copy in range(times):
        for path in sorted(source.glob("*.parquet")):
            shutil.copyfile(path, folder / f"{copy:03d}-{path.name}")


def stream_part(result: Result, source: Path, tokenizer: Path, work: Path, rounds: int, peers_python: str) -> None:
    make_rows(source, tokenizer, work)
    rows, mds, peers = str(work / "rows.npy"), str(work / "mds"), str(HERE / "data_peers.py")
    sides = {"ours": ("data_stream.py", [str(work / "corpus")], sys.executable)}
    sides["dataloader"] = ("data_peers.py", ["dataloader", rows], sys.executable)
    if peers_python:
        run_side(peers, "write_mds", rows, "--mds", mds, python=peers_python)
        sides["mosaicml"] = ("data_peers.py", ["mosaicml", rows, "--mds", mds], peers_python)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (script, arguments, python) in sides.items():
            runs[name].append(shown(name, run_side(str(HERE / script), *arguments, python=python)))
    ours = runs.pop("ours")
    result.add("stream_mtok_per_cpu_s", [run["mtok_per_cpu_s"] for run in ours])
    result.add("read_amplification", [run["read_amplification"] for run in ours])
    result.add("first_batch_cold_s", [run["first_batch_cold_s"] for run in ours])
    result.add("first_batch_after_resize_s", [s for run in ours for s in run["first_batch_after_resize_s"]])
    for name, theirs in runs.items():
        result.peers[f"{name}_mtok_per_cpu_s"] = summary([run["tokens"] / run["cpu_s"] / 1e6 for run in theirs])
        result.peers[f"{name}_first_batch_s"] = summary([run["first_batch_s"] for run in theirs])
    result.runs["stream"] = {"ours": ours, **runs}


def make_rows(source: Path, tokenizer: Path, work: Path) -> None:
    """A corpus and an array of the same rows: the source's, repeated in another order."""
    import numpy as np

    from regrow.config.schema import DataConfig
    from regrow.data.prepare.documents import load_recipe
    from regrow.data.prepare.prepare import prepare
    from regrow.data.read.shards import ShardReader
    from support.corpus import write_corpus

    config = DataConfig(
        recipe="fineweb_edu", source=str(source), tokenizer=str(tokenizer), vocab_size=200_000, seq_len=SEQ_LEN
    )
    prepare(config, load_recipe("fineweb_edu"), work / "once", progress=lambda *update: None)
    reader = ShardReader(work / "once", "train")
    chosen = np.random.default_rng(0).integers(0, reader.num_rows, ROWS)
    rows = reader.read(np.arange(reader.num_rows))[chosen]
    np.save(work / "rows.npy", rows)
    write_corpus(work / "corpus", rows, rows_per_group=config.rows_per_group, rows_per_shard=config.rows_per_shard)


def job_part(result: Result, work: Path, rounds: int, steps: int) -> None:
    shares = []
    for number in range(rounds):
        overrides = [f"run.storage_path={work / 'runs'}", f"run.name=job-{number}", f"train.steps={steps}"]
        overrides += ["train.validate_every_steps=0", "cluster.dashboard=false"]
        subprocess.run([sys.executable, "-m", "jobs.pretrain", *overrides], cwd=ROOT, check=True, timeout=1800)
        lines = (work / "runs" / f"job-{number}" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines][FIRST_STEPS:]
        shares.append(sum(row["data_wait_s"] for row in rows) / sum(row["step_s"] for row in rows))
    result.add("data_wait_fraction", shares)
    result.runs["job"] = {"steps": steps, "data_wait_fraction": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder of parquet files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="one round, the source once: minutes")
    parser.add_argument("--rounds", type=int, help="of each comparison; 5 without --quick")
    parser.add_argument("--peers-python", default="", help="a Python that has torch and mosaicml-streaming")
    parser.add_argument("--only", nargs="+", choices=("prepare", "stream", "job"), default=["prepare", "stream", "job"])
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    source, tokenizer = options.source.absolute(), options.tokenizer.absolute()
    result = Result()
    with tempfile.TemporaryDirectory(prefix="data-bench-") as folder:
        work = Path(folder)
        if "prepare" in options.only:
            prepare_part(result, source, tokenizer, work, rounds, options.quick)
        if "stream" in options.only:
            stream_part(result, source, tokenizer, work, rounds, options.peers_python)
        if "job" in options.only:
            job_part(result, work, rounds, steps=30 if options.quick else 60)
    settings = {"rounds": rounds, "tokenizer": tokenizer.parent.name, "quick": options.quick}
    write_result(
        options.out, result.figures, spread=result.spread, peers=result.peers, runs=result.runs, settings=settings
    )


if __name__ == "__main__":
    main()
