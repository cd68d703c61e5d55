"""A draw is a function of (seed, purpose, id, client), and of nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airmoe_ray.config import ChannelConfig
from airmoe_ray.radio.channel import draw_noise
from airmoe_ray.runtime.rng import complex_normal_BN, generator, philox_4x32, torch_generator, training_id

IDS = st.integers(0, 2**64 - 1)
MANY = 40_000


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    low, high = (int(word, 16) for word in key.split())
    counters = np.array([int(word, 16) for word in counter.split()], dtype=np.uint32)
    answer = philox_4x32(counters, low | high << 32)
    assert [f"{word:08x}" for word in answer] == words.split()


@settings(deadline=None, max_examples=30)
@given(ids=st.lists(IDS, min_size=1, max_size=6), clients=st.integers(1, 9), fewer=st.integers(1, 9), data=st.data())
def test_a_draw_does_not_depend_on_the_batch_or_on_the_number_of_clients(
    ids: list[int], clients: int, fewer: int, data: st.DataObject
) -> None:
    row, fewer = data.draw(st.integers(0, len(ids) - 1)), min(fewer, clients)
    batch_BN = complex_normal_BN(ids, clients, seed=3, purpose="fading")
    alone_BN = complex_normal_BN([ids[row]], fewer, seed=3, purpose="fading")
    assert np.array_equal(batch_BN[row, :fewer], alone_BN[0])


def test_seed_purpose_id_and_client_each_change_the_draw() -> None:
    ids = [0, 1, 2, 2**32, 2**32 + 1, 2**63, 2**64 - 2, 2**64 - 1]
    draws = [
        complex_normal_BN(ids, 5, seed=seed, purpose=purpose) for seed in (0, 1, 2**40) for purpose in ("fading", "x")
    ]
    values = np.stack(draws).ravel()
    assert len(np.unique(values)) == len(values) == 3 * 2 * 8 * 5


def test_complex_normal_has_the_moments_of_a_circular_gaussian_of_unit_power() -> None:
    z = complex_normal_BN(range(MANY // 4), 4, seed=1, purpose="fading").ravel()
    error = 4 / np.sqrt(MANY)
    assert abs(z.mean()) < error
    assert abs((z**2).mean()) < 2 * error
    assert np.mean(np.abs(z) ** 2) == pytest.approx(1, abs=error)
    assert np.var(z.real) == pytest.approx(0.5, abs=error)
    assert np.mean(np.abs(z) ** 4) == pytest.approx(2, abs=5 * error)
    assert np.mean(np.abs(z) ** 2 > 2) == pytest.approx(np.exp(-2), abs=error)


def test_different_purposes_ids_and_clients_are_uncorrelated() -> None:
    fading = complex_normal_BN(range(MANY // 4), 4, seed=1, purpose="fading")
    other = complex_normal_BN(range(MANY // 4), 4, seed=1, purpose="random-routing")
    pairs = {"purpose": (fading, other), "id": (fading[1:], fading[:-1]), "client": (fading[:, 1:], fading[:, :-1])}
    for a, b in pairs.values():
        assert abs(np.mean(a * b.conj())) < 4 / np.sqrt(a.size)
        assert abs(np.mean(a * b)) < 4 / np.sqrt(a.size)


@pytest.mark.parametrize("request_id", [0, 1, 2**32 - 1, 2**63, 2**64 - 2])
def test_noise_streams_of_neighbouring_ids_do_not_overlap(request_id: int) -> None:
    words = [generator(0, "noise", i).bit_generator.random_raw(20_000) for i in (request_id, request_id + 1)]
    assert len(np.intersect1d(*words)) == 0


@settings(deadline=None, max_examples=20)
@given(ids=st.lists(IDS, min_size=2, max_size=5, unique=True))
def test_noise_of_an_input_follows_from_its_id_alone(ids: list[int]) -> None:
    channel = ChannelConfig()
    batch = draw_noise(ids, (2, 3), config=channel, seed=5)
    for row, request_id in enumerate(ids):
        assert batch[row].equal(draw_noise([request_id], (2, 3), config=channel, seed=5)[0])
    assert len(np.unique(batch.numpy())) == 6 * len(ids)
    assert not batch.equal(draw_noise(ids, (2, 3), config=channel, seed=6))


@given(
    first=st.tuples(st.integers(0, 2**20), st.integers(0, 2**40 - 1)),
    second=st.tuples(st.integers(0, 2**20), st.integers(0, 2**40 - 1)),
)
def test_training_ids_of_different_epochs_or_samples_differ(first: tuple[int, int], second: tuple[int, int]) -> None:
    assert (training_id(*first) == training_id(*second)) == (first == second)
    assert 0 <= training_id(*first) < 2**64


def test_a_torch_stream_replays_and_belongs_to_one_purpose() -> None:
    def draw(seed: int, purpose: str) -> float:
        return float(torch_generator(seed, purpose).initial_seed())

    assert draw(1, "init/query") == draw(1, "init/query")
    assert len({draw(1, "init/query"), draw(2, "init/query"), draw(1, "init/frl")}) == 3
