"""Every claim that acceptance looks at, in the order of looking: what is expected, where that is from, what to do.

Numbers are for H100 and H200 where no GPU is named, and by reading where no source is: no GPU was here yet. Sources:
[22] is docs/decisions/0022, [9] docs/decisions/0009, [20] docs/decisions/0020.
"""

from regrow.accept.claims import Check, Claim, Part

HERE = "regrow.accept"
STAYS = (
    "all alive {s:.0f} s later, free within {free:.0f} s, a new step within {step:.0f} s, "
    "the broken step not believed [22]"
)
RESTART = "train with cluster.in_place=false until this holds; docs/acceptance.md"
HOST = "docs/acceptance.md has the settings of hosts"


def _lives(name: str, claim: str, s: float, free: float = 12, step: float = 15) -> Claim:
    return Claim(name, claim, STAYS.format(s=s, free=free, step=step), RESTART)


def _ends(name: str) -> Claim:
    return Claim(
        name,
        "a rank is killed while communicators are made: no other hangs",
        "each goes on, or ends itself after 10 s for a start anew (runtime/abort.py)",
        RESTART,
    )


ONE_PROCESS = (
    Check(
        f"{HERE}.checks_one_gpu:certificate_premise",
        Part.one_process,
        90,
        (
            Claim(
                "certificate_premise",
                "the certificate's flag is read in stream order",
                "0: what the host cleared before the device came to it (train/certificate.py)",
                "nothing may be believed of a broken group: cluster.in_place=false",
            ),
            Claim(
                "certificate_holds",
                "the certificate passes an undisturbed step",
                "the step's number, and no complaint (train/certificate.py)",
                "every step would be refused: cluster.in_place=false",
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_one_gpu:pageable_is_not",
        Part.one_process,
        60,
        (
            Claim(
                "pageable_is_not",
                "pageable memory is read when it is enqueued, so the flag has to be pinned",
                "1: what it was then (train/certificate.py)",
                "nothing to do: the flag is pinned",
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_one_gpu:host",
        Part.one_process,
        60,
        (
            Claim("host_descriptors", "enough files may be open", ">= 65,536 by the hard limit", f"ulimit -Hn; {HOST}"),
            Claim("host_name", "the host's name is an address that others can reach", "not 127/8", HOST),
            Claim(
                "host_shm",
                "/dev/shm has room for snapshots",
                "36 GiB a GPU, three slots of an eighth of 8B's state [9]",
                "mount a larger one; python -m jobs.plan says what a run needs",
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_one_gpu:gpu_host",
        Part.one_process,
        90,
        (
            Claim("host_nccl", "NCCL is recent", ">= 2.27 [22]", "a newer torch"),
            Claim("host_capability", "the GPUs have float8", ">= 8.9", "parallel.float8=none"),
            Claim("host_memory", "the GPUs are free", ">= 95%", "nvidia-smi says which process holds it"),
            Claim("host_nvml", "NVML knows the GPUs and nothing against them", "all, none", "take the GPU out"),
            Claim("host_triton", "Triton compiles", "what eager computes", "a C compiler and a driver that fits torch"),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_one_gpu:probe",
        Part.one_process,
        60,
        (
            Claim(
                "probe",
                "a product of 4096 x 4096 is exact, fast and steady",
                "<= 0.35 ms, spread < 5% (0.25 ms typical)",
                "look at clocks and temperature: nvidia-smi -q",
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_one_gpu:threads_run",
        Part.one_process,
        120,
        (
            Claim("event_wait_lets_run", "a thread that waits for an event lets others run", "gaps <= 0.2 s", RESTART),
            Claim(
                "full_queue_eager",
                "a thread that launches into a full queue lets others run",
                "gaps <= 1 s [22]",
                RESTART,
            ),
            Claim(
                "full_queue_compiled",
                "who launches compiled code into a full queue lets other threads run",
                "gaps <= 1 s [22]",
                RESTART,
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_one_gpu:settings_are_read",
        Part.one_process,
        100,
        (
            Claim(
                "settings_are_read",
                "torch's process group reads the settings of a worker that outlives its groups",
                "each that it names (runtime/hardware/settings.py)",
                RESTART,
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_kernels:attention",
        Part.one_process,
        120,
        (
            Claim("attention_flash", "flash attention is right", "2% of float32", "parallel.attention=cudnn"),
            Claim("attention_cudnn", "cuDNN's attention is right", "2% of float32", "parallel.attention=flash"),
            Claim("attention_auto_runs", "what auto chooses is right", "2% of float32", "parallel.attention=flash"),
            Claim(
                "attention_documents",
                "flex_attention keeps within documents",
                "2% of the whole matrix as a mask",
                "model.document_attention=false",
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_kernels:attention_speed",
        Part.one_process,
        60,
        (
            Claim(
                "attention_auto",
                "auto chooses the fastest attention",
                "within 5% of the best (parallel/apply.py)",
                "parallel.attention by name",
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_kernels:float8",
        Part.one_process,
        180,
        (
            *(
                Claim(f"float8_{recipe}", f"float8 {recipe} is what its emulation is", "2%", "another parallel.float8")
                for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
            ),
            Claim(
                "float8_rowwise_compiled",
                "float8 rowwise trains compiled",
                "20 steps without NaN, the loss falls",
                "parallel.float8=tensorwise",
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_kernels:loss",
        Part.one_process,
        120,
        (
            Claim("loss_compiled", "the compiled loss is the eager one", "2%, 128,256 ids", "parallel.compile=false"),
            Claim("loss_chunked", "the loss in chunks is the whole one", "2%", "parallel.loss_chunk_tokens=0"),
            Claim(
                "loss_compiled_chunked",
                "the compiled loss in chunks is the eager whole one",
                "2%",
                "parallel.compile=false",
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_training:throughput",
        Part.one_process,
        300,
        (
            Claim("throughput", "1.8B trains at the speed others publish", ">= 24,000 tokens/s", "docs/acceptance.md"),
            Claim("mfu", "1.8B uses the device", "MFU >= 45%, of dense bfloat16", "docs/acceptance.md"),
            Claim("memory_forecast", "jobs.plan forecasts 1.8B's memory", "within 5%", "leave more room than it says"),
            Claim(
                "fragmentation", "what torch reserves of memory is used", "< 1.08 of allocated", "PYTORCH_ALLOC_CONF"
            ),
            Claim("no_sync", "a step does not wait for the device", "no synchronization", "a bug: the log names it"),
            Claim(
                "gpu_busy",
                "the device does not wait for the host",
                ">= 97% busy",
                "larger passes: parallel.slices_per_pass",
            ),
            Claim(
                "host_ahead",
                "the host runs ahead of the device",
                "< 60% of the step",
                "larger passes: parallel.slices_per_pass",
            ),
            Claim("certificate_cost", "a certificate costs nothing", "< 1% of a step", "docs/acceptance.md"),
            Claim("float8_speedup", "float8 pays off", ">= 1.15 times bfloat16", "parallel.float8=none"),
            Claim("torchtitan", "we are as fast as torchtitan", ">= 1.0 of its tokens/s", "benchmarks/step.py"),
        ),
        num_gpus=1,
        memory_gib=70,
    ),
    Check(
        f"{HERE}.checks_training:slots",
        Part.one_process,
        120,
        (
            Claim(
                "slots_made", "snapshot slots are made and pinned soon", ">= 0.85 GB/s", "huge pages; snapshot.slots=2"
            ),
            Claim("slots_copied", "the state is copied to slots fast", ">= 45 GB/s", "bind workers to their socket"),
            Claim("slots_equal", "a sealed slot is the state", "bit for bit", "snapshot.every_steps=0, and report it"),
            Claim("slots_beside", "a copy to a slot costs the step nothing", "<= 2%", "snapshot.every_steps higher"),
            Claim("slots_closed", "closing slots waits for their copy alone", "< 5 s", RESTART),
            Claim(
                "slots_kept",
                "a process' later generations find their slots' memory pinned",
                "< 1 s, none anew",
                RESTART,
            ),
            Claim("slots_let_go", "slots that are let go of are pinned no longer", "0 B", "cluster.in_place=false"),
        ),
        num_gpus=1,
        memory_gib=16,
    ),
    Check(
        f"{HERE}.checks_training:generations",
        Part.one_process,
        180,
        (
            Claim("generations", "20 groups in a process keep nothing", "+64 MiB, no thread, no descriptor", RESTART),
            Claim("generations_compiled", "nothing is compiled after the second of 20 groups", "0 graphs", RESTART),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_training:abort_often",
        Part.one_process,
        120,
        (
            Claim(
                "abort_often", "50 communicators, aborted, keep nothing", "+64 MiB, no thread, no descriptor", RESTART
            ),
        ),
        num_gpus=1,
    ),
    Check(
        f"{HERE}.checks_kernels:small_model",
        Part.one_process,
        120,
        (
            Claim("debug_float32", "a model trains as on a CPU, in float32", "0.01% over 30 steps", "report it"),
            Claim(
                "debug_bfloat16",
                "a model trains as on a CPU, in bfloat16",
                "0.5% over 30 steps",
                "parallel.dtype=float32",
            ),
            Claim("debug_float8", "a model trains as on a CPU, in float8", "1% over 30 steps", "parallel.float8=none"),
        ),
        num_gpus=1,
    ),
)

ONE_NODE = (
    Check(
        f"{HERE}.checks_one_node:probes",
        Part.one_node,
        90,
        (Claim("probes", "the GPUs of the node are equally fast", "within 5%", "take the slow one out"),),
        num_gpus=2,
    ),
    Check(
        f"{HERE}.checks_one_node:bandwidth",
        Part.one_node,
        120,
        (
            *(
                Claim(
                    f"bandwidth_{name}", f"{name} of 256 MB is fast", f">= {least} GB/s on 8 GPUs", "nvidia-smi nvlink"
                )
                for name, least in (("all_gather", 330), ("reduce_scatter", 330), ("all_reduce", 400))
            ),
            Claim("copies_at_once", "all GPUs copy to the host at once", ">= 35 GB/s each", "bind to the socket"),
        ),
        num_gpus=2,
        memory_gib=8,
    ),
    Check(
        f"{HERE}.checks_one_node:matrix_of_two",
        Part.one_node,
        420,
        (
            _lives("kill_all_reduce", "a rank is killed in an all-reduce: the other trains on", 90, 5),
            _lives("kill_reduce_scatter", "a rank is killed in a reduce-scatter: the others train on", 90, 5),
            _lives("kill_first_backward", "a rank is killed in its first backward: the other trains on", 90),
            _lives("kill_mid_step", "a rank is killed in a later step: the others train on", 90, 5, 10),
            _lives("own_failure", "a rank fails by itself: it alone is lost", 90),
            _lives("stopped", "a rank is stopped: the other trains on", 90),
            _lives("endless_loop", "a rank's host hangs in a loop: the other trains on", 90),
            Claim(
                "late_rank_0",
                "rank 0 comes 15 s late: no rank is lost",
                "all steps, all alive 90 s later [22]",
                RESTART,
            ),
            _lives("one_aborts", "a rank aborts and tells no other: the other believes nothing of it", 90, 12, 25),
        ),
        num_gpus=2,
    ),
    Check(
        f"{HERE}.checks_one_node:killed_while_forming",
        Part.one_node,
        180,
        (_ends("kill_init"),),
        num_gpus=2,
    ),
    Check(
        f"{HERE}.checks_one_node:garbage",
        Part.one_node,
        100,
        (
            Claim(
                "garbage",
                "a rank's abort breaks what its peers compute, and they are told nothing",
                "garbage or a hang, as NCCL's kernels read [22]",
                "good news: the certificate guards against what does not happen here",
            ),
        ),
        num_gpus=2,
        memory_gib=8,
    ),
    Check(
        f"{HERE}.checks_one_node:two_groups",
        Part.one_node,
        120,
        (Claim("two_groups", "two hung groups are aborted at once", "< 10 s, side by side [22]", RESTART),),
        num_gpus=2,
    ),
    Check(
        f"{HERE}.checks_one_node:matrix_of_all",
        Part.one_node,
        400,
        (
            _lives("fsdp_kill", "a rank of all is killed, 150M compiled: the others train on", 90, 5),
            _lives("hsdp_kill", "a rank of two replicas is killed: what the others believed is right", 90),
            _lives("hsdp_kill_replica", "one of two replicas is killed whole: the other trains on", 90),
            _lives("tp_kill", "a rank of a tensor-parallel unit is killed: whole units train on", 90),
        ),
        num_gpus=2,
        memory_gib=30,
    ),
    Check(
        f"{HERE}.checks_one_node:eight_b",
        Part.one_node,
        560,
        (
            Claim(
                "eight_b_bfloat16",
                "8B in bfloat16 trains at the speed others publish",
                ">= 6,000 tokens/s a GPU",
                "jobs.plan",
            ),
            Claim(
                "eight_b_float8",
                "8B in float8 trains at the speed others publish",
                ">= 7,700 tokens/s a GPU",
                "parallel.float8=none",
            ),
            Claim("eight_b_memory", "8B fits", "<= 72 GiB", "parallel.activation_checkpoint=full"),
            Claim("eight_b_snapshots", "snapshots of every step cost nothing", "<= 2%", "snapshot.every_steps higher"),
        ),
        num_gpus=8,
        memory_gib=70,
    ),
    Check(
        f"{HERE}.checks_one_node:world_sizes",
        Part.one_node,
        300,
        (
            Claim("sizes_float32", "the loss does not depend on the world size, in float32", "0.01%", "report it"),
            Claim("sizes_bfloat16", "the loss does not depend on the world size, in bfloat16", "0.5%", "report it"),
            Claim(
                "sizes_float8",
                "the loss does not depend on the world size, with float8 all-gather",
                "0.5%",
                "parallel.float8=tensorwise",
            ),
        ),
        num_gpus=2,
    ),
    Check(
        f"{HERE}.checks_one_node:change_often",
        Part.one_node,
        300,
        (
            Claim("aborts_by_all", "30 groups, each aborted by all, keep nothing", "+8 MiB each, all alive", RESTART),
            Claim("abort_seconds", "communicators are made and aborted soon", "<= 5 s each", RESTART),
        ),
        num_gpus=2,
    ),
    Check(
        f"{HERE}.checks_one_node:switches",
        Part.one_node,
        200,
        (
            _lives("nvls_on", "with NCCL_NVLS_ENABLE=1 a killed rank is outlived, too", 5, 10),
            _lives("nonblocking", "with communicators made without blocking a killed rank is outlived, too", 5, 10),
        ),
        num_gpus=2,
    ),
)

NO_GPU = (
    Check(
        f"{HERE}.checks_cpu:flag",
        Part.no_gpu,
        60,
        (
            Claim(
                "cpu_flag",
                "the certificate's flag is read when the stream comes to it",
                "0 once it was cleared, and the step refused (train/certificate.py)",
                "a bug: report it",
            ),
        ),
    ),
    Check(
        f"{HERE}.checks_cpu:matrix",
        Part.no_gpu,
        420,
        (
            _lives("cpu_kill_all_reduce", "a rank is killed in an all-reduce: the other trains on", 4, 30, 60),
            _lives("cpu_kill_reduce_scatter", "a rank is killed in a reduce-scatter: the others train on", 4, 30, 60),
            _lives("cpu_kill_first_backward", "a rank is killed in its first backward: the other trains on", 4, 30, 60),
            _lives("cpu_kill_mid_step", "a rank is killed in a later step: the others train on", 4, 30, 60),
            _ends("cpu_kill_init"),
            _lives("cpu_own_failure", "a rank fails by itself: it alone is lost", 4, 30, 60),
            _lives("cpu_stopped", "a rank is stopped: the other trains on", 4, 30, 60),
            _lives("cpu_endless_loop", "a rank's host hangs in a loop: the other trains on", 4, 30, 60),
            _lives("cpu_one_aborts", "a rank aborts and tells no other: the other believes nothing of it", 4, 30, 60),
            Claim(
                "cpu_late_rank_0",
                "rank 0 comes 4 s late: nobody is lost",
                "all steps, all alive 4 s later [22]",
                RESTART,
            ),
            _lives("cpu_hsdp_kill", "a rank of two replicas is killed: what the others believed is right", 4, 30, 60),
            _lives("cpu_hsdp_kill_replica", "one of two replicas is killed whole: the other trains on", 4, 30, 60),
            _lives("cpu_tp_kill", "a rank of a tensor-parallel unit is killed: whole units train on", 4, 30, 60),
        ),
    ),
    Check(
        f"{HERE}.checks_cpu:two_groups",
        Part.no_gpu,
        60,
        (Claim("cpu_two_groups", "hung groups are aborted at once", "< 5 s, side by side [22]", RESTART),),
    ),
    Check(
        f"{HERE}.checks_cpu:slots",
        Part.no_gpu,
        60,
        (
            Claim(
                "cpu_slots_sealed", "a snapshot is visible once its step is confirmed", "not before [9]", "report it"
            ),
            Claim("cpu_slots_equal", "a sealed slot is the state", "bit for bit [9]", "report it"),
        ),
    ),
    Check(
        f"{HERE}.checks_cpu:pinned",
        Part.no_gpu,
        60,
        (
            Claim(
                "cpu_pinned", "20 generations pin no more than one, by a runtime that counts", "the same", "report it"
            ),
            Claim(
                "cpu_pinned_once",
                "a process that goes from generation to generation keeps its slots' memory pinned",
                "none anew from generation 9 to 20 [22]",
                "report it",
            ),
        ),
    ),
    Check(
        f"{HERE}.checks_cpu:generations",
        Part.no_gpu,
        150,
        tuple(
            Claim(
                f"cpu_generations_{backend}",
                f"20 groups in a process keep nothing, {backend}",
                "+12 MiB at most, no thread, descriptor, pinned page or compiled graph",
                "report it",
            )
            for backend in ("gloo", "asynchronous")
        ),
    ),
)

CLUSTER = (
    Check(
        f"{HERE}.checks_cluster:hosts",
        Part.cluster,
        90,
        (
            Claim("cluster_versions", "all nodes run the same torch, Ray and regrow", "one of each", "one image"),
            Claim("cluster_hosts", "every node's name, limits and memory will do", "as for one node", HOST),
        ),
    ),
    Check(
        f"{HERE}.checks_cluster:train",
        Part.cluster,
        540,
        (
            Claim(
                "cluster_trains",
                "a job trains on the cluster, undisturbed",
                "all steps",
                "the job's last line says what is wrong",
            ),
            Claim(
                "cluster_worker_killed",
                "a worker is killed: the others keep their processes and go on",
                "a new step within 25 s, the same batches [22]",
                RESTART,
            ),
            Claim(
                "cluster_driver_killed",
                "the driver is killed: the same command goes on",
                "the same batches, at most one checkpoint back",
                "docs/troubleshooting.md",
            ),
        ),
    ),
)

CHECKS: tuple[Check, ...] = ONE_PROCESS + ONE_NODE + NO_GPU + CLUSTER

# what no check here shows, and what would
NEXT = (
    "One node does not show: errors and delays of InfiniBand and EFA, gloo across hosts, pushes to a peer node, the "
    "loss of a node, 512 ranks' connections. +cluster=NAME on two nodes shows most of it."
)
