"""A call that mypy accepts is one that its actor takes: every stub has the signatures of its actor."""

import inspect
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from actors.errors import Fault, InvalidOutputError
from actors.processes.channel import Channel
from actors.processes.cloud import Cloud
from actors.processes.expert_host import ExpertHost
from actors.processes.learning_host import LearningHost
from actors.rounds.calls import Endpoint, Message, Ref, seal, unseal
from actors.rounds.messages import Gains
from actors.rounds.roster import Roster
from actors.rounds.stubs import ActorCalls, ChannelCalls, CloudCalls, HostCalls, LearningHostCalls
from actors.training.feature_pool import FeatureWorker, WorkerCalls
from actors.training.progress_relay import ProgressRelay, RelayCalls
from airmoe_ray.training.pixel_losses import Labelling
from airmoe_ray.training.warm_start import OwnData

ENDPOINTS: list[tuple[type[ActorCalls], type[Endpoint]]] = [
    (HostCalls, ExpertHost),
    (LearningHostCalls, LearningHost),
    (ChannelCalls, Channel),
    (CloudCalls, Cloud),
]
OTHERS = [(WorkerCalls, FeatureWorker), (RelayCalls, ProgressRelay)]
IMPORTED_FOR_TYPES = {
    "Roster": Roster,
    "OwnData": OwnData,
    "Labelling": Labelling,
}  # the stubs' module itself does not import them


def calls_of(stub: type[Any]) -> dict[str, Any]:
    """Every method of a stub that calls the actor."""
    own = {name: method for name, method in inspect.getmembers(stub, inspect.isfunction) if not name.startswith("_")}
    return {name: method for name, method in own.items() if not hasattr(ActorCalls, name)}


def signature(method: Any) -> dict[str, Any]:
    """Types by name of parameter, in order, and of what is returned."""
    return get_type_hints(method, localns=IMPORTED_FOR_TYPES)


def delivered(hint: Any) -> Any:
    """What arrives of a `Ref[T]`: the T."""
    return get_args(hint)[0] if get_origin(hint) is Ref else hint


def returned(hint: Any) -> Any:
    """What a method returns for a reply: `emit` puts what went wrong in the place of one that another actor takes."""
    of = delivered(hint)
    return get_args(of)[0] if Fault in get_args(of) else of


def messages_of(actor: type[Endpoint]) -> set[type[Message]]:
    """Every type of message that an actor receives."""
    hint = signature(actor.receive)["message"]
    return set(get_args(hint)) if get_origin(hint) in (Union, type(int | str)) else {hint}


CALLS = [(stub, actor, name) for stub, actor in [*ENDPOINTS, *OTHERS] for name in calls_of(stub)]


@pytest.mark.parametrize(("stub", "actor", "name"), CALLS, ids=[f"{s.__name__}.{name}" for s, _, name in CALLS])
def test_every_call_of_a_stub_is_one_of_its_actor(stub: type[Any], actor: type[Any], name: str) -> None:
    called, taken = signature(calls_of(stub)[name]), signature(getattr(actor, name))
    waited_for = get_origin(called["return"]) is Ref  # a stub may leave out the reference to nothing
    assert waited_for or taken["return"] is type(None)
    reply = {"return": returned(called.pop("return"))}
    assert [*((key, delivered(hint)) for key, hint in called.items()), *reply.items()] == list(taken.items())


@pytest.mark.parametrize(("stub", "actor"), [*ENDPOINTS, OTHERS[0]])
def test_a_stub_starts_its_actor_with_what_the_constructor_takes(stub: type[Any], actor: type[Any]) -> None:
    given, taken = signature(stub.start), signature(actor.__init__)
    assert {name: hint for name, hint in given.items() if name not in ("actor", "return")} == {
        name: hint for name, hint in taken.items() if name != "return"
    }


@pytest.mark.parametrize(("stub", "actor"), ENDPOINTS)
def test_every_message_of_a_stub_reaches_the_namesake_of_its_call(
    stub: type[ActorCalls], actor: type[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = {name: signature(method).get("message") for name, method in calls_of(stub).items()}
    sent = {name: message for name, message in sent.items() if message is not None}
    assert set(sent.values()) == messages_of(actor)
    called: list[str] = []
    for name in sent:
        monkeypatch.setattr(actor, name, lambda *_, name=name: called.append(name))
    for message in sent.values():
        actor.receive(object.__new__(actor), object.__new__(message))
    assert called == list(sent)


def test_a_message_is_packed_once_and_arrives_as_it_was() -> None:
    class Echo(Endpoint):
        def receive(self, message: Any, *beside: Any) -> object:
            return [message, *beside]

    message = Gains("r")
    assert message.packed is message.packed
    assert unseal(Echo().exchange(message.packed, seal(7), 8.0)) == [message, 7, 8.0]
    assert Echo().emit(message.packed, 9) == [message, 9]


def test_what_goes_wrong_travels_in_the_place_of_a_reply_that_another_actor_takes() -> None:
    class Broken(Endpoint):
        def receive(self, message: Any, *beside: Any) -> object:
            raise InvalidOutputError("as ordered")

    assert Broken().emit(seal(Gains("r"))) is Fault.INVALID
    with pytest.raises(InvalidOutputError):  # to the caller itself it is told as it is
        Broken().exchange(seal(Gains("r")))
