"""What the worlds of ``afm quickstart`` do differently; everything else is :mod:`afm.cli.pipeline`."""

from afm.cli.recipes.recipe import Plan, Recipe, recipe_of

__all__ = ["Plan", "Recipe", "recipe_of"]
