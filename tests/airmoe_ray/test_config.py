"""Configuration: order of precedence, and mistakes told in one line."""

import copy
import pickle
import re

import pytest

from airmoe_ray.config import SECRETS, Config
from airmoe_ray.config_file import fields, find_config, load_config, parse_config, read_yaml, to_yaml
from airmoe_ray.errors import ConfigError


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("experts: {count: 7}\nchannel: {snr_db: 5}\n")
    config = load_config(path, ["channel.snr_db=1e1"])
    assert (config.experts.count, config.channel.snr_db, config.frl.dim) == (7, 10.0, 64)


def test_a_configuration_survives_the_round_trip_through_yaml():
    config = load_config("quickstart", ["experts.count=3", "routing.top_k=1", "frl.prototypes=[2, 3, 4]"])
    path_free = parse_config(read_yaml_text(to_yaml(config)))
    assert path_free == config


def read_yaml_text(text: str):
    import yaml

    return yaml.safe_load(text)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("routing.topk=3", ["routing.topk", "routing.top_k"]),
        ("chanel.kind=air", ["chanel", "channel"]),
        ("routing.top_k=11", ["11", "experts.count = 10"]),
        ("frl.eta=0", ["frl.eta = 0", "greater than 0"]),
        ("frl.eta=1.2", ["frl.eta = 1.2", "less than or equal to 1"]),
        ("channel.kind=fog", ["'fog'", "air", "ideal", "digital"]),
        ("frl.prototypes=[4, 4]", ["2 clients", "10"]),
        ("seed", ["KEY=VALUE"]),
        ("seed.x=3", ["seed"]),
    ],
)
def test_a_mistake_is_one_line_with_the_key_the_value_and_what_is_allowed(override, told):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    message = str(error.value)
    assert "\n" not in message
    for part in told:
        assert part in message


def test_broken_yaml_names_the_file_and_line(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("data:\n  name: [scenes\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml, line \d"):
        load_config(path)


def test_an_unknown_configuration_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match="quickstart"):
        find_config("quickstrat")


def test_every_field_has_a_meaning():
    assert [key for key, _, _, meaning in fields() if not meaning] == []


def test_every_shipped_configuration_is_valid_and_states_only_differences():
    folder = find_config("quickstart").parent
    defaults = Config().model_dump(mode="json")
    for path in folder.glob("*.yaml"):
        load_config(path)
        for block, settings in read_yaml(path).items():
            repeated = {k for k, v in settings.items() if defaults[block][k] == v} if isinstance(settings, dict) else {}
            assert not repeated, f"{path.name}: {block}.{repeated} restates a default"


# secrets

GUARDED = Config.model_validate({"serve": {"api_keys": ["opens-all"], "admin_token": "rules-all", "queue": 7}})


def test_secrets_are_neither_sent_nor_stored_nor_shown():
    sent = pickle.dumps({"config": GUARDED})
    for text in (sent.decode("latin-1"), to_yaml(GUARDED), repr(GUARDED), str(GUARDED)):
        assert "queue" in text
        assert "s-all" not in text
    arrived = pickle.loads(sent)["config"]
    assert arrived == parse_config(read_yaml_text(to_yaml(GUARDED))) == parse_config({"serve": {"queue": 7}})


def test_secrets_stay_where_they_were_given():
    for same in (copy.copy(GUARDED), copy.deepcopy(GUARDED), GUARDED.model_copy(update={"seed": 1})):
        pickle.dumps(same)
        assert (same.serve.api_keys, same.serve.admin_token) == (["opens-all"], "rules-all")


@pytest.mark.parametrize("override", ["serve.api_keys=opens-all", "serve.admin_token=[opens-all]"])
def test_a_mistake_with_a_secret_does_not_repeat_it(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]) as error:
        load_config(None, [override])
    assert "s-all" not in str(error.value)


def test_whatever_is_called_a_secret_is_one():
    named = {key for key, *_ in fields() if re.search("key|token|secret|password", key)}
    assert named == {f"{block}.{key}" for block, keys in SECRETS.items() for key in keys}


@pytest.mark.parametrize("host", ["https://airmoe.example.org", "a b", "", "airmoe.example.org/x", "x:port", "a*.org"])
def test_a_host_that_no_browser_would_send_is_told(host):
    with pytest.raises(ConfigError, match=r"serve\.hosts = .* expected a name such as") as error:
        parse_config({"serve": {"hosts": ["localhost", host]}})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            "{name: camvid, title: drives, share: 0}",
            "part drives: data.parts.1.share = 0: input should be greater than 0",
        ),
        ("{name: camvid, shar: 1}", "part camvid: data.parts.1.shar: unknown key; did you mean data.parts.1.share?"),
        ("{title: drives}", "part drives: data.parts.1.name = {'title': 'drives'}: field required"),
        ("camvid", "data.parts.1 = 'camvid': input should be a valid dictionary or instance of PartConfig"),
    ],
)
def test_mistakes_in_a_part_of_a_mix_name_part_and_field(part: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({}, [f"data.parts=[{{name: scenes}}, {part}]"])
    assert str(caught.value) == line
