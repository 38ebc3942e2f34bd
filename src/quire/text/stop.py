"""Match stop strings in a stream of text, and hold back text that may be the start of one.

An Aho-Corasick automaton (Aho & Corasick, CACM 1975) matches all stop strings at once: it visits each character once,
whatever the deltas, and holds back exactly the longest suffix of the text that begins a stop string.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Sequence

from quire.types import RequestError

MAX_STOP_CHARS_TOTAL = 32768  # one automaton state each: bounds the memory of a request to a few MB


class StopStrings:
    """The compiled stop strings of a request, immutable and shared by its samples. Building takes O(total characters).

    Raises RequestError for an empty string, or if all strings together exceed 32,768 characters.
    """

    __slots__ = ("_depth", "_fail", "_first", "_goto", "_hit", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        total = sum(map(len, strings))
        if total > MAX_STOP_CHARS_TOTAL:
            raise RequestError(
                "stop", f"{total} characters in total exceed the limit of {MAX_STOP_CHARS_TOTAL}"
            )
        if not all(strings):
            raise RequestError("stop", "every stop string must be a non-empty string")
        self.strings = tuple(strings)
        self._goto: dict[tuple[int, str], int] = {}
        self._depth = array("i", [0])
        self._hit = array("i", [-1])  # state -> index of the longest stop string that ends there, -1 for none
        for index, text in enumerate(self.strings):
            self._insert(index, text)
        self._fail = array("i", bytes(4 * len(self._depth)))
        self._link()
        firsts = "".join(sorted({text[0] for text in self.strings}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")

    def matcher(self, *, include: bool = False) -> StopMatcher:
        """Make a matcher; `include` emits the stop string itself before ending."""
        return StopMatcher(self, include=include)

    def _insert(self, index: int, text: str) -> None:
        state = 0
        for char in text:
            following = self._goto.get((state, char))
            if following is None:
                following = self._goto[state, char] = len(self._depth)
                self._depth.append(self._depth[state] + 1)
                self._hit.append(-1)
            state = following
        if self._hit[state] < 0:  # the first of equal strings is reported
            self._hit[state] = index

    def _link(self) -> None:
        """Failure links in breadth-first order; a state inherits the match of the suffix it fails to."""
        children: dict[int, list[tuple[str, int]]] = {}
        for (state, char), following in self._goto.items():
            children.setdefault(state, []).append((char, following))
        queue = deque(following for _, following in children.get(0, ()))
        while queue:
            state = queue.popleft()
            if self._hit[state] < 0:
                self._hit[state] = self._hit[self._fail[state]]
            for char, following in children.get(state, ()):
                self._fail[following] = self.step(self._fail[state], char)
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        """The state after `char`: amortized constant time, because every failure link shortens the match."""
        goto = self._goto
        while (following := goto.get((state, char))) is None:
            if not state:
                return 0
            state = self._fail[state]
        return following


class StopMatcher:
    """Stop strings of one sample. The match that ends first wins; of several that end together, the longest.

    The output depends only on the whole text, never on the deltas.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""  # exactly the characters that led from the root to _state
        self.matched: str | None = None

    def push(self, delta: str) -> tuple[str, str | None]:
        """Add text; return the text that may be shown, and the stop string if one ended the sample.

        After a match there is no more output.
        """
        if self.matched is not None:
            return "", self.matched
        stops = self._stops
        state = self._state
        if not state and stops._first.search(delta) is None:  # nearly every delta
            return delta, None
        position, size = 0, len(delta)
        while True:
            if not state:
                candidate = stops._first.search(delta, position)
                if candidate is None:
                    position = size
                    break
                position = candidate.start()
            elif position >= size:
                break
            state = stops.step(state, delta[position])
            position += 1
            if stops._hit[state] >= 0:
                return self._match(self._held + delta[:position], stops.strings[stops._hit[state]])
        text = self._held + delta
        keep = len(text) - stops._depth[state]
        self._state, self._held = state, text[keep:]
        return text[:keep], None

    def finish(self) -> str:
        """Return the held-back text after the sample has ended without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _match(self, text: str, stop: str) -> tuple[str, str]:
        self.matched = stop
        self._held, self._state = "", 0
        return (text if self._include else text[: len(text) - len(stop)]), stop
