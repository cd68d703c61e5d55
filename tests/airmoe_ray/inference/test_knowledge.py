"""What clients know, in words, from who was routed where."""

import torch

from airmoe_ray.data.scenes import Scenes
from airmoe_ray.inference.knowledge import Knowledge, in_words
from airmoe_ray.runtime.workers import OneWorker


def test_a_client_is_named_after_the_domains_that_make_up_most_of_its_inputs() -> None:
    knowledge = Knowledge(Scenes(0, 20), clients=4)  # clear, fog, rain, night, snow, by turns
    # client 1 gets what is clear, client 2 fog and rain, client 3 a bit of everything else, client 0 nothing
    first = {0: 1, 1: 2, 2: 2, 3: 3, 4: 3}
    for start in (0, 10):
        indices = list(range(start, start + 10))
        second_choice = [0] * 10  # which does not count
        selected = torch.tensor([[first[i % 5], other] for i, other in zip(indices, second_choice, strict=True)])
        knowledge.add(indices, selected)
    assert knowledge.words(OneWorker()) == ["", "clear", "fog and rain", "night and snow"]
    assert knowledge.words(OneWorker()) == []  # every epoch is counted by itself


def test_where_nobody_was_routed_there_is_nothing_to_say() -> None:
    knowledge = Knowledge(Scenes(0, 20), clients=4)
    knowledge.add([0, 1], torch.empty(0, dtype=torch.int64))
    assert knowledge.words(OneWorker()) == []


def test_domains_of_one_pattern_share_its_words() -> None:
    domains = [("{} drawings", "night"), ("{} streets", "boston"), ("{} drawings", "rain")]
    assert in_words(domains) == "night and rain drawings, boston streets"
