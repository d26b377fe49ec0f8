"""What a rank reads and asks for when a large checkpoint is restored into another layout, counted without its data.

    python benchmarks/restore_requests.py --out benchmarks/results/FILE.json [--only 8b]

The metadata file is made by the code that makes every checkpoint's (`metadata.encode`), of every rank's boxes, with
checksums of zeros; it lies in a storage that counts what is asked of it, and a rank's requests come from the code that
restores (`Reader.plan`), so all is as in a run but that no data is moved. State: parameters and both of AdamW's moments
in float32. A rank's requests are all of its: COMMIT, the metadata file and data. Of each case some ranks are looked at:
the first, the last, and others by chance; counts are those of the worst. `read_over_needed` is over all of them;
`most_read_for_nothing_over_share` is the most that one reads beyond its need over an even share of the state: rows do
not divide evenly, and some ranks need next to nothing.

CPU of this process, for what the keeper's does that puts a checkpoint together: `receive_cpu_s`, to unpickle and join
what the nodes at the top of the tree tell (without Ray); `encode_cpu_s`, to make the metadata file; `write_cpu_s`, to
write it to a disk.
`version_4_header_bytes`: what each rank read of headers before, computed: of each tensor in each file some 150 bytes,
and a checksum of 4 bytes, in base64, for 16 KiB.
"""

import argparse
import hashlib
import json
import pickle
import random
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "tests"), str(ROOT)]

from benchmarks.measure import write_result  # noqa: E402

from regrow.config.schema import ModelConfig  # noqa: E402
from regrow.control.peers import FAN_OUT  # noqa: E402
from regrow.model.size import parameter_shapes  # noqa: E402
from regrow.plan.boxes import ITEM_BYTES, Box  # noqa: E402
from regrow.plan.mesh import Coordinates, MeshShape  # noqa: E402
from regrow.plan.placement import num_copies, placed, stage_of  # noqa: E402
from regrow.state.disk.catalog import open_checkpoint, step_folder  # noqa: E402
from regrow.state.disk.format import COMMIT, SPAN, STORED_CHUNK_BYTES, Content, DataFile, Index  # noqa: E402
from regrow.state.disk.metadata import encode, num_chunks  # noqa: E402
from regrow.state.disk.packed import PackedFiles  # noqa: E402
from regrow.state.disk.reading import Reader  # noqa: E402
from regrow.state.disk.stacks import Stack, parts_of, rows_of  # noqa: E402
from regrow.state.reshard import share  # noqa: E402
from regrow.storage import LocalStorage, Storage  # noqa: E402

KINDS = ("model", "optim/exp_avg", "optim/exp_avg_sq")
STAGES = (16, 16, 16, 16, 16, 16, 15, 15)
CASES: dict[str, tuple[str, MeshShape, MeshShape]] = {
    "8b fsdp 64 to 56": ("8b", MeshShape(1, 64), MeshShape(1, 56)),
    "8b hsdp 2x32 to 2x28": ("8b", MeshShape(2, 32), MeshShape(2, 28)),
    "8b tp 8 x 8 to 7": ("8b", MeshShape(1, 8, 8), MeshShape(1, 7, 8)),
    "8b fsdp 64 to tp 8 x 7": ("8b", MeshShape(1, 64), MeshShape(1, 7, 8)),
    "8b tp 8 x 8 to fsdp 56": ("8b", MeshShape(1, 8, 8), MeshShape(1, 56)),
    "70b fsdp 512 to 448": ("70b", MeshShape(1, 512), MeshShape(1, 448)),
    "70b hsdp 8x64 to 8x56": ("70b", MeshShape(8, 64), MeshShape(8, 56)),
    "70b tp 8 x 64 to 56": ("70b", MeshShape(1, 64, 8), MeshShape(1, 56, 8)),
    "405b fsdp 16384 to 16320": ("405b", MeshShape(1, 16384), MeshShape(1, 16320)),
    "405b hsdp 64x256 to 64x255": ("405b", MeshShape(64, 256), MeshShape(64, 255)),
    "405b tp 8 x 2048 to 2040": ("405b", MeshShape(1, 2048, 8), MeshShape(1, 2040, 8)),
    "405b hsdp 8x256 tp 8 to 8x255": ("405b", MeshShape(8, 256, 8), MeshShape(8, 255, 8)),
    "405b pp 8 tp 8 x 256 to 255": ("405b", MeshShape(1, 256, 8, 8, STAGES), MeshShape(1, 255, 8, 8, STAGES)),
}
NUM_RANKS = 8  # that are looked at


class Counted(LocalStorage):
    """One folder in memory, of COMMIT and a metadata file."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(Path("/counted"))
        self.files, self.requests, self.num_bytes = files, 0, 0

    def join(self, *names: str) -> "Counted":
        return self

    def read_bytes(self, name: str) -> bytes:
        return self.read_range(name, 0, len(self.files[name]))

    def read_range(self, name: str, offset: int, num_bytes: int) -> bytes:
        found = self.files[name][offset : offset + num_bytes]
        self.requests, self.num_bytes = self.requests + 1, self.num_bytes + len(found)
        return found


@cache
def wholes(model: str) -> tuple[Box, ...]:
    plain = yaml.safe_load((ROOT / "conf/model" / f"{model}.yaml").read_text())
    plain = plain.get("model", plain)
    fields = {key: plain[key] for key in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")}
    shapes = parameter_shapes(ModelConfig(name=model, **fields))
    return tuple(Box.whole(f"{kind}/{name}", shape) for kind in KINDS for name, shape in shapes.items())


def boxes_of(model: str, at: Coordinates) -> list[Box]:
    stage = at.along("pp")[0]
    return [placed(box, at) for box in wholes(model) if stage_of(box.name, at.mesh) == stage]


def files_of(model: str, mesh: MeshShape) -> tuple[DataFile, ...]:
    """Every rank's file. What `parts_of` gives for the first rank of a kind holds for all: they differ in rows."""
    kinds: dict[tuple[int, int], list[tuple[Stack, Box]]] = {}
    dice, files = random.Random(0), []
    by_name = {box.name: box for box in wholes(model)}
    for rank in range(mesh.world_size):
        at = Coordinates(mesh, rank)
        kind = at.along("pp")[0], at.along("tp")[0]
        if kind not in kinds:  # a rank of this kind with rows of everything has coordinate 0 along the shards
            kinds[kind] = [(part.stack, by_name[part.stack.columns[0].name]) for part in _parts_with_rows(model, at)]
        spans, offset, crc, firsts = [], 1 << 12, 0, []
        for stack, whole in kinds[kind]:
            rows = rows_of(placed(whole, at))
            index, count = num_copies(whole.name, at)
            first, size = rows.start * stack.width, len(rows) * stack.width
            start, stop = first + size * index // count, first + size * (index + 1) // count
            if stop > start:
                spans.append((stack.key.encode(), start, stop - start, offset, crc))
                offset += (stop - start) * ITEM_BYTES[stack.dtype]
                crc += num_chunks(stack, stop - start)
                firsts += [] if start else [stack]
        if dice.random() < 8 / mesh.world_size:
            parts = [(p.stack.key.encode(), p.start, p.stop - p.start) for p in parts_of(boxes_of(model, at), at)]
            assert sorted(parts) == sorted(span[:3] for span in spans), f"rank {rank}"
        content = Content(np.array(spans, SPAN).tobytes(), bytes(4 * crc), tuple(firsts))
        files.append(DataFile(f"g000001-1a2b3c4d-{rank:05d}.safetensors", offset, 1 << 12, "0" * 64, content))
    return tuple(files)


def _parts_with_rows(model: str, at: Coordinates) -> list[Any]:
    """The parts of a rank like this one that is the first along every axis but `pp` and `tp`."""
    mesh = at.mesh
    same = MeshShape(1, 1, mesh.tp, mesh.pp, mesh.blocks)
    first = at.along("pp")[0] * mesh.tp + at.along("tp")[0]
    alike = Coordinates(MeshShape(1, 1, mesh.tp, mesh.pp, mesh.blocks), first)
    assert alike.along("tp")[0] == at.along("tp")[0], same
    return parts_of(boxes_of(model, alike), alike)


def count(model: str, before: MeshShape, after: MeshShape) -> dict[str, Any]:
    files = files_of(model, before)
    tensors = {box.name: (box.dtype, box.shape) for box in sorted(wholes(model), key=lambda box: box.name)}
    most = -(-len(files) // FAN_OUT)
    told = [PackedFiles.of({str(at): files[at : at + most]}) for at in range(0, len(files), most)]
    sent = [pickle.dumps(each, 5) for each in told]
    begun = time.process_time()
    packed = PackedFiles.joined([pickle.loads(each) for each in sent])
    receive_cpu_s = time.process_time() - begun
    begun = time.process_time()
    head, rest = encode(Index("0" * 16, 1, 1, {"step": 1}, tensors, ()), packed)
    pointer = json.dumps({"index": "m", "bytes": len(head), "sha256": hashlib.sha256(head).hexdigest()}).encode()
    encode_cpu_s = time.process_time() - begun
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        LocalStorage(Path(folder)).write_chunks("m", [head, rest])
        write_cpu_s = time.process_time() - begun
    storage = Counted({COMMIT: pointer, "m": head + rest})
    dice = random.Random(1)
    ranks = {0, after.world_size - 1, *(dice.randrange(after.world_size) for _ in range(NUM_RANKS - 2))}
    looked = [look(storage, model, Coordinates(after, rank)) for rank in sorted(ranks)]
    share_bytes = sum(box.num_bytes for box in wholes(model)) / after.world_size
    num_chunks_v4 = sum(box.num_bytes for box in wholes(model)) / (16 << 10)
    boxes = len(packed.spans)
    return {
        "read_over_needed": sum(each["read"] for each in looked) / sum(each["needed"] for each in looked),
        "most_read_for_nothing_over_share": max(each["read"] - each["needed"] for each in looked) / share_bytes,
        "requests": max(each["requests"] for each in looked),
        "data_requests": max(each["data_requests"] for each in looked),
        "metadata_bytes": max(each["metadata_bytes"] for each in looked),
        "needed_bytes": max(each["needed"] for each in looked),
        "plan_cpu_s": max(each["cpu_s"] for each in looked),
        "receive_cpu_s": receive_cpu_s,
        "encode_cpu_s": encode_cpu_s,
        "write_cpu_s": write_cpu_s,
        "metadata_file_bytes": len(head) + len(rest),
        "json_bytes": len(head),
        "spans": boxes,
        "files": len(files),
        "version_4_header_bytes": num_chunks_v4 * 4 * 4 / 3 + 150 * len(tensors) * len(files) / max(1, before.pp),
    }


def look(storage: Counted, model: str, at: Coordinates) -> dict[str, Any]:
    """One rank's."""
    storage.requests = storage.num_bytes = 0
    begun = time.process_time()
    folder: Storage = storage
    index = open_checkpoint(folder, 1, with_files=False)
    reader = Reader(folder / step_folder(1), index)
    pieces = [share(box, *at.along("dp_replicate")) for box in boxes_of(model, at)]
    requests, _ = reader.plan(pieces)
    reader.checksums_of(requests)
    read = sum(request.num_bytes for request in requests)
    return {
        "read": read,
        "needed": sum(piece.num_bytes for piece in pieces) or 1,
        "requests": storage.requests + len(requests),
        "data_requests": len(requests),
        "metadata_bytes": storage.num_bytes,
        "cpu_s": time.process_time() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    runs = {}
    for name, (model, before, after) in CASES.items():
        if options.only in name:
            runs[name] = count(model, before, after)
            print(name, json.dumps({k: round(v, 4) for k, v in runs[name].items()}), flush=True)
    figures = {
        f"{name}: {key}": run[key]
        for name, run in runs.items()
        for key in (
            "read_over_needed",
            "most_read_for_nothing_over_share",
            "requests",
            "metadata_bytes",
            "receive_cpu_s",
            "encode_cpu_s",
            "write_cpu_s",
        )
    }
    settings = {"chunk_bytes": STORED_CHUNK_BYTES, "ranks_looked_at": NUM_RANKS}
    if options.out is not None:
        write_result(options.out, figures, spread={}, peers={}, runs=runs, settings=settings)


if __name__ == "__main__":
    main()
