"""Flags from configuration sections: a field ``lr_decay_style`` is the flag ``--lr-decay-style``. No torch.

The field's description is the flag's help. Values stay text here: the sections themselves check them, so that a flag
and a recipe obey the same rules and all mistakes are reported together. Flags are read before click sees them, for
three things click does not do: ``_`` and ``-`` mean the same, a list flag takes every value up to the next flag
(``--data-path 0.3 a 0.7 b``), and all unknown flags are reported at once, each with the nearest known one.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mcore_cli.errors import UserError, did_you_mean

Kind = Literal["switch", "value", "list"]
NONE = "none"
VALUE = re.compile(r"-?[\d.][\w.+-]*")
PROBLEMS = "mcore_cli.options.problems"
# What people call the sizes; no flag of their own, but the right suggestion.
ABBREVIATIONS = {
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--sp": "--sequence-parallel",
    "--mbs": "--micro-batch-size",
    "--gbs": "--global-batch-size",
    "--nproc": "--nproc-per-node",
    "--iters": "--train-iters",
}


@dataclass(frozen=True)
class Flag:
    """One flag: the section and field it sets, its name and, for a switch, the name that turns it off."""

    section: str
    field: str
    name: str
    kind: Kind
    negative: str | None = None
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    metavar: str = "TEXT"
    help: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling that help shows."""
        return (self.name,) if self.negative is None else (self.name, self.negative)


def flag_name(field: str, info: FieldInfo | None = None) -> str:
    """The flag of ``field``: its name with dashes, unless the field's ``json_schema_extra`` names another."""
    extra = info.json_schema_extra if info is not None else None
    if isinstance(extra, dict) and "flag" in extra:
        return str(extra["flag"])
    return "--" + field.replace("_", "-")


def flags_of(tree: type[BaseModel], fields: Iterable[str] | None = None) -> list[Flag]:
    """The flags of every section of ``tree``, in order; only those of ``fields`` if given.

    Raises:
        ValueError: two fields give the same flag, so one of them could not be set.
    """
    wanted = None if fields is None else set(fields)
    flags = [
        _flag(section, name, info)
        for section, model in sections_of(tree).items()
        for name, info in model.model_fields.items()
        if wanted is None or name in wanted
    ]
    seen: dict[str, Flag] = {}
    for flag in flags:
        for name in flag.names:
            other = seen.setdefault(canonical(name), flag)
            if other is not flag:
                raise ValueError(f"{name} is both {other.section}.{other.field} and {flag.section}.{flag.field}")
    return flags


def sections_of(tree: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections of ``tree`` by name: its fields that are models themselves."""
    found = {name: info.annotation for name, info in tree.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def canonical(name: str) -> str:
    """The spelling under which flags are looked up: ``--nproc_per_node`` and ``--nproc-per-node`` are one."""
    return name.replace("_", "-")


def _flag(section: str, field: str, info: FieldInfo) -> Flag:
    kind, choices, metavar, is_optional = _shape(info.annotation)
    name = flag_name(field, info)
    shown = (
        ""
        if info.is_required() or info.get_default(call_default_factory=True) in (None, [], False)
        else (f"  [default: {info.get_default(call_default_factory=True)}]")
    )
    return Flag(
        section=section,
        field=field,
        name=name,
        kind=kind,
        negative=_negative(name) if kind == "switch" else None,
        choices=choices,
        is_optional=is_optional,
        metavar=metavar,
        help=f"{info.description or ''}{shown}",
    )


def _negative(name: str) -> str:
    # --no-load-optim is turned off by --load-optim, not by --no-no-load-optim.
    return "--" + name.removeprefix("--no-") if name.startswith("--no-") else "--no-" + name.removeprefix("--")


def _shape(annotation: Any) -> tuple[Kind, tuple[str, ...], str, bool]:
    """``(kind, choices, metavar, accepts none)`` of a field's type."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [part for part in get_args(annotation) if part is not type(None)]
        kind, choices, metavar, _ = _shape(inner[0])
        return kind, choices, metavar, len(inner) < len(get_args(annotation))
    if annotation is bool:
        return "switch", (), "", False
    if get_origin(annotation) is Literal:
        choices = tuple(str(choice) for choice in get_args(annotation))
        return "value", choices, f"[{'|'.join(choices)}]", False
    if get_origin(annotation) in (list, tuple):
        return "list", (), "TEXT ...", False
    return "value", (), {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT"), False


class SectionOption(click.Option):
    """A click option made from a :class:`Flag`; it carries the flag, and passes text on unchecked."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        settings: dict[str, Any] = {"help": flag.help, "default": None}
        if flag.kind != "switch":
            settings |= {"type": click.STRING, "metavar": flag.metavar, "multiple": flag.kind == "list"}
        super().__init__(["/".join(flag.names), flag.field], **settings)


class SectionCommand(click.Command):
    """A click command with flags of configuration sections, shown in help under the name of their section."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Normalise ``args`` as the module says, then parse what is known of them.

        Raises:
            UserError: the arguments cannot be parsed, and unknown flags beside that.
        """
        if any(arg in ctx.help_option_names for arg in args):
            return super().parse_args(ctx, args)
        args, problems = normalise(args, [p for p in self.params if isinstance(p, click.Option)])
        ctx.meta[PROBLEMS] = problems
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise UserError(*problems, error.format_message()) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; one that does not tell the problems of its flags together with others has them told here.

        Raises:
            UserError: unknown flags or flags without their value, all of them.
        """
        if not self.tells_problems and ctx.meta[PROBLEMS]:
            raise UserError(*ctx.meta[PROBLEMS])
        return super().invoke(ctx)

    tells_problems = False

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command's own options first, then one block for each section."""
        blocks: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            block = parameter.flag.section.capitalize() if isinstance(parameter, SectionOption) else "Options"
            line = parameter.get_help_record(ctx)
            if line is not None:
                blocks.setdefault(block, []).append(line)
        for block, lines in blocks.items():
            with formatter.section(block):
                formatter.write_dl(lines)


def given_flags(ctx: click.Context) -> dict[str, Any]:
    """The section fields that the user set on the command line, and nothing else: ``{field: text, bool or list}``."""
    given: dict[str, Any] = {}
    for parameter in ctx.command.params:
        if isinstance(parameter, SectionOption):
            value = ctx.params.get(parameter.flag.field)
            if value is not None and value != ():
                given[parameter.flag.field] = _plain(parameter.flag, value)
    return given


def _plain(flag: Flag, value: Any) -> Any:
    if flag.kind == "list":
        return list(value)
    return None if flag.is_optional and value == NONE else value


def section_options(
    tree: type[BaseModel], fields: Iterable[str] | None = None
) -> Callable[[click.Command], click.Command]:
    """Decorator of a :class:`SectionCommand`: adds the flags of ``tree`` (only ``fields`` of it, if given)."""

    def add(command: click.Command) -> click.Command:
        command.params.extend(SectionOption(flag) for flag in flags_of(tree, fields))
        return command

    return add


def normalise(arguments: Sequence[str], options: Sequence[click.Option]) -> tuple[list[str], list[str]]:
    """Rewrite ``arguments`` into what click reads: known spellings, and each value of a list flag behind its own flag.

    The second part lists unknown flags and flags without their value; they are left out of the first, with the number
    that follows an unknown one (a word may be a recipe).
    """
    known = {canonical(name): (name, option) for option in options for name in (*option.opts, *option.secondary_opts)}
    result: list[str] = []
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if token == "--":
            result += [token, *rest]
            break
        if not token.startswith("--"):
            result.append(token)
            continue
        spelled, equals, attached = token.partition("=")
        if canonical(spelled) not in known:
            problems.append(_unknown(spelled, known.values()))
            if not equals and rest and VALUE.fullmatch(rest[0]):
                rest.pop(0)
            continue
        name, option = known[canonical(spelled)]
        values = [attached] if equals else _take(rest, option)
        if not option.is_flag and not values:
            problems.append(f"{name} needs a value")
        if option.is_flag and equals:
            problems.append(f"{name} takes no value (given {attached!r}); use {' or '.join(_all_names(option))}")
        result += [part for value in values for part in (name, value)] if not option.is_flag else [name]
    return result, problems


def _take(rest: list[str], option: click.Option) -> list[str]:
    """Remove and return the values of ``option`` from the front of ``rest``: up to the next flag, if it is a list."""
    most = 0 if option.is_flag else len(rest) if option.multiple else 1
    values: list[str] = []
    while rest and len(values) < most and not rest[0].startswith("--"):
        values.append(rest.pop(0))
    return values


def _all_names(option: click.Option) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def _unknown(spelled: str, known: Iterable[tuple[str, click.Option]]) -> str:
    names = [name for name, _ in known]
    meant = ABBREVIATIONS.get(canonical(spelled))
    hint = f"; did you mean {meant}?" if meant in names else did_you_mean(canonical(spelled), names)
    return f"unknown flag {spelled}{hint}"
