"""What goes over HTTP, as `/docs` shows it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_SEED = 2**63 - 1


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


_Number = BeforeValidator(_no_truth_value)  # JSON's `true` would pass as 1; last, or the schema loses the range


class Parameters(BaseModel):
    """What a request may choose; the rest is the server's configuration."""

    model_config = ConfigDict(extra="forbid")

    top_k: Annotated[int, Field(ge=1, description="K, clients routed"), _Number] | None = None
    snr_db: Annotated[float, Field(ge=-60, le=120, description="SNR of the channel [dB]"), _Number] | None = None
    channel: Annotated[Literal["air", "ideal", "digital"], Field(description="Kind of channel")] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED, description="Fading and noise follow from it"), _Number] | None = None
    view: Annotated[Literal["mask", "color", "overlay"], Field(description="What a PNG answer shows")] = "mask"


class JsonRequest(BaseModel):
    """The Hugging Face form of a request."""

    model_config = ConfigDict(extra="forbid")

    inputs: Annotated[str, Field(description="The image file, base64")]
    parameters: Parameters = Parameters()


class Error(BaseModel):
    """Every error has this form."""

    error: str
    detail: Any = None


class Segment(BaseModel):
    """One class that is present in the image."""

    label: str
    id: int
    score: float = Field(description="mean softmax over its pixels")
    area: int = Field(description="pixels")
    mask: str = Field(description="base64 PNG, 255 where the class is")


class Expert(BaseModel):
    """One client's part; null where it did not answer."""

    id: int
    js: float | None = Field(description="D_JS(Q || P_j) [nats]")
    score: float | None
    probability: float | None
    selected: bool = Field(description="in S, before truncation")
    weight: float = Field(description="fusion weight beta_j")
    gamma: list[float] | None = Field(description="channel estimate [re, im], where it transmitted")
    version: int | None = Field(description="renewals its FRL had seen")


class RoutingFacts(BaseModel):
    """Who answered, and whether somebody could not."""

    experts: list[Expert]
    degraded: bool
    reason: str | None


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
    """The answer to POST /segment."""

    id: str
    model: str
    width: int
    height: int
    segments: list[Segment]
    mask: str = Field(description="base64 palette PNG; pixel values are class ids")
    routing: RoutingFacts
    channel: ChannelFacts
    communication: dict[str, int | None]
    timings_ms: dict[str, float]


class ScaleRequest(BaseModel):
    """A change of the number of experts, or of instances of some of them."""

    model_config = ConfigDict(extra="forbid")

    experts: Annotated[int, Field(ge=1, le=100_000), _Number] | None = None
    replicas: dict[int, Annotated[int, Field(ge=1, le=64), _Number]] = {}
