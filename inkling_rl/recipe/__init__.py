"""Recipes: the schema, and reading and writing them as YAML. Imports neither torch nor a vendor."""

from inkling_rl.recipe.file import dump, fields, find, load, parse
from inkling_rl.recipe.schema import Dtype, Environment, Lora, LoraTarget, Recipe, RecipeError

__all__ = [
    "Dtype",
    "Environment",
    "Lora",
    "LoraTarget",
    "Recipe",
    "RecipeError",
    "dump",
    "fields",
    "find",
    "load",
    "parse",
]
