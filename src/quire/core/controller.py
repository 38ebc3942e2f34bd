"""How many tokens a step may have, and how many sequences run at once, so that classes of service keep their levels.

    step time allowed   the shortest TPOT of the classes whose streams run, and what shorter steps have left over; at
                        most the shortest ITL of these classes
    token budget        running streams, and as many prompt tokens as fit the rest of that time by the cost model
    sequences           as many as decode within the TPOT and the ITL

A TPOT is one of the mean, so a step may be longer by what earlier ones were shorter: prompts come in few large
chunks, between steps of streams alone. An ITL bounds nearly every gap, so each step. The chunk of each prompt follows
from the budget and the order of sequences. A class without both bounds nothing; where it is less urgent, it gets what
is left of a step and gives way in the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.core.cost_model import StepCostModel
from quire.core.scheduler import Scheduler
from quire.core.streams import count_streams
from quire.objectives import ServiceClass

_AIM = 0.92  # of a level: predictions have errors
_CREDIT = 6.0  # most time left over, in TPOTs
_LEAST_CHUNK = 16  # tokens: prompts never stop


class StepController:
    """Sets the limits of a scheduler before each step. O(classes) and O(running) to count streams."""

    def __init__(self, scheduler: Scheduler, classes: Sequence[ServiceClass], costs: StepCostModel) -> None:
        self._scheduler, self._costs = scheduler, costs
        # By class, infinite without a level: the mean of steps, and the longest one.
        self._means = [one.slo.tpot / 1e3 * _AIM if one.slo.tpot else math.inf for one in classes]
        self._longest = [one.slo.itl / 1e3 * _AIM if one.slo.itl else math.inf for one in classes]
        self._credit = [0.0] * len(classes)
        self._bounding: list[int] = []  # classes whose streams run
        self._turns = 1  # steps of a token: two where sequences take turns
        levels = min(self._means + self._longest, default=math.inf)
        self.active = math.isfinite(levels) and scheduler.config.enable_chunked_prefill

    def plan(self) -> None:
        """Before `schedule`."""
        if not self.active:
            return
        scheduler, caps = self._scheduler, self._scheduler.caps
        self._turns = turns = 1 + scheduler.shares
        streams = count_streams(scheduler.running, len(self._means))
        self._bounding = [
            i for i, count in enumerate(streams.by_class) if count and math.isfinite(self._usual(i))
        ]
        each = self._costs.weights
        rows, keys = -(-streams.rows // turns), streams.keys / turns  # of a step
        decode = each[0] + each[1] * rows + each[3] * keys
        budget, most = caps.tokens, caps.sequences
        if self._bounding:
            allowed = min(
                min(self._means[i] / turns + max(0.0, self._credit[i]), self._longest[i] / turns)
                for i in self._bounding
            )
            usual = min(self._usual(i) for i in self._bounding) / turns
            per_token = each[2] + each[4] * streams.depth
            chunk = (allowed - decode) / per_token if per_token else budget
            budget = min(budget, rows + max(_LEAST_CHUNK, int(chunk)))
            per_row = each[1] + each[3] * (keys / rows)
            if per_row:
                most = min(most, turns * max(1, int((usual - each[0]) / per_row)))
        scheduler.limits.tokens, scheduler.limits.sequences = budget, most

    def ran(self, seconds: float) -> None:
        """After a step: what it has left over, or taken."""
        for i in self._bounding:
            mean = self._means[i] / self._turns
            if math.isfinite(mean):
                self._credit[i] = max(-_CREDIT * mean, min(_CREDIT * mean, self._credit[i] + mean - seconds))

    def _usual(self, number: int) -> float:
        """Seconds between two tokens of a stream of a class, as its level has them; infinite without a level."""
        return min(self._means[number], self._longest[number])
