"""Recipes: what ships is valid, what is wrong is named with its path, what is written reads back the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inkling_rl.recipe import RecipeError, dump, fields, load
from inkling_rl.recipe.file import _documentation
from inkling_rl.recipe.hatches import (
    DEEPSPEED_ARGS_SET_BY_RECIPE,
    SKYRL_ARGS_SET_BY_RECIPE,
    VLLM_ARGS_SET_BY_RECIPE,
)

SHIPPED = sorted(path.name for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_valid_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    recipe = load(name)
    written = tmp_path / "recipe.yaml"
    written.write_text(dump(recipe), encoding="utf-8")
    assert load(written) == recipe


def test_the_gpu_recipe_does_not_run_on_fallbacks() -> None:
    assert load("inkling-2-small-lora-gsm8k.yaml").rollout.strict_kernels is True
    assert load("quickstart.yaml").rollout.strict_kernels is None


def test_few_fields_and_every_one_is_documented() -> None:
    paths = [path for path in fields() if "." in path]
    leaves = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
    assert len(leaves) < 80
    for path in paths:
        assert _documentation(path), path
        assert _documentation(path) != _documentation(path.rpartition(".")[0]), path


def test_owners_of_vendor_keys_exist() -> None:
    known = set(fields())
    for table in (VLLM_ARGS_SET_BY_RECIPE, SKYRL_ARGS_SET_BY_RECIPE, DEEPSPEED_ARGS_SET_BY_RECIPE):
        assert set(table.values()) - {"rollout.dtype", "trainer.dtype"} <= known


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.lerning_rate=3", "trainer.lerning_rate is no key of the recipe. Did you mean trainer.learning_rate?"),
        ("temperature=3", "temperature is no key of the recipe. Did you mean rollout.temperature?"),
        ("trainer.learning_rate=abc", "trainer.learning_rate must be a number; got 'abc'. Peak learning rate"),
        ("trainer.num_steps=0", "trainer.num_steps must be greater than 0; got 0."),
        ("trainer.num_steps=1.5", "trainer.num_steps must be a"),
        ("trainer.num_steps='3'", "trainer.num_steps must be a"),
        ("rollout.placement=standalon", "got 'standalon'. Did you mean 'standalone'?"),
        ("lora.rank=7", "lora.rank must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512; got 7."),
        ("lora.targets=q", "lora.targets must be a list; got 'q'."),
        ("lora.targets=[q, w1]", "lora.targets.1 must be one of 'q', 'k', 'v', 'r', 'gate' or 'o'; got 'w1'."),
        ("lora.targets=[]", "lora.targets must"),
        ("rollout.max_model_len=10", "rollout.max_model_len must be at least data.max_prompt_length"),
        (
            "rollout.draft.refresh.interval=99",
            "rollout.draft.refresh.interval must be at most trainer.num_steps = 18; got 99. Lower it",
        ),
        ("rollout.draft.refresh={}", "rollout.draft.refresh.interval must be given; it is missing. Steps between"),
        ("rollout.draft.refresh={interval: 0}", "rollout.draft.refresh.interval must be greater than 0; got 0."),
        ("rollout.draft.refresh={interval: 1, lr: 1}", "rollout.draft.refresh.lr is no key of the recipe."),
        ("trainer.policy_mini_batch_size=5", "trainer.policy_mini_batch_size must divide trainer.train_batch_size"),
        ("trainer.num_gpus_per_node=7", "must be a multiple of trainer.num_gpus_per_node x trainer.num_nodes = 7"),
        ("rollout.vllm_args.max-model-len=3", "rollout.max_model_len decides it"),
        (
            "trainer.skyrl_args.trainer.seed=3",
            "trainer.skyrl_args.trainer.seed must not be set: trainer.seed decides it",
        ),
        ("trainer.deepspeed_args.zero_optimization.stage=3", "trainer.zero_stage decides it"),
        (
            "trainer.deepspeed_args={zero_optimization: {stage: 3}}",
            "zero_optimization.stage must not be set: trainer.ze",
        ),
        (
            "trainer.deepspeed_args.bf16.enabled=true",
            "trainer.deepspeed_args.bf16.enabled must not be set: trainer.dtyp",
        ),
        ("trainer.skyrl_args={trainer: {seed: 3}}", "trainer.skyrl_args.trainer.seed must not be set: trainer.seed"),
        ("model=3", "model must be"),
        ("nonsense", "must have the form section.field=value"),
        ("model.path.x=3", "model.path must be a section; it is a value"),
        ("trainer.num_steps=[", "the value must be YAML"),
        ("logging.run_name=../x", "logging.run_name must be the name of one directory; got '../x'."),
        ("logging.runs_dir=null", "logging.runs_dir must be a path; got None."),
        ("rollout.vllm_args.logprobs-mode=raw_logits", "must not be set: the trainer needs its own value"),
        ("rollout.vllm_args.lora_target_modules=[x]", "lora.targets decides it"),
        ("rollout.vllm_args.additional_config={inkling2: {}}", "rollout.strict_kernels decides it"),
        (
            "rollout.draft.num_tokens=0",
            "rollout.draft.num_tokens must be greater than 0; got 0. Tokens drafted per step",
        ),
        ("rollout.draft.sampling=random", "must be one of 'probabilistic' or 'greedy'; got 'random'."),
        (
            "rollout.draft={tokens: 3}",
            "rollout.draft.tokens is no key of the recipe. Did you mean rollout.draft.num_tok",
        ),
        ("rollout.vllm_args.speculative_config={method: ngram}", "rollout.draft decides it"),
        ("rollout.vllm_args.worker-extension-cls=a.B", "rollout.draft decides it"),
        ("rollout.vllm_args.middleware=[a.B]", "must not be set: the trainer needs its own value"),
        ("rollout.vllm_args.weight_transfer_config={}", "must not be set: the trainer needs its own value"),
        ("rollout.strict_kernels=1", "rollout.strict_kernels must be a boolean; got 1. A GPU kernel that does not"),
    ],
)
def test_faults_are_named(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("quickstart.yaml", [override])
    assert message in str(caught.value)


def test_a_draft_must_fit_into_a_step() -> None:
    assert load("quickstart.yaml").rollout.draft is None
    assert load("quickstart.yaml", ["rollout.draft={}"]).rollout.draft is not None
    with pytest.raises(RecipeError, match=r"must be above rollout.draft.num_tokens = 7; got 7"):
        load("quickstart.yaml", ["rollout.draft.num_tokens=7", "rollout.max_num_batched_tokens=7"])


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        load("quickstart.yaml", ["trainer.nothing=1", "lora.rank=3", "model.path=4"])
    assert "3 faults" in str(caught.value)


def test_missing_sections_and_files(tmp_path: Path) -> None:
    empty = tmp_path / "r.yaml"
    empty.write_text("model: {path: x}\n")
    with pytest.raises(RecipeError, match=r"(?s)data must be given.*environment must be given.*trainer must be given"):
        load(empty)
    empty.write_text("")
    with pytest.raises(RecipeError, match="must hold a mapping of sections"):
        load(empty)
    empty.write_text("model: {path: x}\nmodel: {path: y}\n")
    with pytest.raises(RecipeError, match="model must be given once"):
        load(empty)
    empty.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="must be a readable file of UTF-8 text"):
        load(empty)
    with pytest.raises(RecipeError, match=r"there|none\. Give a path, or one that ships: .*quickstart.yaml"):
        load(tmp_path / "absent.yaml")


def test_overrides_reach_the_recipe_in_order() -> None:
    recipe = load("quickstart.yaml", ["trainer.num_steps=3", "trainer.num_steps=5", "lora.targets=[q, gate]"])
    assert (recipe.trainer.num_steps, recipe.lora.targets) == (5, ("q", "gate"))
    dotted = load("quickstart.yaml", ["trainer.deepspeed_args.zero_optimization.reduce_bucket_size=1000"])
    assert dotted.trainer.deepspeed_args == {"zero_optimization.reduce_bucket_size": 1000}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("2.5E+1", 25.0),
        (".5", 0.5),
        ("010", 10),
        ("-3", -3),
        ("true", True),
        ("~", None),
        ("null", None),
    ]
    + [(text, text) for text in ("off", "yes", "2026-11-29", "12:30", "1_000", "0x10", "'1e-3'")],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    """YAML 1.1 would make text of 1e-3, and false of the `off` that two fields may be."""
    recipe = load("quickstart.yaml", [f"environment.args.x={text}"])
    assert recipe.environment.args["x"] == (value.strip("'") if isinstance(value, str) else value)
    assert type(recipe.environment.args["x"]) is type(value)


def test_what_the_header_of_the_quick_start_proposes_works() -> None:
    header = (Path(__file__).parents[2] / "recipes" / "quickstart.yaml").read_text().split("\nmodel:")[0]
    proposed = re.findall(r"`-s ([^`]+)`", header)
    assert proposed
    load("quickstart.yaml", proposed)


def test_text_that_looks_like_something_else_survives_a_round_trip(tmp_path: Path) -> None:
    values = {"a": "1e-3", "b": "off", "c": "010", "d": "2026-11-29", "e": 1e-5, "f": "null", "g": ".nan", "h": "1:30"}
    recipe = load("quickstart.yaml", ["logging.wandb=off", "algorithm.importance_sampling=off"])
    recipe = recipe.model_copy(update={"environment": recipe.environment.model_copy(update={"args": values})})
    (tmp_path / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    assert load(tmp_path / "recipe.yaml") == recipe


def test_nested_maps_and_dotted_keys_say_the_same() -> None:
    nested = load("quickstart.yaml", ["trainer.deepspeed_args={zero_optimization: {offload_param: {device: cpu}}}"])
    dotted = load("quickstart.yaml", ["trainer.deepspeed_args.zero_optimization.offload_param.device=cpu"])
    assert nested == dotted
    assert nested.trainer.deepspeed_args == {"zero_optimization.offload_param.device": "cpu"}
