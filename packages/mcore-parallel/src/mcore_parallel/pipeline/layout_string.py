"""Megatron's layout strings: ``Et*3|(tt|)*29,m|L`` says which layers each pipeline stage holds. No torch.

``E`` is the embedding, ``t`` a transformer layer, ``L`` the output layer with the loss; ``|`` begins the next stage,
``*n`` repeats what stands before it, parentheses group, commas and spaces are for the eye.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

EMBEDDING, LAYER, LOSS, PREDICTION, NEXT_STAGE = "E", "t", "L", "m", "|"
SYMBOLS = EMBEDDING + LAYER + LOSS + PREDICTION + NEXT_STAGE
BLANKS = ", "
# More than any pipeline has; a slip of the finger in a repeat count must not fill the memory.
LONGEST = 100_000


def stage_sizes(text: str) -> tuple[int, ...]:
    """The number of layers on each stage of the layout ``text``, in model order; 0 for a stage without layers.

    Raises:
        ValueError: the text is not a layout (the position is named), or the embedding is not at the very front, the
            output layer not at the very end, or there is a layer of multi-token prediction, which no model has.
    """
    stages = _Parser(text).parse().split(NEXT_STAGE)
    whole = "".join(stages)
    if PREDICTION in whole:
        raise ValueError(f"{PREDICTION} is a layer of multi-token prediction, which models here do not have; leave it")
    for symbol, name, at_place, place in (
        (EMBEDDING, "embedding", stages[0].startswith(EMBEDDING), "first in the first stage"),
        (LOSS, "output layer with the loss", stages[-1].endswith(LOSS), "last in the last stage"),
    ):
        if whole.count(symbol) != 1 or not at_place:
            raise ValueError(
                f"{symbol}, the {name}, must stand exactly once and {place}, it stands {whole.count(symbol)} times"
                + ("" if at_place or symbol not in whole else f" and not {place}")
            )
    return tuple(stage.count(LAYER) for stage in stages)


def layout_text(sizes: Sequence[int]) -> str:
    """The layout string of stages that hold ``sizes`` layers: the inverse of :func:`stage_sizes`."""
    if len(sizes) == 1:
        return EMBEDDING + _layers(sizes[0]) + LOSS
    middle = "".join(_stages(size, len(list(run))) for size, run in groupby(sizes[1:-1]))
    return EMBEDDING + _layers(sizes[0]) + NEXT_STAGE + middle + _layers(sizes[-1]) + LOSS


def _stages(size: int, count: int) -> str:
    stage = _layers(size) + NEXT_STAGE
    return stage * count if count < 3 else f"({stage})*{count}"


def _layers(size: int) -> str:
    return LAYER * size if size < 4 else f"{LAYER}*{size}"


class _Parser:
    """Reads ``sequence := (item ["*" number])*`` with ``item := symbol | "(" sequence ")"``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def parse(self) -> str:
        """The layout with all repeats and groups written out.

        Raises:
            ValueError: at the named position stands something else than a layout allows.
        """
        written = self._sequence(depth=0)
        if self._peek():
            raise self._error("a ) closes nothing")
        return written

    def _sequence(self, depth: int) -> str:
        written: list[str] = []
        while self._peek() not in ("", ")"):
            written.append(self._repeated(self._item(depth)))
            if sum(map(len, written)) > LONGEST:
                raise self._error(f"more than {LONGEST} symbols")
        return "".join(written)

    def _item(self, depth: int) -> str:
        symbol = self._peek()
        if symbol == "(":
            opened = self.at
            self.at += 1
            # Python's own stack limits the depth of calls; nobody nests this far on purpose.
            inner = self._sequence(depth + 1) if depth < 32 else ""
            if self._peek() != ")":
                self.at = opened
                raise self._error("this ( is not closed")
            self.at += 1
            return inner
        if symbol not in SYMBOLS:
            raise self._error(f"{symbol!r} is none of {' '.join(SYMBOLS)} * ( )")
        self.at += 1
        return symbol

    def _repeated(self, item: str) -> str:
        if self._peek() != "*":
            return item
        self.at += 1
        self._peek()
        begin = self.at
        while self.text[self.at : self.at + 1] in tuple("0123456789"):
            self.at += 1
        digits = self.text[begin : self.at]
        if not digits or int(digits[:9]) < 1 or len(digits) > 9:
            self.at = begin
            raise self._error("* needs a number of repeats, 1 or more")
        if len(item) * int(digits) > LONGEST:
            raise self._error(f"more than {LONGEST} symbols")
        return item * int(digits)

    def _peek(self) -> str:
        """The next symbol that is not blank, where the parser then stands; empty at the end."""
        while self.text[self.at : self.at + 1] in tuple(BLANKS):
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"{reason} (character {self.at + 1})")
