"""A small encyclopaedia, questions about it, and a search tool that knows every page."""

from afm.datasets.encyclopaedia import Encyclopaedia, generate
from afm.datasets.mini_world import WorldSplit
from afm.tools import ToolResult

WORLD = Encyclopaedia(200, seed=3)


class PageOfTheName:
    """The encyclopaedia's own page for the first name in a query."""

    name = "wiki_search"

    def __init__(self, world=WORLD):
        self.world = world

    async def call(self, argument):
        words = argument.split()
        names = (" ".join(words[at : at + 2]) for at in range(len(words) - 1))
        number = next((found for name in names if (found := self.world.names.number(name)) is not None), None)
        if number is None:
            return ToolResult("No passage was found.")
        return ToolResult(f"[1] {self.world.page(number).contents}")

    async def close(self):
        pass


class Says:
    """A tool that always returns the same."""

    def __init__(self, text, ok=True):
        self.result = ToolResult(text, ok=ok)

    async def call(self, argument):
        return self.result

    async def close(self):
        pass


def questions(count, hops=(2,), world=WORLD):
    return list(generate(world, WorldSplit.TRAIN, count, seed=0, hops=hops))
