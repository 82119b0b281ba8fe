"""When a run ends early: signals and the time limit. Ranks agree on it inside the step, so that all leave together."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL = 1.0


@dataclass
class StopRequest:
    """This rank's wish to end the run after the current step, and why."""

    duration_minutes: float | None = None
    reason: str | None = None
    began: float = field(default_factory=time.monotonic)
    asked: float = 0.0

    def wanted(self) -> bool:
        """Whether to stop now: a signal came, or the time is up."""
        minutes = (time.monotonic() - self.began) / 60
        if self.reason is None and self.duration_minutes is not None and minutes >= self.duration_minutes:
            self.reason = f"the {self.duration_minutes:g} minutes of --exit-duration-in-mins are over"
        return self.reason is not None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Turn SIGTERM and SIGINT into a wish to stop; a second SIGINT interrupts at once."""

        def handle(number: int, _frame: FrameType | None) -> None:
            # A terminal's interrupt comes twice at once: to the whole process group, and passed on by the launcher.
            if number == signal.SIGINT and self.reason is not None and time.monotonic() - self.asked > SAME_SIGNAL:
                raise KeyboardInterrupt
            self.asked = time.monotonic()
            self.reason = self.reason or f"{signal.Signals(number).name} received"

        previous = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
