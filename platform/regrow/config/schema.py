"""The whole configuration as dataclasses: one a group, a line of help a field, no logic.

Imports neither torch, ray, hydra nor omegaconf, so that `--help` is quick and the training core can use it anywhere.
YAML under `conf/` holds differences from these defaults only. A field's help is the comment on its line.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Float8(StrEnum):
    """The float8 recipe of the blocks' linear layers; the names are torchao's."""

    none = "none"
    tensorwise = "tensorwise"
    tensorwise_all_gather = "tensorwise_all_gather"  # parameters also travel as float8
    rowwise = "rowwise"
    rowwise_with_gw_hp = "rowwise_with_gw_hp"


class ActivationCheckpoint(StrEnum):
    none = "none"
    selective = "selective"  # recompute everything but matrix products and attention
    full = "full"  # recompute each block from its input


class AttentionKernel(StrEnum):
    """What computes attention over whole rows; the names are torch's."""

    auto = "auto"  # torch's choice
    flash = "flash"  # also on a CPU
    cudnn = "cudnn"
    efficient = "efficient"


class CompileMode(StrEnum):
    default = "default"
    max_autotune = "max_autotune"  # time several kernels of each matrix product: minutes, once


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Schedule(StrEnum):
    wsd = "wsd"  # warmup, stable, decay
    cosine = "cosine"


class PipelineSchedule(StrEnum):
    """In which order the ranks of a pipeline run forwards and backwards."""

    one_f_one_b = "one_f_one_b"  # 1F1B, with one stage a rank
    interleaved = "interleaved"  # 1F1B, with several: a smaller bubble for more messages


class SnapshotTransport(StrEnum):
    """What carries the copies of snapshots from node to node."""

    tcp = "tcp"
    nixl = "nixl"  # by RDMA; needs regrow[rdma], and InfiniBand, RoCE or EFA on every node


class SubmitAction(StrEnum):
    render = "render"  # the manifests, on stdout
    diff = "diff"  # against what the cluster has
    apply = "apply"  # start the job, then follow its logs
    logs = "logs"  # follow them until the job has ended
    status = "status"
    stop = "stop"  # with a checkpoint; apply goes on from it


class SubmitBackend(StrEnum):
    kuberay = "kuberay"  # a RayJob on Kubernetes, by kubectl
    ray = "ray"  # the job API of a running Ray cluster


class Backend(StrEnum):
    """What carries the collectives of a training step."""

    auto = "auto"  # nccl on GPUs, else gloo
    gloo = "gloo"
    nccl = "nccl"
    asynchronous = "asynchronous"  # on CPU with NCCL's behaviour where a rank is lost: for drills and tests


class Network(StrEnum):
    plain = "plain"  # TCP
    efa = "efa"  # AWS Elastic Fabric Adapter
    infiniband = "infiniband"  # or RoCE


class DrillHosts(StrEnum):
    together = "together"
    apart = "apart"


class Queue(StrEnum):
    none = "none"
    kueue = "kueue"
    volcano = "volcano"


@dataclass
class RunConfig:
    """Which run this is and where it lives."""

    name: str = "debug"  # run folder below storage_path; the same name again resumes
    storage_path: str = "runs"  # local folder or URI (s3://, gs://, hdfs://) of runs and prepared data
    seed: int = 0  # fixes initialisation and data order
    resume: bool = True  # continue an existing run of this name; false refuses to touch one


@dataclass
class TrainConfig:
    """How long to train and how often to look."""

    steps: int = 320  # optimizer steps of the whole run; the schedule spans them
    stop_at_step: int | None = None  # stop here with a checkpoint, the schedule still that of `steps`
    validate_every_steps: int = 200  # validation loss every so many steps and at the end; 0: never
    validation_seqs: int = 96  # sequences of the validation split that are scored each time
    nonfinite_skips: int = 3  # steps in a row whose gradient is NaN or infinite that change nothing; then roll back
    nonfinite_rollbacks: int = 1  # to the newest checkpoint for that, before the run is given up
    callback: str | None = None  # package.module:Class, called on every rank after each step; its state is kept
    collective_timeout_s: float = 600.0  # a collective that takes longer fails the group instead of hanging it


@dataclass
class ClusterConfig:
    """Where the workers run and how many there may be."""

    name: str = "local"  # shown in logs and reports
    address: str | None = None  # Ray address ("auto": the running cluster); null starts Ray on this machine
    local_nodes: int = 0  # with address null: raylets to start here as separate nodes; 0: one for everything
    min_workers: int = 1  # fewest ranks worth training on
    max_workers: int = 1  # most ranks used; with spare_workers=auto, its spares among them
    spare_workers: int | str | None = None  # auto: ranks that make no step faster; N: more; null: auto on GPUs, else 0
    cpus_per_worker: float = 1.0  # logical CPUs of a worker, by which Ray places it
    threads_per_worker: int | None = None  # torch's, on CPU; null: an equal share of the node's cores
    gpus_per_worker: int = 0  # 0: train on CPU with gloo; 1: on CUDA with NCCL
    backend: Backend = Backend.auto  # of collectives: gloo, nccl, or asynchronous, on CPU with NCCL's behaviour
    in_place: bool = True  # survivors keep their processes when ranks are lost or come back; false: all restart
    silence_s: float = 30.0  # a worker that does not answer for this long is ended
    stuck_s: float = 180.0  # a rank that others wait for in a phase of which nothing is known yet hangs then; 0: never
    drain_slow_s: float = 60.0  # a node that is slow for so long is left, where spares wait for its place; 0: never
    wait_for_workers_s: float = 3600.0  # below min_workers: how long to keep the state and wait for nodes
    probe_every_steps: int = 100  # each rank checks and times a short matrix product; 0: never
    verify_every_steps: int = 0  # all units compute one micro-batch, which shows one that is wrong; 0: never
    check_hardware: bool = True  # a worker whose GPU (by NVML) or whose node's link is broken does not join
    least_link_gb_per_s: float = 0.0  # a node that reaches others slower does not join; one TCP connection's GB/s
    quarantine_failures: int = 3  # of one node within an hour: it is left alone; 0: never
    quarantine_s: float = 3600.0  # for so long
    max_failures: int = 1000  # group restarts before the run gives up; -1: no limit
    dashboard: bool = True  # start the Ray dashboard with a local Ray
    dashboard_port: int = 8265  # of a local Ray; the next free port is taken when it is busy


@dataclass
class RopeScaling:
    """Llama 3.1's scaling of RoPE frequencies (arXiv:2407.21783; Meta's reference `apply_scaling`)."""

    factor: float = 8.0  # long wavelengths are stretched by this
    low_freq_factor: float = 1.0  # wavelengths above original_seq_len / this are stretched in full
    high_freq_factor: float = 4.0  # wavelengths below original_seq_len / this stay
    original_seq_len: int = 8192  # context length before the scaling


@dataclass
class ModelConfig:
    """A Llama 3 decoder. The defaults are the `debug` model, 5.0M parameters."""

    name: str = "debug"  # shown in logs and reports
    vocab_size: int = 4096  # rows of the embedding; at least the tokenizer's vocabulary
    dim: int = 256  # width of the residual stream
    num_layers: int = 4  # decoder blocks
    num_heads: int = 8  # query heads
    num_kv_heads: int = 4  # key and value heads; divides num_heads
    ffn_dim: int = 704  # hidden width of SwiGLU
    norm_eps: float = 1e-5  # of RMSNorm
    rope_theta: float = 500000.0  # RoPE base
    rope_scaling: RopeScaling | None = None  # Llama 3.1's frequency scaling; null: none
    tied: bool = False  # output projection shares the embedding
    document_attention: bool = False  # attend within documents only, positions counted from each one's beginning


@dataclass
class MixtureStage:
    """Weights of corpora from a number of tokens on, until the next stage begins."""

    from_tokens: float = 0  # tokens trained on before it; 0 for the first one
    weights: dict[str, float] = field(default_factory=dict)  # by name of data.corpora, relative to each other


@dataclass
class DataConfig:
    """Which corpora, how they are cut into samples, and how the stream runs."""

    recipe: str = "python_docs"  # data/<recipe>.py
    source: str | None = None  # file, folder, glob or URI (s3://, gs://, hf://) of recipes that read files
    tokenizer: str | None = None  # tokenizer.json of Hugging Face tokenizers; null: train one on the corpus
    end_of_text: str | None = None  # the tokenizer's token between documents; null: try the usual names
    vocab_size: int = 4096  # size of the tokenizer: most ids, and what training one aims at
    seq_len: int = 128  # tokens of a sample that are predicted; a stored row has one more
    validation_fraction: float = 0.005  # of documents, chosen by document hash
    min_score: float | None = None  # leave out documents of a lower score, or of none; null: keep all
    language: str | None = None  # leave out documents of another language, or of none; null: keep all
    min_language_score: float | None = None  # leave out documents with a lower language_score; null: keep all
    max_document_chars: int = 20_000_000  # leave out longer documents
    corpora: dict[str, str] = field(default_factory=dict)  # name: prepared folder or URI; none: what the recipe makes
    mixture: list[MixtureStage] = field(default_factory=list)  # weights of corpora over tokens; none: by their size
    rows_per_group: int = 64  # rows of a parquet row group, the unit of reading
    rows_per_shard: int = 8192  # rows of a shard file
    window_steps: int = 8  # global batches shuffled together, the unit Ray Data produces
    prefetch_windows: int = 2  # windows kept ready ahead of training
    stall_timeout_s: float = 20.0  # wait this long for the stream, then read the same rows directly
    storage_timeout_s: float = 900.0  # wait this long for rows of a storage that fails, before a rank gives up
    stream_cpus: float = 0.5  # logical CPUs of one window-producing task
    cache_dir: str | None = None  # on each node, for what is read from object stores; null: in the temporary folder
    cache_gb: float = 20.0  # about the most that is kept there


@dataclass
class OptimConfig:
    """The global batch, AdamW and its schedule. Never depends on the world size."""

    global_batch_seqs: int = 12  # sequences of one optimizer step
    num_slices: int = 12  # equal parts of a global batch, the unit that ranks share out
    lr: float = 3e-3  # peak learning rate
    min_lr_ratio: float = 0.1  # final learning rate over the peak
    beta1: float = 0.9  # AdamW; with moments=bfloat16 at most 0.99
    beta2: float = 0.95  # AdamW; with moments=bfloat16 at most 0.99
    eps: float = 1e-8  # AdamW; above 0
    weight_decay: float = 0.1  # decoupled, on matrices only
    moments: Dtype = Dtype.float32  # as which AdamW's moments are kept between steps; bfloat16 takes half the memory
    max_grad_norm: float = 1.0  # global gradient norm is clipped to this
    schedule: Schedule = Schedule.wsd  # shape of the learning rate over tokens
    warmup_fraction: float = 0.1  # of all tokens
    decay_fraction: float = 0.3  # of all tokens, wsd only


@dataclass
class ParallelConfig:
    """Techniques that change speed and memory, not what is computed (but for rounding)."""

    dtype: Dtype = Dtype.float32  # of compute and all-gathers; parameters, moments and reductions stay float32
    dp_replicate: int = 1  # HSDP replicas when they divide the world size, else 1; 1: FSDP over all ranks
    tp: int = 1  # ranks of a node that share each block's arithmetic, and between blocks its tokens
    cp: int = 1  # ranks that share each row's tokens, and gather keys and values for attention
    pp: int = 1  # ranks of a pipeline, each with a part of the blocks, in groups of a multiple of that; 0: by forecast
    least_pp: int = 0  # fewest ranks of a pipeline in groups of other sizes, planned anew; 0: as few as fit a GPU
    schedule: PipelineSchedule = PipelineSchedule.one_f_one_b  # with pp: order of forwards and backwards
    stages_per_rank: int = 2  # with schedule=interleaved: parts of the blocks that each rank has
    float8: Float8 = Float8.none  # recipe of the blocks' linear layers; emulated off-GPU
    bfloat16_tail: float = 0.0  # with float8: share of train.steps, the last ones, that are trained without
    float8_power_of_2: bool = False  # round float8's scales down to powers of two, as rowwise's always are
    compile: bool = False  # torch.compile each block
    compile_backend: str = "inductor"  # torch.compile backend
    compile_mode: CompileMode = CompileMode.default  # how long inductor may look for fast kernels
    compile_cache: str | None = None  # folder, path or URI, with what was compiled; its writers can run code in workers
    attention: AttentionKernel = AttentionKernel.auto  # kernel of attention over whole rows
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint.none  # what backward recomputes
    activation_budget: float = 1.0  # with compile: below 1, share of a block's activations that may be kept
    reshard_after_forward: bool = True  # free gathered parameters after each use; false: gather once a step
    cpu_offload: bool = False  # parameters, gradients and moments in the host's memory, and updated there: slow
    prefetch_blocks: int = 1  # blocks gathered ahead of the one that computes; more hides slow networks, takes memory
    separate_reduce: bool = False  # reduce gradients by a communicator of their own, beside the one that gathers
    slices_per_pass: int = 0  # most slices of one forward and backward; 0: what a GPU has room for, else 1
    loss_chunk_tokens: int = 2048  # tokens of a pass whose logits are held at a time; 0: those of all
    sync_every_micro_batch: bool | None = None  # reduce gradients each pass: less memory; null: where it must or pays


@dataclass
class CheckpointConfig:
    """Durable checkpoints: whichever of the three ways is due first counts. One is always written at the end."""

    every_steps: int | None = 200  # checkpoint every so many steps; null: not by steps
    every_minutes: float | None = None  # checkpoint every so many minutes; null: not by time
    automatic: bool = False  # checkpoint as often as wastes least, by what one costs and how often training fails
    mtbf_hours: float = 24.0  # hours between failures to expect before any is seen; snapshot.every_steps=auto uses it
    keep: int = 2  # newest checkpoints kept; at least 2
    keep_every_steps: int = 0  # checkpoints at multiples of so many steps are never deleted; 0: none is kept for good
    timeout_s: float = 1800.0  # of writing one, after which it is given up; the last one is tried again for so long


@dataclass
class SnapshotConfig:
    """Copies of the training state in the memory of the nodes."""

    every_steps: int | str = "auto"  # from one to the next; N: a lost node costs at most N; auto: measured; 0: none
    most_steps_lost: int = 16  # auto: that a lost node may cost, as far as the links between nodes keep up
    slots: int = 3  # of each rank, at least 2; with 2, there are no snapshots while a checkpoint is being written
    copies: int = 1  # of each node's snapshots on other nodes: so many nodes may be lost at once
    transport: SnapshotTransport = SnapshotTransport.tcp  # of these copies; nixl: RDMA
    folder: str = "/dev/shm"  # on every node, a file system in memory
    domain_label: str | None = "rack"  # Ray's label of nodes that fail together; a pod without it fails with its host
    abandon_after_s: float = 600.0  # with no driver and no worker, snapshots are kept for this long


@dataclass
class ObserveConfig:
    """What is shown and written while training."""

    tensorboard: bool = True  # write TensorBoard events into the run folder
    metrics: bool = True  # tell Prometheus of the run, through Ray's agents
    report_every_s: float = 30.0  # rewrite report.json and report.html this often while training
    profile_at_step: int | None = None  # the first rank's steps from this one on go through torch's profiler
    profile_steps: int = 3  # so many
    peak_tflops: float | None = None  # of one worker's device, for MFU; null: known per GPU, measured on CPU


@dataclass
class PretrainConfig:
    """Everything `jobs.pretrain` needs."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)


@dataclass
class DrillConfig:
    """Faults for a run on raylets of this machine; docs/drills.md has what a line of a plan may say."""

    name: str = "none"  # of the plan, shown in logs and reports
    plan: list[str] = field(default_factory=list)  # faults, a line each: "at step 20: kill_worker rank=1"
    plan_file: str | None = None  # plan.json of another drill, to have the same faults again
    faults: int = 0  # so many random ones, in place of a plan
    seed: int = 0  # draws random faults, and the victims that a plan does not name
    kinds: dict[str, float] = field(default_factory=dict)  # of random faults, with weights: {"kill_worker": 3}
    first_step: int = 20  # at which the first random fault is due
    every_steps: list[int] = field(default_factory=lambda: [10, 30])  # fewest and most from one to the next
    nodes: int = 3  # raylets at the start
    least_nodes: int = 2  # that random faults leave
    most_nodes: int = 3  # that random faults bring
    workers_on_node: int = 1  # a node's room
    hosts: DrillHosts = DrillHosts.together  # together: one address and memory; apart: namespaces of their own, as root
    memory_mb: int | None = None  # of /dev/shm, as root: all nodes' together, or each apart; null: as it is, or 1024
    host_memory_mb: int | None = None  # of each host apart, a limit of its control group; null: none
    host_silence_s: float = 10.0  # after which Ray takes a silent node for dead
    reference: bool = True  # compare losses with an undisturbed run of the same settings, made once
    compared_steps: int = 100  # over which losses must agree; beyond, the order of additions tells
    restarts: int = 0  # how often to start a job again that ended by itself; each counts as a manual action
    patience_s: float = 300.0  # without a step or a generation, the drill is given up
    stop_after_s: float | None = None  # stop the job in good order after this; the same command goes on with the drill


@dataclass
class DrillJobConfig(PretrainConfig):
    """Everything `jobs.drill` needs: a run, and what is to befall it."""

    drill: DrillConfig = field(default_factory=DrillConfig)


@dataclass
class Toleration:
    """Of a taint on Kubernetes nodes, as in a pod's spec."""

    key: str = ""  # of the taint
    operator: str = "Exists"  # or Equal
    value: str | None = None  # with Equal
    effect: str | None = None  # NoSchedule, PreferNoSchedule or NoExecute; null: all of them


@dataclass
class SubmitConfig:
    """How a run becomes a job of a cluster. What a site has in common is a file in conf/site."""

    action: SubmitAction = SubmitAction.render  # render, diff, apply, logs, status or stop
    backend: SubmitBackend = SubmitBackend.kuberay  # kuberay, or ray: a running cluster's job API
    follow: bool = True  # apply and stop: stay until the job has ended
    address: str | None = None  # backend=ray: http://host:8265; null: RAY_API_SERVER_ADDRESS, RAY_ADDRESS
    context: str | None = None  # kubectl's; null: its current one
    namespace: str = "regrow"  # of Kubernetes
    name: str | None = None  # of the RayJob; null: from run.name
    image: str = "registry.example.com/regrow"  # without a tag: <commit>-ray<version>, as k8s/README.md builds it
    image_pull_policy: str = "IfNotPresent"  # or Always, Never
    image_pull_secret: str | None = None  # by name
    service_account: str = "regrow"  # of all pods, see k8s/rbac.yaml
    priority_class: str | None = None  # of all pods
    queue: Queue = Queue.none  # what admits the job: none, kueue or volcano
    queue_name: str | None = None  # of Kueue's LocalQueue, or Volcano's queue
    kueue_elastic: bool = False  # Kueue's ElasticJobsViaWorkloadSlices is on: autoscale under Kueue too
    autoscale: bool = True  # start with nodes for cluster.min_workers, grow to max_workers; false: ask for all at once
    retries: int = 10  # new Ray clusters after a failed one; each goes on from the newest checkpoint
    deadline_s: int | None = None  # of one attempt; no checkpoint, cluster goes keep_s later; null: none
    keep_s: int = 600  # the cluster of a job that has ended, for a look at it
    workers_per_node: int = 8  # ranks, and GPUs, of a worker pod
    cpus_per_node: float | None = None  # of a worker pod; null: the workers' own, and some for data and snapshots
    memory_gb_per_worker: float = 64.0  # of a rank, beside /dev/shm
    object_store_gb: float = 16.0  # Ray's, in /dev/shm
    shm_gb: float | None = None  # /dev/shm of a worker pod; null: the snapshot plan, the object store, and some
    disk_gb: int = 200  # of a pod's /tmp
    head_cpus: float = 16.0  # of the head, which runs the driver and the coordinator, and no ranks
    head_memory_gb: float = 64.0  # of the head
    node_selector: dict[str, str] = field(default_factory=dict)  # labels of Kubernetes nodes for workers
    head_node_selector: dict[str, str] = field(default_factory=dict)  # and for the head and the submitter
    tolerations: list[Toleration] = field(default_factory=list)  # of workers, beside the one for GPU nodes
    rack_label: str | None = None  # label of Kubernetes nodes that fail together; becomes Ray's snapshot.domain_label
    topology_key: str | None = None  # label of Kubernetes nodes; workers only where it is the same, as a zone
    network: Network = Network.plain  # plain, efa or infiniband
    network_resource: str | None = None  # of the device plugin; null: vpc.amazonaws.com/efa, rdma/hca_shared_devices_a
    network_devices: int | None = None  # of them for a worker pod; null: 32 of EFA, 1 of InfiniBand
    socket_interfaces: str = "^docker,lo,veth"  # NCCL_SOCKET_IFNAME
    redis_address: str | None = None  # for the head's tables; saves a run nothing (k8s/README.md); null: none
    redis_secret: str | None = None  # its password, <secret>/<key>
    auth: bool = True  # Ray's token authentication; an open dashboard runs any caller's code
    auth_secret: str | None = None  # with the token under auth_token; null: KubeRay makes one
    network_policy: bool = True  # keep strangers from the run's pods, where the cluster's network enforces policies
    operator_namespace: str | None = None  # KubeRay's, let in to 8265; null: its pods by their label, wherever they are
    monitoring_namespace: str | None = "monitoring"  # Prometheus', let in to the metrics' ports; null: none
    env_secret: str | None = None  # by name; its keys become environment variables, as for an object store
    env: dict[str, str] = field(default_factory=dict)  # more environment variables of all pods; no secrets
    volume_claim: str | None = None  # PersistentVolumeClaim, mounted at run.storage_path
    drain_s: int = 60  # from a pod's notice until its workers have left
    grace_s: int | None = None  # terminationGracePeriodSeconds of a worker pod; null: drain_s and time to end
    idle_timeout_s: int | None = None  # the autoscaler removes a node without work; null: above the longest restart
    host_silence_s: float = 10.0  # after which Ray takes a silent node for dead
    stop_s: int | None = None  # for the checkpoint of a job that is stopped; null: checkpoint.timeout_s, time to end


@dataclass
class SubmitJobConfig(PretrainConfig):
    """Everything `jobs.submit` needs: a run, and where it goes."""

    submit: SubmitConfig = field(default_factory=SubmitConfig)


@dataclass
class PlanConfig:
    """What jobs.plan takes the hardware for, which it does not look at."""

    device: str | None = None  # NVIDIA's name of the GPU, as H100 or "H100 PCIe"; null: from cluster.name
    memory_gib: float | None = None  # of one worker's device; null: the GPU's, or a share of this machine's
    workers_per_node: int = 8  # of a cluster that is not this machine
    network_gb_per_s: float = 50.0  # of one worker to other nodes, one way, in gigabytes
    keepers_gb_per_s: float = 3.0  # of a node's keeper to another node, one way, over TCP, in gigabytes


@dataclass
class PlanJobConfig(PretrainConfig):
    """Everything `jobs.plan` needs: a run, and what it is to run on."""

    plan: PlanConfig = field(default_factory=PlanConfig)


@dataclass
class FaultsConfig:
    """How often nodes fail, and of what; a file of conf/simulate/faults."""

    name: str = "none"  # shown in reports
    per_node_day: str = "0"  # a figure: failures of a node in a day
    mix: dict[str, float] = field(default_factory=dict)  # kind of fault: its weight among them, as a count
    planned_per_day: str = "0"  # a figure: planned stops of the job in a day
    single: bool = False  # closed forms instead: one process dies every simulate.mtbf_s, all policies cost the same


@dataclass
class PolicyConfig:
    """What is done about a fault; a file of conf/simulate/policy."""

    shrinks: bool = True  # go on with fewer nodes; false: wait for a node in the place of each
    in_place: bool = True  # survivors keep their processes; false: all restart
    replica_gpus: int = 0  # above 0: replica groups of so many, of which the others go on while one forms again
    memory: bool = True  # snapshots are in other nodes' memory; false: what was checkpointed counts
    automatic: bool = False  # without memory: checkpoint as often as wastes least, by Daly's formula
    copies_lost_at: int = 2  # so many nodes at once take a snapshot and all its copies
    park: bool = True  # run the fewest units that have as few passes: the others are spares
    expels_corrupt: bool = False  # a host that computed wrong once does not come back
    rolling: bool = False  # planned stops take a node at a time
    retire_after: int = 0  # a node that failed so often is replaced for good; 0: never, as regrow has it
    figures: dict[str, str] = field(default_factory=dict)  # of this policy, in place of simulate.figures


@dataclass
class SimulateConfig:
    """What jobs.simulate plays, and how often. docs/simulating.md says what a figure is."""

    days: float = 60.0  # of each run
    replicas: int = 32  # runs of each policy
    seed: int = 0  # draws faults; the same seed gives the same bytes
    gpus: int | None = None  # of the job; null: of the group that a run forms of cluster.max_workers
    gpus_per_node: int | None = None  # null: plan.workers_per_node, or one where a cluster has fewer
    unit_gpus: int | None = None  # of a unit; null: parallel.tp x parallel.cp x parallel.pp
    num_slices: int | None = None  # of a global batch; null: optim.num_slices
    spares: list[int] = field(default_factory=list)  # nodes that wait, one count or several to compare; none: cluster's
    repair: float = 1.0  # nodes are away so many times as long as figures say
    domains: bool | None = None  # regrow's copies are in other racks; null: where snapshot.domain_label is set
    evict: float | None = None  # seconds until regrow leaves a slow node; null: by cluster.drain_slow_s; 0: never
    sdc: float | None = None  # seconds that regrow does not see wrong results; null: by cluster.verify_every_steps
    goal: float | None = None  # of effective; null: 0.98 up to 16,384 GPUs, 0.95 above
    sweep: bool = True  # also try each input over its range, and fewer and more spares: for the page
    runs: list[str] = field(default_factory=list)  # run folders whose logs give figures, in place of published ones
    replay: str | None = None  # a run folder: play its own faults again, and compare
    out: str | None = None  # folder of simulate.json and simulate.html; null: runs/simulate
    mtbf_s: float = 3600.0  # simulate/faults=single: mean seconds between failures
    restart_s: float = 300.0  # simulate/faults=single: seconds from a failure to training
    interval_s: float = 600.0  # simulate/faults=single: seconds of training between checkpoints
    write_s: float = 30.0  # simulate/faults=single: seconds that a checkpoint stops training for
    faults: FaultsConfig = field(default_factory=FaultsConfig)  # which faults: simulate/faults=NAME
    figures: dict[str, str] = field(default_factory=dict)  # numbers with their sources
    own: dict[str, str] = field(default_factory=dict)  # figures of in_place that simulate/world sets
    own_copies_lost_at: int | None = None  # of in_place, that simulate/world sets
    policy: dict[str, PolicyConfig] = field(default_factory=dict)  # what is compared: simulate/policy=[NAME,...]


@dataclass
class SimulateJobConfig(PretrainConfig):
    """Everything `jobs.simulate` needs: a run, what it is to run on, and what may befall it there."""

    plan: PlanConfig = field(default_factory=PlanConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
