import builtins

import pytest
import torch
import torch.nn.functional as F

from airmoe_ray.baselines.single import SINGLE_MODELS, inference_parameters
from airmoe_ray.baselines.single.bisenetv2 import BiSeNetV2
from airmoe_ray.baselines.single.hrda import HRDA
from airmoe_ray.errors import UserError

pytest.importorskip("transformers")
KEYS = sorted(SINGLE_MODELS)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def outputs(model, images):
    """Logits, then those of auxiliary heads."""
    out = model(images)
    return [out] if isinstance(out, torch.Tensor) else [out[0], *out[1]]


def parameters_of(*layers):
    """Sum over convolutions (inputs, outputs, kernel, groups), each with a scale and a shift per output."""
    return sum(outputs * (inputs // groups) * size**2 + 2 * outputs for inputs, outputs, size, groups in layers)


@pytest.mark.parametrize("key", ["seaformer", "segformer", "topformer"])
def test_parameters_are_as_many_as_the_paper_states(key):
    known = SINGLE_MODELS[key]
    with torch.device("meta"):
        count = inference_parameters(known.build(known.published_classes)) / 1e6
    assert count == pytest.approx(known.published_millions, abs=0.05)  # papers round to a tenth


def test_parameters_of_segnet_are_those_of_vgg16_and_its_mirror():
    vgg16 = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), *[(256, 256)] * 2, (256, 512), *[(512, 512)] * 5]
    vgg16_features = 14_714_688  # torchvision's own figure, with biases; the paper's 14.7 million
    assert sum(9 * i * o + o for i, o in vgg16) == vgg16_features
    mirrored = [(o, i) for i, o in vgg16[1:]]  # the last layer gives classes instead of colours
    expected = parameters_of(*((i, o, 3, 1) for i, o in (*vgg16, *mirrored))) + 64 * 19 * 9 + 19
    with torch.device("meta"):
        count = inference_parameters(SINGLE_MODELS["segnet"].build(19))
    assert count == expected
    biases = sum(o for _, o in (*vgg16, *mirrored))
    # ENet's paper has 29.46 million, and does not say for how many classes
    assert (count + biases) / 1e6 == pytest.approx(SINGLE_MODELS["segnet"].published_millions, abs=0.01)


def test_parameters_of_bisenetv2_are_the_sum_over_its_published_layers():
    detail = [(3, 64, 3, 1), *[(64, 64, 3, 1)] * 4, (64, 128, 3, 1), *[(128, 128, 3, 1)] * 2]
    stem = [(3, 16, 3, 1), (16, 8, 1, 1), (8, 16, 3, 1), (32, 16, 3, 1)]
    gather = []
    for c, o, repeats in ((16, 32, 1), (32, 64, 1), (64, 128, 3)):
        gather += [
            (c, c, 3, 1),
            (c, 6 * c, 3, c),
            (6 * c, 6 * c, 3, 6 * c),
            (6 * c, o, 1, 1),
            (c, c, 3, c),
            (c, o, 1, 1),
        ]
        gather += [(o, o, 3, 1), (o, 6 * o, 3, o), (6 * o, o, 1, 1)] * repeats
    context = [(128, 128, 1, 1), (128, 128, 3, 1)]
    aggregation = [*[(128, 128, 3, 128)] * 2, *[(128, 128, 3, 1)] * 3]
    head = [(128, 1024, 3, 1)]
    expected = parameters_of(*detail, *stem, *gather, *context, *aggregation, *head) + 2 * 128**2 + 1024 * 19 + 19
    count = inference_parameters(SINGLE_MODELS["bisenetv2"].build(19))
    assert count == expected
    assert count / 1e6 == pytest.approx(SINGLE_MODELS["bisenetv2"].published_millions, abs=0.005)


def test_parameters_of_attanet_are_those_of_resnet18_and_its_published_layers():
    resnet18, classifier = 11_689_512, 512 * 1000 + 1000  # torchvision's own figure
    fusion = [(640, 128, 1, 1), (128, 128, 1, 1)]
    strips = [(128, 64, 1, 1), (128, 64, 1, 1), (128, 128, 1, 1)]
    others = [(256, 128, 3, 1), (512, 128, 3, 1), *[(128, 128, 3, 1)] * 3]
    expected = resnet18 - classifier + parameters_of(*fusion, *strips, *others) + 128 * 19
    count = inference_parameters(SINGLE_MODELS["attanet"].build(19))
    assert count == expected
    assert count / 1e6 == pytest.approx(SINGLE_MODELS["attanet"].published_millions, abs=0.005)


def test_parameters_of_hrda_at_the_published_size_are_those_of_its_encoder_and_heads():
    with torch.device("meta"):  # 86 million numbers that nobody needs
        model = HRDA(19, size="b5")
    embedding = sum((channels + 1) * 256 for channels in (64, 128, 320, 512))
    aspp = [(1024, 256, 1, 1), *[(1024, 1024, 3, 1024), (1024, 256, 1, 1)] * 3, (1024, 256, 3, 1)]
    classify = 256 * 19 + 19
    heads = 2 * embedding + parameters_of(*aspp, (1024, 256, 1, 1)) + 2 * classify
    encoder = sum(parameter.numel() for parameter in model.encoder.parameters())
    assert encoder / 1e6 == pytest.approx(81.4, abs=0.05)  # SegFormer's paper
    assert inference_parameters(model) == encoder + heads
    assert inference_parameters(model) / 1e6 == pytest.approx(SINGLE_MODELS["hrda"].published_millions, abs=0.05)


@pytest.mark.parametrize("key", KEYS)
def test_logits_have_the_size_of_the_image_whatever_that_is(key):
    model = SINGLE_MODELS[key].build(4).eval()
    with torch.no_grad():
        for height, width in ((97, 131), (64, 65)):
            assert model(torch.randn(1, 3, height, width)).shape == (1, 4, height, width)


@pytest.mark.parametrize("key", KEYS)
def test_the_loss_reaches_every_parameter_and_each_output_has_the_size_of_the_image(key):
    model = SINGLE_MODELS[key].build(3).train()
    # at stride 64 a smaller image would leave one row, along which attention has nothing to choose
    images = torch.randn(2, 3, 65, 97) if key == "segnet" else torch.randn(2, 3, 129, 193)
    found = outputs(model, images)
    assert len(found) == 1 + len(getattr(model, "aux", ()))
    assert {out.shape for out in found} == {(2, 3, *images.shape[-2:])}
    sum(F.cross_entropy(out, torch.randint(3, (2, *images.shape[-2:]))) for out in found).backward()
    unreached = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert unreached == []


@pytest.mark.parametrize("key", KEYS)
def test_two_images_are_learned_by_heart(key):
    side = 32 if key == "segnet" else 64  # SegNet is large and slow
    labels = torch.zeros(2, side, side, dtype=torch.long)
    labels[0, side // 2 :], labels[1, :, : side // 2] = 1, 2
    images = F.one_hot(labels, 3).permute(0, 3, 1, 2) * 2.0 - 0.7 + 0.3 * torch.randn(2, 3, side, side)
    model = SINGLE_MODELS[key].build(3).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        found = outputs(model, images)
        sum(F.cross_entropy(out, labels) for out in found).backward()
        optimizer.step()
        losses.append(F.cross_entropy(found[0], labels).item())
    assert sum(losses[-3:]) / 3 < 0.4 * losses[0]


def test_auxiliary_heads_are_for_training_only():
    model = BiSeNetV2(3)
    images = torch.randn(2, 3, 64, 64)
    assert len(outputs(model.train(), images)) == 5
    assert len(outputs(model.eval(), images)) == 1
    assert sum(p.numel() for p in model.parameters()) - inference_parameters(model) == sum(
        p.numel() for p in model.aux.parameters()
    )


def test_hrda_shows_detail_only_where_its_crop_lies():
    """With all attention on detail and context silent, logits outside the crop must be nought."""
    model = HRDA(2).train()
    segment = model.segment.forward
    calls = iter((0.0, 1.0))  # context first, then detail
    model.segment.forward = lambda levels: segment(levels) * 0 + next(calls)
    model.attend.forward = lambda levels: torch.full_like(segment(levels), 50.0)
    with torch.no_grad():
        seen = model(torch.randn(1, 3, 128, 128))
    assert seen.max() == pytest.approx(1, abs=1e-4)
    # the crop has half of each side; interpolation blurs its rim by one cell of eight pixels
    assert (seen[0, 0] > 0.5).float().mean() == pytest.approx(0.25, abs=0.06)


def test_hrda_covers_the_whole_image_when_it_is_scored():
    model = HRDA(2).eval()
    segment = model.segment.forward
    calls = iter((0.0, 1.0))
    model.segment.forward = lambda levels: segment(levels) * 0 + next(calls)
    model.attend.forward = lambda levels: torch.full_like(segment(levels), 50.0)
    with torch.no_grad():
        assert torch.allclose(model(torch.randn(1, 3, 97, 131)), torch.tensor(1.0), atol=1e-4)


def test_without_transformers_one_line_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **settings):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest, **settings)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"airmoe-ray\[experiments\]"):
        SINGLE_MODELS["segformer"].build(3)
