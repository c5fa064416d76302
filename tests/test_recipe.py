"""Recipes and overrides load with the right types, places and messages."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljax import recipe
from rljax.config import Config
from rljax.recipe import ConfigError, describe, load, load_with_sources, record_reads, render, unread


def write(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def problems_of(path: Path | str | None = None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return list(caught.value.problems)


def test_without_a_recipe_everything_is_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, sources = load_with_sources()
    assert set(sources.values()) == {"default"}
    assert config.run.dir == tmp_path / "runs/default"
    assert config.model_copy(update={"run": Config().run, "model": Config().model}) == Config()
    assert load(write(tmp_path, "")) == config
    assert load(write(tmp_path, "\ufeff# only a comment\r\n[train]\r\n")) == config


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-05), ("5e-6", 5e-06), ("1.0e-5", 1e-05), ("1", 1.0), ("0.1", 0.1), ("1_0.0", 10.0)]
)
def test_a_number_is_a_float_in_every_spelling(tmp_path: Path, text: str, value: float) -> None:
    for config in (
        load(write(tmp_path, f"[optimizer]\nlearning_rate = {text}")),
        load(None, [f"optimizer.learning_rate={text}"]),
    ):
        assert type(config.optimizer.learning_rate) is float
        assert config.optimizer.learning_rate == value


def test_a_whole_float_is_an_integer(tmp_path: Path) -> None:
    steps = load(write(tmp_path, "[train]\nsteps = 1e3")).train.steps
    assert type(steps) is int
    assert steps == 1000
    assert load(None, ["train.steps=1e3"]).train.steps == 1000


@pytest.mark.parametrize(
    ("key", "value", "expects"),
    [
        ("train.steps", "10.5", "an integer >= 1, got 10.5"),
        ("train.steps", "true", "an integer >= 1, got true"),
        ("train.steps", '"7"', 'an integer >= 1, got "7"'),
        ("train.steps", "inf", "an integer >= 1, got inf"),
        ("train.steps", "0", "an integer >= 1, got 0"),
        ("train.steps", "{x = 1}", "an integer >= 1, got {x = 1}"),
        ("optimizer.learning_rate", "true", "a number > 0, got true"),
        ("optimizer.learning_rate", '"1e-5"', 'a number > 0, got "1e-5"'),
        ("optimizer.learning_rate", "nan", "a number > 0, got nan"),
        ("optimizer.b1", "1", "a number >= 0 and < 1, got 1"),
        ("telemetry.rollouts", '"false"', 'true or false, got "false"'),
        ("telemetry.rollouts", "0", "true or false, got 0"),
        ("env.name", "3", "a string, got 3"),
        ("env.options", "3", "a table, got 3"),
        ("run.dir", "3", "a path, got 3"),
        ("run.dir", '""', 'a path, got ""'),
        ("data.path", "[1]", "a path or none, got [1]"),
        ("model.remat", '"ful"', 'one of "none", "dots", "offload", "full", got "ful"; did you mean full?'),
    ],
)
def test_a_wrong_type_is_an_error_with_file_line_and_key(tmp_path: Path, key: str, value: str, expects: str) -> None:
    path = write(tmp_path, f"\n\n{key} = {value}\n")
    assert problems_of(path) == [f"{path}:3: {key}: expects {expects}"]


def test_a_huge_integer_is_refused_for_a_number(tmp_path: Path) -> None:
    path = write(tmp_path, f"optimizer.learning_rate = 1{'0' * 400}")
    assert problems_of(path)[0].startswith(f"{path}:1: optimizer.learning_rate: expects a number > 0")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[train]\nlearning_rat = 1", "2: train.learning_rat: unknown option; did you mean optimizer.learning_rate?"),
        ("[train]\nlearning_rate = 1", "2: train.learning_rate: unknown option; learning_rate belongs in [optimizer]"),
        ("[train]\nstep = 1", "2: train.step: unknown option; did you mean train.steps?"),
        ("[train]\nEVERY = 1", "2: train.EVERY: unknown option; every belongs in [checkpoint] or [eval]"),
        ("learning_rate = 1", "1: learning_rate: unknown key; learning_rate belongs in [optimizer]"),
        ("steeps = 1", "1: steeps: unknown key; did you mean train.steps?"),
        ("[train]\nnum-epochs = 3", "2: train.num-epochs: unknown option; rljax calls it train.steps"),
        (
            "[algorithm]\nnum-generations = 3",
            "2: algorithm.num-generations: unknown option; write algorithm.num_generations",
        ),
        ("[reward]\n\ntimout = 3", "3: reward.timout: unknown section [reward]; did you mean env.step_timeout?"),
        ("[optimiser]\nb2 = 0.9", "2: optimiser.b2: unknown section [optimiser]; did you mean optimizer.b2?"),
        ("[optimiser]\nzz = 0.9", "2: optimiser.zz: unknown section [optimiser]; did you mean [optimizer]?"),
        ("[optimiser]", "1: optimiser: unknown key; did you mean [optimizer]?"),
        ("zzz = 1", "1: zzz: unknown key; the sections are [run], [model]"),
        ("[checkpoint]\nqqq = 1", "2: checkpoint.qqq: unknown option; [checkpoint] has every, keep, resume"),
        ("train = 3", "1: train: is a section; set its options one by one, such as train.steps"),
        ("[[train]]\nsteps = 3", "1: train: is a section; set its options one by one, such as train.steps"),
        ("[train]\n'a b' = 3", '2: train."a b": unknown option; [train] has steps'),
    ],
)
def test_an_unknown_or_misplaced_key_names_the_right_one(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    (found,) = problems_of(path)
    assert found.startswith(f"{path}:{problem}")


def test_all_problems_are_listed_at_once_without_follow_up_noise(tmp_path: Path) -> None:
    path = write(tmp_path, '[optimizer]\nschedule = "cosine"\ndecay_step = 5\nb1 = 2\n[run]\nsed = 1\n')
    found = problems_of(path, "train.steps=x", "nope=1")
    assert len(found) == 5, "the missing decay_steps is a consequence of the typing error, not a problem of its own"
    assert {problem.split(": ")[1] for problem in found} == {
        "optimizer.decay_step",
        "optimizer.b1",
        "run.sed",
        "train.steps",
        "nope",
    }


def test_a_broken_rule_names_both_options_and_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "[sampler]\nmax_prompt_length = 60\n\n# room\ncache_tokens = 100\n")
    (found,) = problems_of(path)
    assert found.startswith(f"{path}:2, {path}:5: sampler.max_prompt_length (60) + sampler.max_completion_length (128)")
    (found,) = problems_of(path, "sampler.max_prompt_length=61")
    assert found.startswith(f"command line, {path}:5: sampler.max_prompt_length (61)")


def test_every_broken_rule_is_listed() -> None:
    found = problems_of(None, "train.mini_batch_size=3", "sampler.slots=9", "sampler.temperature=0", "eval.path=x")
    assert len(found) == 4
    assert [problem.split(": ")[0] for problem in found] == ["command line"] * 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[train]\nsteps = 1\nsteps = 2\n", ":3:10: Cannot overwrite a value; train.steps is set twice, first on line 2"),
        ("[run]\n[train]\n[run]\n", ":3:5: Cannot declare ('run',) twice; run is set twice, first on line 1"),
        ("[train]\nsteps : 1", ":2:7: Expected '=' after a key in a key/value pair"),
        ("[train]\n  steps = 010", ":2:12: Expected newline or end of document after a statement"),
        ("[env]\noptions.a = [\n1,\n", ":4: Invalid value, at the end of the file; the last key is env.options.a on line 2"),
        ('[run]\ndir = "\\ud800"', ":2:14: Escaped character is not a Unicode scalar value"),
    ],
)
def test_bad_toml_has_line_and_column(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    assert problems_of(path) == [f"{path}{problem}"]


def test_a_recipe_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    (missing,) = problems_of(tmp_path / "recpie.toml")
    assert missing == f"{tmp_path / 'recpie.toml'}: no such recipe; did you mean {path}?"
    assert problems_of(tmp_path) == [f"{tmp_path} is a directory; name a recipe file in it"]
    path.write_bytes(b"[run]\n# caf\xe9\n")
    assert problems_of(path) == [f"{path}:2: the byte 0xe9 is not valid UTF-8; save the recipe as UTF-8"]
    assert problems_of(path / "below")[0].startswith(f"{path / 'below'}: cannot be read")


def test_overrides_parse_as_toml_and_fall_back_to_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [
        "run.dir=runs/a b",
        "optimizer.learning_rate = 1e-5",
        "model.compute_dtype=bfloat16",
        'env.options.operations=["add"]',
        "env.options.kind=add",
        "env.options.limits.low=-3",
        "env.name=no",
        "algorithm.scale_rewards=none",
        "optimizer.max_grad_norm=none",
        "data.path=null",
        "telemetry.rollouts=false",
        "train.steps=5",
        "train.steps=10",
    ]
    config, sources = load_with_sources(None, overrides)
    assert config.run.dir == tmp_path / "runs/a b"
    assert config.optimizer.learning_rate == 1e-5
    assert config.model.compute_dtype == "bfloat16"
    assert config.env.options == {"operations": ["add"], "kind": "add", "limits": {"low": -3}}
    assert config.env.name == "no"
    assert config.algorithm.scale_rewards == "none"
    assert config.optimizer.max_grad_norm is None
    assert config.data.path is None
    assert config.telemetry.rollouts is False
    assert config.train.steps == 10
    assert load(None, ["run.dir=2024", "env.name=1e3"]).run.dir == tmp_path / "2024"
    assert sources["env.options.limits.low"] == "command line"
    assert sources["train.rollout_batch_size"] == "default"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.steps", "'train.steps' is not of the form section.option=value"),
        ("", "'' is not of the form section.option=value"),
        ("--train.steps=1", "--train.steps: unknown section [--train]; did you mean train.steps?"),
        ("=3", "'=3' is not of the form section.option=value"),
        ("train=3", "train: is a section; set its options one by one, such as train.steps"),
        ("train={steps = 3}", "train: is a section"),
        ("steps=3", "steps: unknown key; steps belongs in [train]"),
        ("train.learning-rate=3", "train.learning-rate: unknown option; learning_rate belongs in [optimizer]"),
        ("train.steps.x=3", "train.steps.x: train.steps is no section; it takes an integer >= 1"),
        ("train.steps=", 'train.steps: has no value; write "" for empty text'),
        ("train.steps=010", 'train.steps: expects an integer >= 1, got "010"'),
        ("train.steps=none", 'train.steps: expects an integer >= 1, got "none"'),
        ("train.steps=3\nseed=4", "train.steps: expects an integer"),
        ("telemetry.rollouts=True", 'telemetry.rollouts: expects true or false, got "True"'),
        ("algorithm.beta=inf", "algorithm.beta: expects a number >= 0, got inf"),
        ("env.options.x=[add]", "env.options.x: the value [add] is not TOML"),
        ("run.dir=gs://bucket/run", 'run.dir: "gs://bucket/run" is a remote address'),
        ("run.dir=a\udcff", "run.dir: the value is not valid UTF-8"),
        ("run.dir=~no-such-person/x", "run.dir: cannot expand the home directory"),
    ],
)
def test_a_bad_override_is_explained(override: str, problem: str) -> None:
    (found,) = problems_of(None, override)
    assert found.startswith(f"command line: {problem}")


def test_the_command_line_wins_and_replaces_whole_tables(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = 3\n[env.options]\na = 1\nb = 2\n")
    config, sources = load_with_sources(path, ["train.steps=4", "env.options.a=5"])
    assert (config.train.steps, config.env.options) == (4, {"a": 5, "b": 2})
    assert (sources["train.steps"], sources["env.options.a"], sources["env.options.b"]) == (
        "command line",
        "command line",
        "recipe.toml:5",
    )
    assert load(path, ["env.options={c = 1}"]).env.options == {"c": 1}
    assert load(path, ["env.options.a.deep=1"]).env.options == {"a": {"deep": 1}, "b": 2}
    assert load(path, ["env.options={}"]).env.options == {}


def test_relative_paths_count_from_where_they_were_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = write(tmp_path / "configs", '[run]\ndir = "../runs/a"\n[data]\nsource = "file"\npath = "tasks.jsonl"\n')
    for spelled in (path, Path("configs/recipe.toml"), "configs/recipe.toml"):
        config = load(spelled, ["model.checkpoint=~/model"])
        assert config.run.dir == tmp_path / "runs/a"
        assert config.data.path == tmp_path / "configs/tasks.jsonl"
        assert config.model.checkpoint == tmp_path / "home/model"
    assert load(path, ["run.dir=here"]).run.dir == tmp_path / "here"
    assert load(path, ["run.dir=/abs"]).run.dir == Path("/abs")


def test_lines_are_found_in_every_toml_shape(tmp_path: Path) -> None:
    text = (
        '# [train]\nrun.seed = 1 # run.seed = 2\n\n[ env ] # x\nname = """\n[train]\nsteps = 1\\\n  ""\\""""""\n'
        "options.text = '''\n[env]\nname = 1'''''\noptions.list = [ # ]\n  '[', \"]\\\"\",\n  {a = 1}, # steps = 1\n]\n"
        'options."a b" . \'c\' = {d = 1, e = {f = 2}}\n\t[env.options."deep"]\nx = 1979-05-27\n'
        "[[env.options.many]]\ny = 1\n[[env.options.many]]\ny = 2\n[ train ]\nsteps = 10" + "\n# #" * 200
    )
    path = write(tmp_path, text)
    config, sources = load_with_sources(path)
    set_in_file = {key: int(source.split(":")[1]) for key, source in sources.items() if source != "default"}
    assert set_in_file == {
        "run.seed": 2,
        "env.name": 5,
        "env.options.text": 9,
        "env.options.list": 12,
        'env.options."a b".c.d': 16,
        'env.options."a b".c.e.f': 16,
        "env.options.deep.x": 18,
        "env.options.many": 19,
        "train.steps": 24,
    }
    assert config.env.options == tomllib.loads(text)["env"]["options"]
    assert load(write(tmp_path, text.replace("\n", "\r\n"), "crlf.toml")) == config


_scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.dates()
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    path = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/.:"), min_size=1).map(
        lambda name: f"/r/{name}"
    )
    return Config.model_validate(
        {
            "model": {"checkpoint": "/model"},
            "run": {"dir": draw(path), "seed": draw(st.integers(0, 2**32 - 1))},
            "env": {"name": draw(st.text(st.characters(exclude_categories=["Cs"]))), "options": draw(options())},
            "optimizer": {
                "learning_rate": draw(st.floats(1e-300, 1e300)),
                "max_grad_norm": draw(st.none() | st.floats(1e-3, 1e3)),
            },
            "algorithm": {"scale_rewards": draw(st.sampled_from(["group", "batch", "none"]))},
            "train": {"mini_batch_size": draw(st.sampled_from([None, 8])), "steps": 10 * draw(st.integers(1, 10**12))},
            "telemetry": {"rollouts": draw(st.booleans())},
        }
    )


def options() -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), _values, max_size=4)


@settings(database=None, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(configs())
def test_a_written_configuration_loads_back_the_same(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    folder = tmp_path_factory.getbasetemp()
    for text in (render(config), render(config, {"train.steps": "recipe.toml:3"})):
        loaded, sources = load_with_sources(write(folder, text, "written.toml"))
        assert loaded == config
        assert loaded.hash() == config.hash()
        lines = text.split("\n")
        for key, source in sources.items():
            line = lines[int(source.rpartition(":")[2]) - 1]
            assert line.startswith(key.split(".", 1)[1] + " = "), "every line number points at its key"


def test_the_rendered_tree_shows_values_types_and_sources(tmp_path: Path) -> None:
    config, sources = load_with_sources(write(tmp_path, "[optimizer]\nlearning_rate = 1e-5\n"), ["train.steps=1e1"])
    text = render(config, sources)
    lines = text.splitlines()
    assert "learning_rate = 1e-05          # recipe.toml:2" in lines
    assert any(line.startswith("steps = 10 ") and line.endswith("# command line") for line in lines)
    assert "max_grad_norm = 1.0            # default" in lines
    assert 'decay_steps = "none"           # default' in lines
    assert "#" not in render(config)


def test_the_description_covers_every_option() -> None:
    text = describe()
    for section, field in Config.model_fields.items():
        assert f"## [{section}]" in text
        assert isinstance(field.annotation, type)
        for name, option in field.annotation.model_fields.items():
            assert f"- `{name}` (" in text
            assert option.description in text
    assert "- `learning_rate` (a number > 0; default `1e-06`): Peak learning rate." in text
    assert '- `decay_steps` (an integer >= 1 or none; default `"none"`)' in text


def test_names_of_other_systems_point_at_real_options() -> None:
    assert recipe._OTHER_NAMES
    for target in recipe._OTHER_NAMES.values():
        assert tuple(target.split(".")) in recipe._OPTIONS


def test_reads_are_recorded_only_while_listening() -> None:
    config = Config()
    assert config.train.steps == 100
    with record_reads() as reads:
        assert reads == set()
        assert len(config.hash()) + len(config.model_dump()) + len(config.model_dump_json()) + len(repr(config)) > 0
        assert render(*load_with_sources(None, ["train.steps=100"])) != render(config)
        assert config == Config()
        assert reads == set(), "loading, dumping, hashing, printing and comparing are no reads"
        assert config.train.steps == 100
        assert config.optimizer.learning_rate > 0
        with record_reads() as inner:
            assert config.pack_length == 256
        assert inner == {
            *("train.pack_length", "train.micro_batch_tokens"),
            *("sampler.max_prompt_length", "sampler.max_completion_length"),
        }
        assert config.env.options == {}
    assert config.run.seed == 0
    assert reads == inner | {"train.steps", "optimizer.learning_rate", "env.options"}
    missing = unread(config, reads)
    assert "run.seed" in missing
    assert "train.steps" not in missing
    assert len(missing) + len(reads) == describe().count("\n- ")


def test_recording_ends_when_the_run_fails() -> None:
    with pytest.raises(RuntimeError), record_reads() as reads:
        raise RuntimeError
    assert Config().run.seed == 0
    assert reads == set()


def test_every_option_arrives_where_it_was_set(tmp_path: Path) -> None:
    """Each leaf, set alone in a file and on the command line, changes that leaf of the configuration and no other."""
    default = json.loads(load(None).model_dump_json())
    companions = {
        "optimizer.decay_steps": 'optimizer.schedule="linear"',
        "optimizer.min_learning_rate": 'optimizer.schedule="linear"',
    }
    companions |= dict.fromkeys(("data.path", "eval.path"), 'data.source="file"')
    companions |= dict.fromkeys(
        ("algorithm.kl_target", "algorithm.reference_sync_steps", "algorithm.reference_mixup_alpha"), "algorithm.beta=0.5"
    )
    lora = ("alpha", "rslora", "dropout", "target_modules", "base_dtype", "adapter")
    companions |= {f"lora.{name}": "lora.rank=4" for name in lora}
    companions["sampler.lora"] = "lora.rank=4"
    companions |= dict.fromkeys(("eval.top_k", "eval.top_p", "eval.min_p"), "eval.temperature=0.5")
    companions["optimizer.muon_momentum"] = 'optimizer.rule="muon"'
    companions["algorithm.proximal"] = 'algorithm.rollout_is="none"'
    companions["algorithm.reward_weights"] = 'algorithm.advantage="gdpo"'
    of_critic = ("gamma", "gae_lambda", "whiten_advantages", "cliprange_value", "critic_warmup_steps")
    companions |= dict.fromkeys(
        (*(f"algorithm.{name}" for name in of_critic), "optimizer.critic_learning_rate"), 'algorithm.advantage="gae"'
    )
    for (section, name), option in recipe._OPTIONS.items():
        key = f"{section}.{name}"
        if key == "algorithm.preset":
            continue  # it is there to change others; see tests/test_presets.py
        value = _another_value(key, option)
        for load_one in (lambda text: load(None, text.split("\n")), lambda text: load(write(tmp_path, text))):
            text = "\n".join([f"{key}={value}", *_needed(key, companions)])
            changed = json.loads(load_one(text).model_dump_json())
            assert changed[section][name] != default[section][name], key
            touched = {f"{s}.{n}" for s in default for n in default[s] if default[s][n] != changed[s][n]}
            assert touched == {line.split("=")[0] for line in text.split("\n")}


def _needed(key: str, companions: dict[str, str]) -> list[str]:
    lines = [companions[key]] if key in companions else []
    if key in ("optimizer.schedule", "optimizer.min_learning_rate"):
        lines.append("optimizer.decay_steps=50")
    if key in ("data.source", "eval.path"):
        lines.append('data.path="/tasks.jsonl"')
    if key == "algorithm.reference_mixup_alpha":
        lines.append("algorithm.reference_sync_steps=1")
    if key == "optimizer.min_learning_rate":
        lines.append("optimizer.learning_rate=1e-3")
    return lines


def _another_value(key: str, option: "recipe._Option") -> str:
    special = {
        "sampler.slots": "72",
        "algorithm.num_generations": "4",
        "train.rollout_batch_size": "16",
        "train.mini_batch_size": "8",
        "train.pack_length": "300",
        "train.micro_batch_tokens": "600",
        "train.micro_batch_size_per_device": "16",
        "sampler.cache_tokens": "300",
        "optimizer.min_learning_rate": "1e-4",
        "optimizer.decay_steps": "60",
        "algorithm.num_iterations": "2",
        "eval.every": "10",
        "env.options": "{x = 1}",
        "sampler.temperature": "0.5",
        "algorithm.epsilon": "0.3",
        "algorithm.epsilon_c": "3.0",
        "algorithm.kl_target": "0.5",
        "algorithm.reward_weights": "{x = 1}",
        "algorithm.rollout_rs_threshold_lower": "0.25",
    }
    if key in special:
        return special[key]
    if option.choices:
        return f'"{next(choice for choice in option.choices if choice != option.default)}"'
    if option.kind is bool:
        return str(not option.default).lower()
    if option.kind is int:
        return str(2 * max(option.default, 1))
    if option.kind is float:
        return str(option.default / 2 if option.default else 0.5)
    if option.kind is tuple:
        return '["another", "and one more"]'
    return '"/somewhere/else"'


def test_loading_never_imports_jax() -> None:
    code = "import sys, rljax.recipe; rljax.recipe.load(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
