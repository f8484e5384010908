"""The config file: every key is known, and what is wrong is said in one line that names it."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from palestra import config as configs
from palestra.config import (
    AnyDispatch,
    BatchDispatch,
    BoundedDispatch,
    Config,
    Loss,
    PipelineDispatch,
    Scripted,
    StreamDispatch,
    Torch,
    dump,
    load,
    parse,
)
from palestra.errors import ConfigError

BASE: dict[str, Any] = {"run": {"folder": "runs/x"}, "tasks": {"heldout": "task:rows"}}
TRAINING: dict[str, Any] = {"steps": 4, "groups": 2, "samples": 4, "learning_rate": 1e-4}


def write(folder: Path, text: str) -> Path:
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, tomli_w.dumps(BASE | {"training": TRAINING}))


def complaint(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse(BASE | values)
    text = str(error.value)
    assert "\n" not in text
    return text.removeprefix("config: ")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"agent": {"turn": 3}}, "unknown key 'agent.turn'; did you mean 'turns'?"),
        ({"trainning": {}}, "unknown key 'trainning'; did you mean 'training'?"),
        ({"zzz": 1}, "unknown key 'zzz'; known: agent, backend, dispatch, "),
        ({"backend": {"kind": "torch", "lora": {"rnk": 8}}}, "unknown key 'backend.lora.rnk'; did you mean 'rank'?"),
        ({"backend": {"kind": "torch", "dtpye": "x"}}, "unknown key 'backend.dtpye'; did you mean 'dtype'?"),
        ({"agent": {"turns": "many"}}, "agent.turns = 'many': input should be a valid integer"),
        ({"agent": {"turns": 0}}, "agent.turns = 0: input should be greater than 0"),
        ({"agent": {"turns": 1.5}}, "agent.turns = 1.5: input should be a valid integer"),
        ({"agent": 3}, "agent = 3: input should be a valid dictionary"),
        ({"run": {}}, "the key 'run.folder' is missing"),
        ({"tasks": {"train": "a:b"}}, "the key 'tasks.heldout' is missing"),
        ({"tasks": {"heldout": "a:b", "folder": 3}}, "tasks.folder = 3: input is not a valid path"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature = -1: input should be greater than or equal to 0"),
        ({"backend": {"kind": "torhc"}}, "backend.kind = 'torhc' is unknown; known: 'torch', 'scripted'"),
        ({"backend": {"model": "x"}}, "the key 'backend.kind' is missing; write kind = \"torch\""),
        ({"backend": {"kind": "scripted", "script": "a:b"}}, "the key 'backend.model' is missing"),
        ({"backend": {"kind": "torch", "dtype": "int8"}}, "backend.dtype = 'int8': input should be 'bfloat16' or 'float32'"),
        ({"loss": {"kind": "cispo", "dual_clip": 3.0}}, "loss: dual_clip goes with the kinds 'ppo' and 'gspo' only"),
        ({"loss": {"kind": "cross_entropy", "truncate": 2.0}}, "loss: truncate does not go with the kind 'cross_entropy'"),
        ({"loss": {"dual_clip": 1.0}}, "loss.dual_clip = 1.0: input should be greater than 1"),
        ({"training": TRAINING | {"samples": 1}}, "training.samples = 1: input should be greater than or equal to 2"),
        ({"training": TRAINING | {"min_group": 5}}, "training: min_group = 5 is more than samples = 4"),
        (
            {"training": TRAINING | {"masked_stops": ["tim"]}},
            "training.masked_stops.0 = 'tim': input should be 'finish', 'answer'",
        ),
        ({"training": {"steps": 4}}, "the key 'training.groups' is missing"),
        ({"warm_start": {"data": "x"}}, "the key 'warm_start.steps' is missing"),
        ({"evaluation": {"samples": 0}}, "evaluation.samples = 0: input should be greater than 0"),
        ({"training": TRAINING | {"staleness": -1}}, "training.staleness = -1: input should be greater than or equal to 0"),
        ({"training": TRAINING | {"oversample": 0.5}}, "training.oversample = 0.5: input should be greater than or equal to 1"),
        ({"training": TRAINING | {"oversample": 5}}, "training.oversample = 5: input should be less than or equal to 4"),
        ({"training": TRAINING | {"refill": "often"}}, "training.refill = 'often': input should be a valid boolean"),
        (
            {"training": TRAINING | {"oversample": 1.5, "staleness": 1}},
            "training: oversample goes with staleness = 0 only",
        ),
        ({"warm_start": {"data": "x", "steps": 3, "batch": 0}}, "warm_start.batch = 0: input should be greater than 0"),
        (
            {"dispatch": {"kind": "magic"}},
            "dispatch.kind = 'magic' is unknown; known: 'batch', 'bounded', 'pipeline', 'stream'",
        ),
        ({"dispatch": {"kind": "bounded", "slotz": 3}}, "unknown key 'dispatch.slotz'; did you mean 'slots'?"),
        ({"dispatch": {"kind": "stream", "run": 0}}, "dispatch.run = 0: input should be greater than 0"),
        ({"dispatch": {"kind": "stream", "runtimes": 0}}, "dispatch.runtimes = 0: input should be greater than 0"),
        (
            {"agent": {"context": 480}, "backend": {"kind": "torch", "kv_tokens": 479}},
            "backend.kv_tokens = 479 does not hold one context of agent.context = 480 tokens",
        ),
        ({"dispatch": {"kind": "stream", "kv_share": 0}}, "dispatch.kv_share = 0: input should be greater than 0"),
        ({"dispatch": {"kind": "batch", "retries": -1}}, "dispatch.retries = -1: input should be greater than or equal to 0"),
        ({"dispatch": {"init_seconds": 0}}, "dispatch.init_seconds = 0: input should be greater than 0"),
        ({"dispatch": {"rewrad_seconds": 5}}, "unknown key 'dispatch.rewrad_seconds'; did you mean 'reward_seconds'?"),
        ({"dispatch": {"backoff": "long"}}, "dispatch.backoff = 'long': input should be a valid number"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(values: dict[str, Any], text: str) -> None:
    assert complaint(values).startswith(text)


def test_the_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nfolder = 'x'\nsead = 1\n[tasks]\nheldout = 'a:b'\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value) == f"{path}: unknown key 'run.sead'; did you mean 'seed'?"


def test_a_missing_file_a_folder_and_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no config file .*none\.toml; give the path of a \.toml file$"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r" is a folder; give the \.toml file in it$"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.toml: not valid TOML: .*line 2"):
        load(write(tmp_path, "[run]\nfolder = \n"))
    (tmp_path / "train.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"train\.toml: not valid TOML"):
        load(tmp_path / "train.toml")
    with pytest.raises(ConfigError, match="Not a directory"):
        load(tmp_path / "train.toml" / "x.toml")


def test_a_folder_of_the_wrong_type_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.folder = 3: input is not a valid path"):
        load(write(tmp_path, "[run]\nfolder = 'x'\n[tasks]\nheldout = 'a:b'\nfolder = 3\n"))


# Overrides


def test_overrides_are_toml_values_or_bare_words(path: Path) -> None:
    config = load(
        path,
        [
            "training.steps=8",
            "run.folder=runs/other run",
            'tasks.heldout="task:other"',
            "evaluation.greedy=false",
            "training.masked_stops=['time', 'context']",
            "backend.kind=torch",
            "backend.lora.rank=4",
            "tasks.arguments.path=a=b",
            "sampling.temperature = 0.5",
        ],
    )
    assert config.training is not None
    assert (config.training.steps, config.training.masked_stops) == (8, frozenset({"time", "context"}))
    assert (config.run.folder, config.tasks.heldout, config.evaluation.greedy) == (Path("runs/other run"), "task:other", False)
    assert isinstance(config.backend, Torch)
    assert config.backend.lora.rank == 4
    assert config.tasks.arguments == {"path": "a=b"}
    assert config.sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("steps=8", "override 'steps=8': write section.key=value, such as training.steps=8"),
        ("training.steps", "override 'training.steps': write section.key=value"),
        ("training.=8", "override 'training.=8': write section.key=value"),
        ("run.folder.x=1", "override 'run.folder.x=1': 'folder' is a value, not a section"),
        ("training.steps=many", "training.steps = 'many': input should be a valid integer"),
        ("training.stesp=8", "unknown key 'training.stesp'; did you mean 'steps'?"),
    ],
)
def test_a_bad_override_is_named(path: Path, override: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(path, [override])
    assert text in str(error.value)


# Paths and round trips


def test_the_tasks_folder_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe").mkdir()
    write(tmp_path / "recipe", tomli_w.dumps(BASE))
    monkeypatch.chdir(tmp_path)
    assert load(Path("recipe/train.toml")).tasks.folder == tmp_path / "recipe"
    assert load(Path("recipe/train.toml"), ["tasks.folder=.."]).tasks.folder == tmp_path
    assert load(Path("recipe/train.toml")).run.folder == Path("runs/x")


FULL: dict[str, Any] = {
    "run": {"folder": "runs/ü", "seed": -3},
    "tasks": {
        "train": "task:a",
        "heldout": "task:b",
        "folder": "/some/where",
        "arguments": {"n": 3, "names": ["a", "b"], "x": 0.5},
    },
    "agent": {"turns": 3, "context": 99, "seconds": 1.5},
    "sampling": {"temperature": 0.7, "max_tokens": 5},
    "backend": {"kind": "torch", "model": "m", "adapter": "a/b", "lora": {"rank": 2, "alpha": 1.0}, "threads": 2},
    "tools": {"mcp": ["python 'my server.py'", "https://host/mcp"], "seconds": 5.0},
    "hints": {"rules": ["repeat", "cycle"], "share": 0.5, "evaluation": True},
    "loss": {"kind": "ppo", "dual_clip": 3.0, "truncate": 2.0, "kl": 0.1},
    "training": TRAINING | {"masked_stops": ["time", "turns"], "shuffle_rewards": True, "estimator": "rloo"},
    "warm_start": {"data": "x.jsonl", "steps": 3},
    "evaluation": {"every": 2, "tasks": 5, "samples": 4, "greedy": False},
    "dispatch": {"kind": "pipeline", "init": 1, "run": 2, "reward": 3, "queue": 4, "retries": 5, "backoff": 0.5},
    "sandbox": {
        "memory_mb": 1,
        "disk_mb": 2,
        "processes": 3,
        "cpus": 0.5,
        "network": True,
        "warm": 4,
        "base": "/srv",
        "cache": "c",
    },
    "report": {"tensorboard": True, "wandb": "project"},
}
SCRIPTED = BASE | {"backend": {"kind": "scripted", "script": "task:play", "model": "folder", "thinking": "keep"}}


@pytest.mark.parametrize("values", [BASE, FULL, SCRIPTED], ids=["least", "full", "scripted"])
def test_what_is_dumped_loads_as_it_was(tmp_path: Path, values: dict[str, Any]) -> None:
    config = load(write(tmp_path, tomli_w.dumps(values)))
    again = load(write(tmp_path, dump(config)))
    assert again == config
    assert dump(again) == dump(config)


def test_every_key_of_the_full_example_differs_from_its_default() -> None:
    """So that the round trip above would notice a key that is lost."""
    config, least = parse(FULL), parse(BASE)
    for name in Config.model_fields:
        assert getattr(config, name) != getattr(least, name), name


def test_a_config_is_frozen() -> None:
    config = parse(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 4


def test_the_backend_is_told_by_its_kind() -> None:
    assert isinstance(parse(BASE).backend, Torch)
    assert isinstance(parse(SCRIPTED).backend, Scripted)


# Dispatch


def test_the_dispatcher_is_told_by_its_kind_and_streams_when_none_is_given() -> None:
    assert parse(BASE).dispatch == StreamDispatch(kind="stream")
    assert parse(BASE | {"dispatch": {}}).dispatch == StreamDispatch(kind="stream")
    assert parse(BASE | {"dispatch": {"runtimes": 5}}).dispatch == StreamDispatch(kind="stream", runtimes=5)
    for kind, section in DISPATCHES.items():
        assert type(parse(BASE | {"dispatch": {"kind": kind}}).dispatch) is section


DISPATCHES: dict[str, type[AnyDispatch]] = {
    "batch": BatchDispatch,
    "bounded": BoundedDispatch,
    "pipeline": PipelineDispatch,
    "stream": StreamDispatch,
}


@pytest.mark.parametrize("kind", DISPATCHES)
def test_a_key_of_another_kind_is_refused_by_name(kind: str) -> None:
    known = set(DISPATCHES[kind].model_fields)
    for key in {key for other in DISPATCHES.values() for key in other.model_fields} - known:
        text = complaint({"dispatch": {"kind": kind, key: 3}})
        assert text.startswith(f"unknown key 'dispatch.{key}'")
        assert f"did you mean {key!r}" not in text, "no hint sends the user round in a circle"
        assert set(text.partition("known: ")[2].split(", ")) in ({""}, known)


@pytest.mark.parametrize("section", [3, "stream", ["stream"]])
def test_a_dispatch_that_is_no_section_is_named(section: object) -> None:
    assert complaint({"dispatch": section}).startswith("dispatch")


def test_the_dispatch_can_be_overridden(path: Path) -> None:
    config = load(path, ["dispatch.kind=bounded", "dispatch.slots=3"])
    assert config.dispatch == BoundedDispatch(kind="bounded", slots=3)
    assert load(path, ["dispatch.run=3"]).dispatch == StreamDispatch(kind="stream", run=3)


@pytest.mark.parametrize("kind", DISPATCHES)
def test_each_kind_of_dispatch_is_dumped_and_loaded(tmp_path: Path, kind: str) -> None:
    config = parse(BASE | {"dispatch": {"kind": kind, "retries": 7}})
    again = load(write(tmp_path, dump(config)))
    assert (again.dispatch, again.dispatch.retries) == (config.dispatch, 7)


def test_nan_is_refused_where_a_bound_is_given() -> None:
    with pytest.raises(ConfigError, match=r"training\.learning_rate = nan"):
        parse(BASE | {"training": TRAINING | {"learning_rate": float("nan")}})


def test_defaults_of_the_loss_are_valid() -> None:
    assert parse(BASE).loss == Loss()


def test_the_shipped_recipes_load() -> None:
    recipes = sorted((Path(__file__).parents[1] / "recipes").glob("*/*.toml"))
    assert recipes
    for recipe in recipes:
        assert configs.load(recipe).tasks.folder == recipe.parent


TINKER: dict[str, Any] = {"kind": "tinker", "model": "some/model", "server": "skyrl"}


@pytest.mark.parametrize(
    ("section", "key", "value", "right"),
    [
        ("sampling", "temperature", 0.7, "1.0 or 0.0"),
        ("loss", "kind", "gspo", "'importance_sampling' or 'ppo' or 'cispo' or 'cross_entropy'"),
        ("loss", "dual_clip", 3.0, "unset"),
        ("loss", "kl", 0.1, "0.0"),
        ("loss", "truncate", 2.0, "unset"),
        ("training", "max_grad_norm", 1.0, "inf"),
        ("training", "staleness", 1, "0"),
    ],
)
def test_what_a_backend_cannot_honour_is_refused_by_name(section: str, key: str, value: object, right: str) -> None:
    good = BASE | {"backend": TINKER, "training": TRAINING | {"max_grad_norm": float("inf")}}
    parse(good)
    bad = good | {section: {**good.get(section, {}), key: value}}
    with pytest.raises(ConfigError) as error:
        parse(bad)
    assert str(error.value).startswith(f"config: {section}.{key} = {value!r}: the backend 'tinker' ")
    assert str(error.value).endswith(f"; it must be {right}")
    parse(bad | {"backend": {"kind": "torch"}})


@pytest.mark.parametrize(
    ("section", "key", "value", "right"),
    [
        ("loss", "kind", "cross_entropy", "'ppo' or 'importance_sampling' or 'gspo' or 'cispo'"),
        ("loss", "kl", 0.1, "0.0"),
        ("training", "warmup_steps", 2, "0"),
        ("training", "segment_weight", "trajectory", "'segment'"),
        ("training", "refill", True, "False"),
        ("training", "oversample", 1.5, "1.0"),
        ("training", "shuffle_rewards", True, "False"),
    ],
)
def test_what_skyrl_cannot_honour_is_refused_by_name(section: str, key: str, value: object, right: str) -> None:
    good = BASE | {"backend": {"kind": "skyrl", "model": "some/model"}, "training": TRAINING}
    parse(good)
    bad = good | {section: {**good.get(section, {}), key: value}}
    with pytest.raises(ConfigError) as error:
        parse(bad)
    assert str(error.value).startswith(f"config: {section}.{key} = {value!r}: the backend 'skyrl' ")
    assert str(error.value).endswith(f"; it must be {right}")


def test_skyrl_is_given_a_model_that_has_been_warmed_up(tmp_path: Path) -> None:
    warm_start = {"data": str(tmp_path / "demos.jsonl"), "steps": 2}
    with pytest.raises(ConfigError, match=r"warm_start = .*: the backend 'skyrl' begins with the model that it is given"):
        parse(BASE | {"backend": {"kind": "skyrl", "model": "some/model"}, "warm_start": warm_start})


def test_what_only_one_server_cannot_honour_is_not_refused_for_the_other() -> None:
    parse(BASE | {"backend": TINKER | {"server": "tinker"}, "training": TRAINING | {"staleness": 1}})


def test_a_knob_of_a_section_that_is_not_there_is_not_asked_for() -> None:
    assert parse(BASE | {"backend": TINKER}).training is None


def test_keys_of_one_kind_stand_apart_and_are_used_with_it_alone() -> None:
    shared = {"model": "m", "gpus": 2, "skyrl": {"micro_batch": 1}, "verl": {"workers": 3}}
    skyrl, verl = (parse(BASE | {"backend": {"kind": kind, **shared}}).backend for kind in ("skyrl", "verl"))
    assert isinstance(skyrl, configs.Skyrl)
    assert isinstance(verl, configs.Verl)
    assert (skyrl.gpus, skyrl.micro_batch, verl.gpus, verl.workers) == (2, 1, 2, 3)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"verl": {"worker": 3}}, "unknown key 'backend.verl.worker'; did you mean 'workers'?"),
        ({"gpus": 2, "skyrl": {"gpus": 4}}, "'gpus' is in [backend] and in [backend.skyrl]"),
        ({"skyrl": {"micro_batch": 0}}, "backend.micro_batch = 0"),
    ],
)
def test_what_is_wrong_with_keys_of_one_kind_is_named(section: dict[str, Any], named: str) -> None:
    assert named in complaint({"backend": {"kind": "skyrl", "model": "m", **section}})
