"""What preparation costs over the tokenizer alone: tokens per CPU-second of `jobs.prepare_data` on Ray against a loop.

    python benchmarks/data.py --source FOLDER --tokenizer FILE --out benchmarks/results/FILE.json [--quick]

The source, parquet files with a column `text`, is repeated until the loop takes a CPU-minute. The loop reads the files
and calls `encode_batch`, no more: no hashes, no shuffle, no shards. Ours is the whole preparation; the CPU time of all
processes of its Ray counts, from the moment it is up, idle daemons included. In turn, in processes of their own.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT)]

CPU_SECONDS = 60.0  # the loop's, at least
BATCH_CHARS = 2_000_000


def loop(source: Path, tokenizer: Path) -> dict[str, float]:
    """Read and encode, on all cores."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    bpe, tokens, began = Tokenizer.from_file(str(tokenizer)), 0, time.perf_counter()
    bpe.encode_special_tokens = True
    for path in sorted(source.glob("*.parquet")):
        batch: list[str] = []
        for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
            batch.append(text)
            if sum(map(len, batch)) >= BATCH_CHARS:
                tokens += sum(len(e.ids) for e in bpe.encode_batch(batch, add_special_tokens=False))
                batch = []
        tokens += sum(len(e.ids) for e in bpe.encode_batch(batch, add_special_tokens=False))
    return {"tokens": tokens, "cpu_s": time.process_time(), "wall_s": time.perf_counter() - began}


def ours(source: Path, tokenizer: Path, storage: Path, cpus: int) -> dict[str, float]:
    """The preparation on a Ray of its own, with so many CPUs."""
    import ray

    from regrow.config.schema import DataConfig
    from regrow.data.distribute import on_ray
    from regrow.data.documents import load_recipe
    from regrow.data.prepare import prepare

    os.chdir(ROOT)
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    time.sleep(3.0)  # its processes have started
    config = DataConfig(
        recipe="fineweb_edu", source=str(source), tokenizer=str(tokenizer), vocab_size=200_000, seq_len=2048
    )
    before, began = family_cpu_s(), time.perf_counter()
    manifest = prepare(
        config, load_recipe("fineweb_edu"), storage / "corpus", progress=lambda *update: None, distribute=on_ray
    )
    wall_s, cpu_s = time.perf_counter() - began, family_cpu_s() - before
    ray.shutdown()
    return {"tokens": manifest.num_tokens, "cpu_s": cpu_s, "wall_s": wall_s}


def family_cpu_s() -> float:
    """CPU seconds so far of this process and every one that descends from it, and of children they have waited for."""
    parents, seconds = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(seconds.get(pid, 0.0) for pid in family)


def measure(side: str, source: Path, tokenizer: Path, cpus: int) -> dict[str, float]:
    """Run one side in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="data-", dir=source.parent) as storage:
        command = [sys.executable, __file__, "--side", side, "--source", str(source), "--tokenizer", str(tokenizer)]
        command += ["--storage", storage, "--cpus", str(cpus)]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=1800,
            env=environment,
            start_new_session=True,
        )
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    result["tokens_per_cpu_s"] = result["tokens"] / result["cpu_s"]
    result["tokens_per_s"] = result["tokens"] / result["wall_s"]
    print(f"{side} on {cpus} cpus: {json.dumps({key: round(value, 1) for key, value in result.items()})}", flush=True)
    return result


def repeat(source: Path, folder: Path, times: int) -> None:
    """So many copies of every file, under names of their own."""
    for copy in range(times):
        for path in sorted(source.glob("*.parquet")):
            shutil.copyfile(path, folder / f"{copy:03d}-{path.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder of parquet files")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="the source once; shows that it runs, not what it costs")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--side", choices=("loop", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--storage", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cpus", type=int, default=os.cpu_count() or 1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "loop":
        print(json.dumps(loop(options.source, options.tokenizer)))
        return
    if options.side == "ours":
        print(json.dumps(ours(options.source, options.tokenizer, options.storage, options.cpus)))
        return
    if options.out is None:
        parser.error("--out is required")

    from regrow.observe.provenance import git_sha, hardware, versions

    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="data-bench-") as folder:
        source = Path(folder) / "source"
        source.mkdir()
        times = 1
        repeat(options.source, source, 1)
        if not options.quick:
            times = math.ceil(CPU_SECONDS / measure("loop", source, options.tokenizer, cores)["cpu_s"])
            repeat(options.source, source, times)
        sides: dict[str, list[dict[str, float]]] = {"loop": [], "ours": []}
        for _ in range(options.pairs):
            for side, runs in sides.items():
                runs.append(measure(side, source, options.tokenizer, cores))
        one_cpu = measure("ours", source, options.tokenizer, 1)
    pairs = list(zip(sides["ours"], sides["loop"], strict=True))
    ratios = [a["tokens_per_cpu_s"] / b["tokens_per_cpu_s"] for a, b in pairs]
    speedups = [a["tokens_per_s"] / one_cpu["tokens_per_s"] for a in sides["ours"]]
    result = {
        "figures": {
            "prepare_tokens_per_cpu_s_over_loop": statistics.median(ratios),
            "prepare_tokens_per_cpu_s": statistics.median(run["tokens_per_cpu_s"] for run in sides["ours"]),
            f"prepare_speedup_{cores}_over_1_cpus": statistics.median(speedups),
        },
        "spread": {"prepare_tokens_per_cpu_s_over_loop": [min(ratios), max(ratios)]},
        "peers": {"loop_tokens_per_cpu_s": statistics.median(run["tokens_per_cpu_s"] for run in sides["loop"])},
        "runs": {**sides, "ours_on_one_cpu": [one_cpu]},
        "settings": {"pairs": options.pairs, "source_repeated": times, "tokenizer": options.tokenizer.parent.name},
        "versions": versions(),
        "hardware": hardware(),
        "git": git_sha(),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["figures"]))


if __name__ == "__main__":
    main()
