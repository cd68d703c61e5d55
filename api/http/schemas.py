"""What goes over HTTP: these models are what routes take and return, and what `/docs` shows."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from airmoe_ray.model.routing import Participant
from airmoe_ray.radio.ledger import Ledger

MAX_SEED = 2**63 - 1


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


def _participant(value: Any) -> Any:
    """A client's number or the word cloud, in one step: a union's own complaint has a line per member."""
    if value == "cloud" or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) <= 9:
        return int(value)
    raise ValueError("expected the number of a client, or cloud")


_Who = BeforeValidator(_participant)
_Number = BeforeValidator(_no_truth_value)  # JSON's `true` would pass as 1; last, or the schema loses the range


Format = Literal["png", "rle", "polygons", "huggingface"]


class Parameters(BaseModel):
    """What a request may choose; the rest is the server's configuration."""

    model_config = ConfigDict(extra="forbid")

    top_k: Annotated[int, Field(ge=1, description="K, clients routed"), _Number] | None = None
    snr_db: Annotated[float, Field(ge=-60, le=120, description="SNR of the channel [dB]"), _Number] | None = None
    channel: Annotated[Literal["air", "ideal", "digital"], Field(description="Kind of channel")] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED, description="Fading and noise follow from it"), _Number] | None = None
    only: Annotated[Participant, Field(description="The answer of this client alone, or cloud's head"), _Who] | None = (
        None
    )
    without: Annotated[Participant, Field(description="The answer without this client, or cloud"), _Who] | None = None
    view: Annotated[Literal["mask", "color", "overlay"], Field(description="What a PNG answer shows")] = "mask"
    size: Annotated[Literal["image", "model"], Field(description="Size of masks: the image's, or the model's")] = (
        "image"
    )
    format: Annotated[Format, Field(description="How JSON holds the masks of segments")] = "png"
    threshold: Annotated[float, Field(ge=0, le=1, description="Lowest score of a segment in JSON"), _Number] | None = (
        None
    )
    subtask: Annotated[Literal["semantic"], Field(description="As Hugging Face names what is done here")] | None = None


class JsonRequest(BaseModel):
    """A request in the form of Hugging Face's inference API."""

    model_config = ConfigDict(extra="forbid")

    inputs: Annotated[str, Field(description="The image file, base64")]
    parameters: Parameters = Parameters()


class Error(BaseModel):
    """The body of every error."""

    error: str
    detail: Any = None


class FileError(Error):
    """What stands in a list of answers for a file that has none."""

    status: int = Field(description="the code that the file alone would have had")


class Rle(BaseModel):
    """A mask in COCO's run-length encoding."""

    size: Annotated[list[int], Field(min_length=2, max_length=2, description="height, width")]
    counts: str = Field(description="runs down the columns, as pycocotools packs them")


class Segment(BaseModel):
    """One class that is present in the image."""

    label: str
    id: int
    score: float = Field(description="mean softmax over its pixels")
    area: int = Field(description="pixels")
    mask: str | Rle | list[list[int]] = Field(
        description="base64 PNG, 255 where the class is; or by `format` COCO's RLE or polygons"
    )


class LabelledMask(BaseModel):
    """One class, in the form of Hugging Face's image segmentation."""

    label: str
    score: float
    mask: str = Field(description="base64 PNG, 255 where the class is")


@dataclass(frozen=True)  # not a model: those take eight times as long to make, and there may be a thousand of these
class Expert:
    """One client's part; null where it did not answer."""

    id: int
    js: Annotated[float | None, Field(description="D_JS(Q || P_j) [nats]")]
    score: float | None
    probability: float | None
    selected: Annotated[bool, Field(description="in S, before truncation")]
    weight: Annotated[float, Field(description="fusion weight beta_j")]
    gamma: Annotated[list[float] | None, Field(description="channel estimate [re, im], where it transmitted")]
    version: Annotated[int | None, Field(description="renewals its FRL had seen")]


FaultName = Literal["late", "lost", "invalid", "failed", "quarantined", "restarting"]
"""What was wrong with a client: the members of `Fault`, in small letters."""


class RoutingFacts(BaseModel):
    """Who answered, and whether somebody could not."""

    experts: list[Expert]
    degraded: bool
    reason: str | None = Field(description="why it is degraded, as a sentence; programs read faults and all_faded")
    faults: dict[int, FaultName] = Field(description="by client: why it could not take part or confirm a renewal")
    all_faded: bool = Field(description="all routed clients were in deep fade; the strongest transmitted all the same")


class ChannelFacts(BaseModel):
    """What the air did."""

    kind: str
    snr_db: float
    rho: float
    truncated: list[int]
    noise_power: float
    nmse: float
    channel_uses: int
    seed: int


class SegmentResponse(BaseModel):
    """What POST /segment returns as JSON."""

    id: str
    model: str
    width: int
    height: int
    segments: list[Segment]
    mask: str = Field(description="base64 palette PNG; pixel values are class ids")
    routing: RoutingFacts
    channel: ChannelFacts
    communication: Ledger
    timings_ms: dict[str, float]


OneAnswer = SegmentResponse | list[LabelledMask]
AnyAnswer = OneAnswer | list[OneAnswer | FileError]
"""What POST /segment returns as JSON: of one image, or of each file of several."""


class ScaleRequest(BaseModel):
    """A change of the number of experts, or of the hosts (owner and replicas) of some of them."""

    model_config = ConfigDict(extra="forbid")

    experts: Annotated[int, Field(ge=1, le=100_000), _Number] | None = None
    replicas: dict[int, Annotated[int, Field(ge=1, le=64), _Number]] = {}
