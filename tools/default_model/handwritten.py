"""Prompts written by hand: what the model answers, what checks say of it, and what a reader says of the rest.

    python -m tools.default_model.handwritten DIR                     # the table of the checks
    python -m tools.default_model.handwritten DIR --sheet FILE        # and a sheet to mark: `?` becomes yes or no
    python -m tools.default_model.handwritten DIR --sheet FILE --marked --out handwritten.md     # the card's table

handwritten.txt has the prompts. A check is one word and what it compares with:

    has a|b      one of the options occurs, as whole words in any case; a final * stands for the rest of a word
    not a|b      none of them does
    text X       X occurs, in this case
    re X         the regular expression is found, in any case
    number N     the last number, in digits or as a word, is N
    words N      at most N words
    items N      N items, by lines or commas
    order a, b   these occur in this order
    upper, lower all letters are capitals, or none is
    json X       the answer is JSON of this value; texts in any case, numbers also as texts
    keys a, b    the answer is a JSON object of exactly these keys
    call X       the answer is this tool call and nothing else; without this check no answer may be a call
    declines     the answer says that it cannot or does not know
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from . import tokenizer as tokenizers
from .backends import BACKENDS, Generate
from .corpus.conversation import Conversation, Role, ToolCall, Turn
from .evaluate import stop_ids
from .grading import parse_calls, parse_json
from .rendering import prompt

PROMPTS = Path(__file__).with_name("handwritten.txt")
MAX_TOKENS, MAX_RAW_TOKENS = 240, 64
ROLES: dict[str, Role] = {"system": "system", "user": "user", "bot": "assistant", "tool": "tool"}
Verdict = Literal["pass", "fail", "?", "yes", "no"]  # by checks: the first three; by a reader: the last two

_NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
_DECLINES = (
    r"\b(can't|cannot|can not|could not|couldn't|don't|do not|does not|am not|i'm not|have not|haven't|not able|"
    r"unable|sorry|beyond|"
    r"too (big|large|hard|much|small|long)|only|no (way|access|idea|clock|function|tool)|outside|without|won't|"
    r"never learned|nothing)\b"
)
_LOOP = re.compile(r"(.{2,60}?)\1{4,}|(\S)\2{9,}", re.DOTALL)
_HEAD = re.compile(r"\[(pass|fail|\?|yes|no)\] ")


@dataclass(frozen=True, slots=True)
class Item:
    """A conversation that waits for an answer, or a raw text.

    `note`: what a reader looks for. `checked`: the checks alone decide.
    """

    kind: str
    text: str  # as written in the file
    turns: tuple[Turn, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    raw: str = ""
    checks: tuple[tuple[str, str], ...] = ()
    note: str = ""
    checked: bool = False

    def prompt(self) -> str:
        """What the model reads."""
        if self.raw:
            return self.raw
        made = Conversation(self.kind, list(self.turns), list(self.tools))
        return prompt(made, len(self.turns))


@dataclass(frozen=True, slots=True)
class Answer:
    """An item's answer. `why`: the check or the form that failed."""

    item: Item
    said: str
    sound: bool
    verdict: Verdict
    why: str = ""


def load(path: Path = PROMPTS) -> list[Item]:
    """The prompts. Raises ValueError for a line of no known form."""
    tools: dict[str, dict[str, Any]] = {}
    items: list[Item] = []
    kind = ""
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith("//")]
        while lines and lines[0][0] in "#@":
            line = lines.pop(0)
            if line.startswith("#"):
                kind = line[1:].strip()
            else:
                name, _, rest = line[1:].partition(" ")
                tools[name] = {"type": "function", "function": {"name": name} | json.loads(rest)}
        if lines:
            items.append(_item(kind, lines, tools))
    return items


def _item(kind: str, lines: Sequence[str], tools: dict[str, dict[str, Any]]) -> Item:
    turns: list[Turn] = []
    checks: list[tuple[str, str]] = []
    text = "\n".join(line for line in lines if line[0] not in "=?")
    made = Item(kind.removesuffix(" ?"), text, checked=not kind.endswith(" ?"))
    for line in lines:
        head, _, rest = line.partition(" ")
        text = rest.replace("\\n", "\n")
        if head == "=":
            name, _, data = rest.partition(" ")
            if name not in _CHECKS:
                raise ValueError(f"{path_of(kind, line)}: no check {name!r}")
            checks.append((name, data))
        elif head == "?":
            made = replace(made, note=rest, checked=False)
        elif head == "raw:":
            made = replace(made, raw=text)
        elif head == "tools:":
            made = replace(made, tools=tuple(tools[name] for name in rest.split(", ")))
        elif head == "call:":
            turns.append(Turn("assistant", "", calls=(ToolCall(**json.loads(rest)),)))
        elif head.removesuffix(":") in ROLES:
            turns.append(Turn(ROLES[head.removesuffix(":")], text))
        else:
            raise ValueError(f"{path_of(kind, line)}: unknown line")
    if not (checks or made.note) or bool(turns) == bool(made.raw):
        raise ValueError(
            f"{path_of(kind, lines[0])}: an item needs a conversation or a text, and a check or a note"
        )
    return replace(made, turns=tuple(turns), checks=tuple(checks))


def path_of(kind: str, line: str) -> str:
    return f"{PROMPTS.name}, {kind}, {line!r}"


# ---- checks


def _options(data: str, answer: str) -> bool:
    return any(_occurs(option, answer) for option in data.split("|"))


def _occurs(option: str, answer: str) -> bool:
    stem = option.removesuffix("*")
    before = r"(?<!\w)" if stem[:1].isalnum() else ""
    after = r"(?!\w)" if stem[-1:].isalnum() and stem == option else ""
    return re.search(before + re.escape(stem) + after, answer, re.IGNORECASE) is not None


def _number(data: str, answer: str) -> bool:
    found = re.findall(rf"-?\d+|\b(?:{'|'.join(_NUMBERS)})\b", answer.lower())
    return bool(found) and (_NUMBERS.index(found[-1]) if found[-1] in _NUMBERS else int(found[-1])) == int(
        data
    )


def _items(data: str, answer: str) -> bool:
    lines = [line for line in answer.split("\n") if line.strip() and not line.rstrip().endswith(":")]
    parts = lines if len(lines) > 1 else re.split(r", (?:and )?| and ", answer)
    return len(parts) == int(data)


def _order(data: str, answer: str) -> bool:
    words = r"\W(?:.*\W)?".join(re.escape(part) for part in data.split(", "))
    return re.search(rf"(?<!\w){words}(?!\w)", answer, re.IGNORECASE | re.DOTALL) is not None


def _same(value: Any, wanted: Any) -> bool:
    """Equal but for the case of texts, and numbers written as texts."""
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(_same(value[key], wanted[key]) for key in wanted)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).casefold().rstrip(".") == str(wanted).casefold()


def _keys(data: str, answer: str) -> bool:
    value = parse_json(answer)
    return isinstance(value, dict) and set(value) == set(data.split(", "))


def _call(data: str, answer: str) -> bool:
    calls = parse_calls(answer)
    alone = answer.startswith("<tool_call>") and answer.endswith("</tool_call>")
    return alone and len(calls) == 1 and _same(calls[0], json.loads(data))


_CHECKS: dict[str, Callable[[str, str], bool]] = {
    "has": _options,
    "not": lambda data, answer: not _options(data, answer),
    "text": lambda data, answer: data in answer,
    "re": lambda data, answer: re.search(data, answer, re.IGNORECASE | re.DOTALL) is not None,
    "number": _number,
    "words": lambda data, answer: len(answer.split()) <= int(data),
    "items": _items,
    "order": _order,
    "upper": lambda _, answer: answer == answer.upper() != answer.lower(),
    "lower": lambda _, answer: answer == answer.lower() != answer.upper(),
    "json": lambda data, answer: _same(parse_json(answer), json.loads(data)),
    "keys": _keys,
    "call": _call,
    "declines": lambda _, answer: re.search(_DECLINES, answer.lower().replace("’", "'")) is not None,
}


def unsound(answer: str, *, ended: bool = True, call: bool = False) -> str:
    """What is wrong with the form of an answer, whatever was asked; "" when nothing is."""
    if not answer.strip():
        return "empty"
    if _LOOP.search(answer):
        return "repeats itself"
    if not ended:
        return "does not end"
    if "<tool" in answer and not call:
        return "calls a function"
    return "has marks" if re.search(r"<\||\|>|\ufffd", answer) else ""


def judge(item: Item, said: str, ended: bool = True) -> Answer:
    """The verdict of the checks; `?` where they hold, or there is none, and a reader decides."""
    text = said.strip()
    form = unsound(text, ended=ended or bool(item.raw), call=any(name == "call" for name, _ in item.checks))
    failed = [f"{name} {data}".strip() for name, data in item.checks if not _CHECKS[name](data, text)]
    why = form or (failed[0] if failed else "")
    return Answer(item, said, not form, "fail" if why else "pass" if item.checked else "?", why)


def run(items: Sequence[Item], generate: Generate, tokenizer: Tokenizer) -> list[Answer]:
    """Answer greedily and judge."""
    answers: dict[int, Answer] = {}
    for raw, limit in ((False, MAX_TOKENS), (True, MAX_RAW_TOKENS)):
        chosen = [i for i, item in enumerate(items) if bool(item.raw) == raw]
        made = generate([tokenizer.encode(items[i].prompt()).ids for i in chosen], limit)
        for i, ids in zip(chosen, made, strict=True):
            said = tokenizer.decode(ids, skip_special_tokens=False)
            answers[i] = judge(items[i], said, len(ids) < limit)
    return [answers[i] for i in range(len(items))]


# ---- the sheet that a reader marks


def sheet_text(answers: Iterable[Answer]) -> str:
    """One block an answer: `[verdict] kind`, the conversation, what was said, and what a sensible answer is."""
    blocks = []
    for a in answers:
        note = f"note: {a.item.note}\n" if a.item.note else ""
        why = f": {a.why}" if a.why else ""
        blocks.append(
            f"[{a.verdict}] {a.item.kind}{why}\n{a.item.text}\nsaid: {json.dumps(a.said, ensure_ascii=False)}\n{note}"
        )
    return "\n".join(blocks)


def marks(sheet: str) -> dict[tuple[str, str], Verdict]:
    """Verdicts of a sheet by conversation and answer. Raises ValueError for a block of another form."""
    found: dict[tuple[str, str], Verdict] = {}
    for block in filter(None, (part.strip("\n") for part in sheet.split("\n\n"))):
        head, _, rest = block.partition("\n")
        match = _HEAD.match(head)
        if not match or "\nsaid: " not in rest:
            raise ValueError(
                f"sheet: {head!r} is not `[pass|fail|?|yes|no] kind` and a conversation with what was said"
            )
        text, _, said = rest.partition("\nsaid: ")
        found[text, json.loads(said.split("\n")[0])] = match[1]  # type: ignore[assignment]
    return found


def marked(answers: Iterable[Answer], sheet: str) -> list[Answer]:
    """The answers with the marks that a reader gave to the same conversation and answer."""
    given = {key: verdict for key, verdict in marks(sheet).items() if verdict in ("yes", "no")}
    return [replace(a, verdict=given.get((a.item.text, a.said), a.verdict)) for a in answers]


def check_whole(answers: Sequence[Answer], sheet: str) -> None:
    """Raises ValueError unless the sheet has these answers and no others, and none is left open."""
    new = {(a.item.text, a.said) for a in answers} ^ set(marks(sheet))
    if new:
        raise ValueError(
            f"sheet: {len(new)} answers are of other prompts or another model, such as {min(new)}"
        )
    left = sum(a.verdict == "?" for a in answers)
    if left:
        raise ValueError(f"sheet: {left} answers are not marked")


# ---- tables


@dataclass(slots=True)
class Row:
    """Counts of one kind."""

    prompts: int = 0
    sound: int = 0
    verdicts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("pass", "fail", "?", "yes", "no"), 0)
    )

    @property
    def sensible(self) -> int:
        return self.verdicts["pass"] + self.verdicts["yes"]

    @property
    def possible(self) -> int:
        """Sensible if a reader finds all open ones so."""
        return self.sensible + self.verdicts["?"]


def count(answers: Iterable[Answer]) -> dict[str, Row]:
    """Rows by kind, the last one of all."""
    rows: dict[str, Row] = {}
    for a in answers:
        for name in (a.item.kind, "all"):
            row = rows.setdefault(name, Row())
            row.prompts += 1
            row.sound += a.sound
            row.verdicts[a.verdict] += 1
    return {name: row for name, row in rows.items() if name != "all"} | {"all": rows["all"]}


def interval(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate."""
    z, rate = 1.96, hits / of
    middle, half = rate + z * z / (2 * of), z * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    return max(0.0, (middle - half) / (1 + z * z / of)), min(1.0, (middle + half) / (1 + z * z / of))


def table(rows: dict[str, Row], graded: bool) -> str:
    """Markdown: with a reader's marks, or of the checks alone."""
    head = "| kind | prompts | sensible | 95 % | by checks | by a reader |" if graded else (
        "| kind | prompts | sound in form | checks fail | checks suffice | left to a reader | at most sensible | 95 % |"
    )  # fmt: skip
    lines = [head, "|---|" + "--:|" * (head.count("|") - 2)]
    for name, row in rows.items():
        share = row.sensible if graded else row.possible
        low, high = (f"{100 * bound:.0f}" for bound in interval(share, row.prompts))
        rate, v = f"{100 * share / row.prompts:.0f} %", row.verdicts
        cells: tuple[object, ...] = (rate, f"{low} to {high}", v["pass"] + v["fail"], v["yes"] + v["no"])
        if not graded:
            cells = (row.sound, v["fail"] + v["no"], v["pass"], v["?"] + v["yes"], rate, f"{low} to {high}")
        lines.append(f"| {name} | {row.prompts} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def as_json(answers: Sequence[Answer], backend: str) -> str:
    """Everything in one object, for scripts."""
    rows = {
        name: {"prompts": row.prompts, "sound": row.sound, "verdicts": row.verdicts, "sensible": row.sensible,
               "interval": interval(row.sensible, row.prompts)}
        for name, row in count(answers).items()
    }  # fmt: skip
    said = [
        {"kind": a.item.kind, "prompt": a.item.text, "said": a.said, "verdict": a.verdict, "why": a.why}
        for a in answers
    ]
    return json.dumps({"backend": backend, "kinds": rows, "answers": said}, ensure_ascii=False, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="quire")
    parser.add_argument("--sheet", type=Path, help="written, or renewed: marks of unchanged answers stay")
    parser.add_argument("--marked", action="store_true", help="count the marks; the sheet must be whole")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.marked and not (args.sheet and args.sheet.exists()):
        parser.error("--marked needs the --sheet that was marked")
    tokenizer = tokenizers.load(args.folder)
    answers = run(load(), BACKENDS[args.backend](args.folder, stop_ids(tokenizer)), tokenizer)
    if args.sheet and args.sheet.exists():
        answers = marked(answers, args.sheet.read_text())
    if args.marked:
        try:
            check_whole(answers, args.sheet.read_text())
        except ValueError as error:
            sys.exit(str(error))
    elif args.sheet:
        args.sheet.write_text(sheet_text(answers))
    made = "graded by checks and by a reader" if args.marked else "graded by checks alone"
    text = f"### Prompts written by hand\n\nGreedy, float32, backend {args.backend}; {made}.\n\n"
    text += table(count(answers), args.marked)
    print(as_json(answers, args.backend) if args.json else text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
