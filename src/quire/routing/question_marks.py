"""What two questions must have in common to the letter, however near their vectors are.

Vectors of sentences are near for "17 times 23" and "17 times 24", for Monday and Tuesday, and for a sentence and its
denial. Numbers, names, quotations, what follows a colon or a line's end, negations, words that ask, and words that have
an opposite are marks: questions with different marks are different questions. Numbers and names also have to come in
the same order, and so do all words where they are the same ones. The lists of words are English; numbers, names,
quotations and the rest hold for all languages. More marks can only lose hits.
"""

from __future__ import annotations

import hashlib
import re

_MARKS, _WORDS = 16, 8  # bytes of digests
_NUMBER = re.compile(r"\d+(?:[.,:/\-]\d+)*")
_QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|«([^»]+)»|`([^`]+)`|(?<!\w)'([^']+)'(?!\w)")
_WORD = re.compile(r"[^\W\d_][\w'’]*")
_SIGNS = frozenset("+*/=<>^%$€£@#&|~\\{}[]_")
_COUNTED = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12,
}  # fmt: skip
_NEGATIONS = frozenset(
    ("not", "no", "never", "without", "none", "nor", "cannot", "neither", "nothing", "except")
)
_SELF = frozenset(("i", "i'm", "i've", "i'd", "i'll"))
_ASKING = frozenset(("who", "whom", "whose", "where", "when", "why"))
# Words of one meaning stand for the first of them; those of another line are other questions.
_OPPOSED = """
before earlier prior|after later since|within|until
first|last final|next|previous
largest biggest greatest|smallest least lowest fewest|highest tallest|longest|shortest
most|best|worst|oldest|newest latest
fastest quickest|slowest|nearest closest|farthest furthest|cheapest
increase raise enlarge bigger grow|decrease reduce lower smaller shrink
enable|disable|on|off|open opens|close closes closed|start begin|stop end|add|remove delete|install|uninstall
allow allowed|forbid forbidden|legal|illegal|safe safely|dangerous unsafe|include includes included|exclude excluded
import|export|encode|decode|encrypt|decrypt|read|write|push|pull|send|receive|upload|download|buy|sell|lock|unlock
left|right|up|down|above|below|inside|outside|north|south|east|west|into to|from
cause causes|effect effects|advantage advantages benefits pros|disadvantage disadvantages drawbacks cons
like|dislike|love|hate|win won|lose lost|true|false|yes|positive|negative|minimum min|maximum max|with|hot|cold
morning|noon|afternoon|evening|night|day|week|month|year|today|tomorrow|yesterday
plus|minus|times|divided|square|cube|half|double
male man men|female woman women|boy|girl|father|mother|son|daughter|brother|sister|husband|wife
"""
_CANON = {
    word: group.split()[0]
    for line in _OPPOSED.split("\n") for group in line.split("|") for word in group.split()
}  # fmt: skip
_IGNORED = frozenset(
    ("to", "from", "into", "with", "on", "like", "end")
)  # where they stand says more than that they do


def marks_of(question: str) -> bytes:
    """The marks of a question, and its words without and with their order, as 32 bytes for `same_marks`."""
    text = question.strip().replace("’", "'")
    task, line, rest = text.partition("\n")
    if not line:
        task, _, rest = text.partition(": ")
    found = [f"rest {' '.join(rest.split())}"] if rest.strip() else []
    found += [
        f"quoted {' '.join(next(filter(None, each)).lower().split())}" for each in _QUOTED.findall(task)
    ]
    task = _QUOTED.sub(" ", task)
    found.append(f"numbers {' '.join(_NUMBER.findall(task))}")
    found += [f"sign {each}" for each in task if each in _SIGNS]
    begins = True
    names: list[str] = []
    for each in re.finditer(r"[^\W\d_][\w']*|[.!?]", task):
        word = each[0]
        if word in ".!?":
            begins = True
            continue
        mark = _mark_of(word, begins=begins)
        begins = False
        (names if mark.startswith("name ") else found).append(mark)
    found += [" ".join(names)]
    words = re.findall(r"\w+", text.lower())
    return b"".join(
        hashlib.sha256("\0".join(each).encode()).digest()[:size]
        for each, size in ((sorted(filter(None, found)), _MARKS), (sorted(words), _WORDS), (words, _WORDS))
    )


def same_marks(one: bytes, other: bytes) -> bool:
    """Whether two questions have the same marks, each as often, and are not the same words in another order: from
    English to French is not from French to English."""
    bag = slice(_MARKS, _MARKS + _WORDS)
    return one[:_MARKS] == other[:_MARKS] and (one[bag] != other[bag] or one == other)


def _mark_of(word: str, *, begins: bool) -> str:
    """The mark of a word, which may be the first of its sentence; "" for one that may be another word."""
    low = word.lower()
    if low.endswith("n't") or low in _NEGATIONS:
        return "negation"
    low = low.removesuffix("'s")
    if low in _COUNTED:
        return f"counted {_COUNTED[low]}"
    if low in _ASKING:
        return f"asks {low}"
    if low in _CANON and low not in _IGNORED:
        return f"opposed {_CANON[low]}"
    if word[0].isupper() and not begins and low not in _SELF:
        return f"name {low}"
    return ""
