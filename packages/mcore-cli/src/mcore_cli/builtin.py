"""Built-in plugins of mcore-cli, registered through the same hooks as anybody's. No torch, no click."""

from importlib import import_module
from typing import Any

from mcore_cli.specs import CommandSpec
from mcore_parallel.plugins import hookimpl


class Attribute:
    """Loads ``module:name`` when it is called."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __call__(self) -> Any:
        """Import the module and return the attribute."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)


@hookimpl
def mcore_cli_commands() -> list[CommandSpec]:
    """The commands of the main job."""
    commands = "mcore_cli.commands"
    return [
        CommandSpec("train", Attribute(f"{commands}.train:train"), "Train a model from a recipe and flags."),
        CommandSpec("recipes", Attribute(f"{commands}.recipes:recipes"), "List the shipped recipes, or show one."),
        CommandSpec("data", Attribute(f"{commands}.data:data"), "Prepare a corpus, or look into one."),
        CommandSpec("generate", Attribute(f"{commands}.generate:generate"), "Continue a text with a trained model."),
        CommandSpec("eval", Attribute(f"{commands}.evaluate:evaluate"), "Measure the perplexity of a trained model."),
        CommandSpec(
            "verify", Attribute(f"{commands}.verify:verify"), "Prove that a layout does not change the answer."
        ),
        CommandSpec("schedule", Attribute(f"{commands}.schedule:schedule"), "Look at pipeline schedules on paper."),
        CommandSpec("plugins", Attribute(f"{commands}.plugins:plugins"), "List what is registered, and by whom."),
    ]
