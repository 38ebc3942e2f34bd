"""When speculation rests: looking for drafts takes little time where it finds none, and drafts that slow steps down are
left alone for long."""

from __future__ import annotations

from collections import deque

from quire.speculate.step_costs import median

LOOKS = 0.005  # of the time, at most, in looks that find nothing
_LONGEST = 256  # steps that one look is paid by, at most: it may have waited for a processor
_RECENT = 3  # looks whose median counts: one may have waited for a processor
_EARLY = 128  # steps owed, up to which a look may come at once where there is something to see
# What drafts have won, in steps: from how much lost on they rest, how much won is remembered, and what one step counts.
_LOST, _REMEMBERED, _WORST = -4.0, 8.0, -1.5
_FIRST_REST, _LAST_REST = 128, 1024  # steps


class Rests:
    """Counts the steps until the next look.

    A look that finds nothing is paid by steps without one. Drafts promise a gain, and of many noisy promises the
    greatest are believed: so what they did win is added up, and a rest begins when too much is lost. Rests that end
    with another loss become longer.
    """

    __slots__ = ("_looks", "_owed", "_rest", "_resting", "_won", "passed")

    def __init__(self) -> None:
        self._owed = self._resting = 0
        self._looks = deque[float](maxlen=_RECENT)
        self._won, self._rest = 0.0, _FIRST_REST
        self.passed = 0  # steps since the last look

    @property
    def resting(self) -> bool:
        """Whether drafts are left alone, whatever there is to see."""
        return self._resting > 0

    def step(self) -> bool:
        """Count a step. Returns whether a look is due."""
        self.passed += 1
        if self._resting:
            self._resting -= 1
            return False
        self._owed -= self._owed > 0
        return not self._owed

    def quiet(self, *, seeing: bool = False) -> int:
        """Steps to come in which there will be no look; for one who is `seeing`, whatever there is to see."""
        return max(self._resting or self._owed - (_EARLY if seeing else 0), 1) - 1

    def idled(self, steps: int) -> None:
        """Count steps without a look."""
        self.passed += steps
        if self._resting:
            self._resting = max(0, self._resting - steps)
        else:
            self._owed = max(0, self._owed - steps)

    def may_look(self) -> bool:
        """Whether there may be a look before it is due, since there is something to see."""
        return not self._resting and self._owed <= _EARLY

    def looked(self, seconds: float, step: float) -> None:
        """Take in a look that found nothing, where a step takes so long (0: not known)."""
        self._looks.append(seconds)
        if step:
            self._owed += min(round(median(self._looks) / (LOOKS * step)), _LONGEST)

    def won(self, steps: float) -> bool:
        """Take in what the drafts of a step won, in steps without drafts. Returns whether a rest begins."""
        self._won = min(self._won + max(steps, _WORST), _REMEMBERED)
        if steps > 0:  # what is won pays looks
            self._owed = max(0, self._owed - round(steps / LOOKS))
        if self._won == _REMEMBERED:
            self._rest = _FIRST_REST
        if self._won > _LOST:
            return False
        self._won, self._resting = 0.0, self._rest
        self._rest = min(2 * self._rest, _LAST_REST)
        return True

    def end(self) -> None:
        """There is something new to look at."""
        self._owed = self._resting = 0
