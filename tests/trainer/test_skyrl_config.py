"""Every recipe that ships becomes a configuration that SkyRL accepts; what the trainer has not is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inkling_rl.engine_args import DRAFT_ROUTES, DRAFT_WORKER
from inkling_rl.recipe import Recipe, RecipeError, load
from tests.trainer.conftest import Recipes

SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def build(recipe: Recipe, **changes: Any) -> Any:
    from trainer import skyrl_config

    settings: dict[str, Any] = {
        "model_path": Path("/models/x"), "run_dir": Path("/runs/y"), "engine_url": "http://127.0.0.1:1",
        "stop_token_ids": [7],
    }  # fmt: skip
    return skyrl_config.build(recipe, **(settings | changes))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_accepted(path: Path) -> None:
    recipe = load(path)
    url = "http://127.0.0.1:1" if recipe.rollout.placement == "standalone" else None
    cfg = build(recipe, engine_url=url)
    assert cfg.trainer.strategy == "deepspeed"
    assert cfg.trainer.algorithm.temperature == recipe.rollout.temperature
    assert Recipe.model_validate_json(cfg.trainer.recipe) == recipe
    assert not cfg.trainer.placement.colocate_all


def test_the_recipe_decides(recipes: Recipes) -> None:
    cfg = build(
        recipes(algorithm={"importance_sampling_cap": 3.0, "normalize_by_std": False}, data={"eval": "e.jsonl"})
    )
    algorithm = cfg.trainer.algorithm
    assert algorithm.off_policy_correction.tis_ratio_type == "token"
    assert algorithm.off_policy_correction.token_tis_ratio_clip_high == 3.0
    assert algorithm.grpo_norm_by_std is False
    assert cfg.generator.sampling_params.additional_kwargs == {"stop_token_ids": [7]}
    assert (cfg.trainer.eval_interval, cfg.trainer.eval_before_train) == (2, True)
    assert build(recipes(data={"eval": "e.jsonl"}), is_resumed=True).trainer.eval_before_train is False
    off = build(recipes(algorithm={"importance_sampling": "off"})).trainer.algorithm
    assert off.off_policy_correction.tis_ratio_type is None


def test_micro_batches_divide_what_a_worker_gets(recipes: Recipes) -> None:
    cfg = build(recipes(trainer={"micro_batch_size_per_gpu": 5, "train_batch_size": 6}))
    assert cfg.trainer.micro_train_batch_size_per_gpu == 4  # of 24 sequences, the largest divisor up to 5


def test_engines_as_ray_actors_get_the_same_arguments(recipes: Recipes) -> None:
    arguments = build(recipes(), engine_url=None).generator.inference_engine.engine_init_kwargs
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["enable_lora"] is True
    assert arguments["served_model_name"] == ["base"] and arguments["max_model_len"] == 128
    strict = build(recipes(rollout={"strict_kernels": True}), engine_url=None).generator.inference_engine
    assert strict.engine_init_kwargs["additional_config"] == {"inkling2": {"strict_kernels": True}}


def test_engines_as_ray_actors_can_replace_their_draft(recipes: Recipes, checkpoint: Path) -> None:
    """With our worker class in the place of SkyRL's, without which SkyRL's way of sending weights is unknown."""
    cfg = build(recipes(rollout={"draft": {}}), engine_url=None, model_path=checkpoint)
    arguments = cfg.generator.inference_engine.engine_init_kwargs
    assert arguments["worker_extension_cls"] == DRAFT_WORKER
    assert arguments["middleware"] == [DRAFT_ROUTES]
    assert arguments["weight_transfer_config"] is None


def test_escape_hatch_is_merged_last_and_checked(recipes: Recipes) -> None:
    cfg = build(recipes(trainer={"skyrl_args": {"trainer.algorithm.clip_ratio_c": 5.0}}))
    assert cfg.trainer.algorithm.clip_ratio_c == 5.0
    with pytest.raises(RecipeError, match=r"trainer\.skyrl_args.trainer.algorithm.use_kl_loss must be False; got True"):
        build(recipes(trainer={"skyrl_args": {"trainer.algorithm.use_kl_loss": True}}))
    with pytest.raises(RecipeError, match=r"SkyRL refuses the configuration: .*no_such_key"):
        build(recipes(trainer={"skyrl_args": {"trainer.no_such_key": 1}}))


def test_what_a_recipe_field_decides_cannot_be_set_twice(recipes: Recipes) -> None:
    """Every key of SkyRL's that follows from the recipe is refused in the escape hatch, not overridden in silence."""
    from trainer import skyrl_config

    one = recipes()
    other = recipes(
        data={"train": "o.jsonl", "eval": "e.jsonl", "max_prompt_length": 33},
        environment={"name": "gsm8k", "max_turns": 2},
        rollout={"dtype": "bfloat16", "max_generate_length": 9, "temperature": 0.5, "max_num_seqs": 3},
        trainer={
            "seed": 5, "num_steps": 7, "train_batch_size": 9, "micro_batch_size_per_gpu": 2, "learning_rate": 0.5,
            "lr_scheduler": "linear", "num_warmup_steps": 3, "eval_interval": 3, "eval_batch_size": 5,
            "gradient_checkpointing": True,
        },
        lora={"rank": 16, "alpha": 3.0},
        algorithm={
            "n_samples_per_prompt": 2, "advantage_estimator": "rloo", "policy_loss": "gspo", "eps_clip_low": 0.1,
            "eps_clip_high": 0.1, "loss_reduction": "sequence_mean", "normalize_by_std": False,
            "importance_sampling": "off", "importance_sampling_cap": 9.0,
        },
        logging={"project_name": "p"},
        checkpoint={"interval": 1, "max_to_keep": 1},
    )  # fmt: skip
    first, second = (
        skyrl_config._settings(recipe, Path(f"m{n}"), Path(f"r{n}"), [7])
        | skyrl_config._engine(recipe, Path(f"m{n}"), Path(f"r{n}"), "http://h:1")
        for n, recipe in enumerate((one, other))
    )
    changed = {key for key in first if first[key] != second[key]} - {"trainer.recipe"}
    assert len(changed) > 30
    for key in sorted(changed):
        with pytest.raises(ValueError, match="must not be set"):
            recipes(trainer={"skyrl_args": {key: first[key]}})


@pytest.mark.parametrize(
    ("key", "value"),
    [("trainer.algorithm.dynamic_sampling.type", "filter"), ("trainer.hf_save_interval", 2)],
)
def test_what_this_trainer_has_not_is_refused_at_the_start(recipes: Recipes, key: str, value: object) -> None:
    from trainer import skyrl_config

    build(recipes(trainer={"skyrl_args": {key: skyrl_config.UNSUPPORTED[key]}}))
    with pytest.raises(RecipeError, match=rf"trainer\.skyrl_args\.{key} must be .*; got"):
        build(recipes(trainer={"skyrl_args": {key: value}}))


def test_the_driver_imports_no_vllm_and_its_root_nothing_heavy() -> None:
    code = (
        "import sys, trainer.run; assert not {'torch', 'ray', 'skyrl', 'vllm', 'tqdm'} & sys.modules.keys()\n"
        "from trainer import vendor; vendor.prepare(); import trainer.experiment, trainer.loop, trainer.worker\n"
        "print('vllm' in sys.modules, 'skyrl' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False True\n"
