"""A small model drafts for a large one: Leviathan et al., Fast Inference from Transformers via Speculative Decoding
(arXiv 2211.17192); with `self`, the first layers of the large one (Zhang et al., Draft & Verify, arXiv 2309.08168).

Drafts are drawn with the noise of their sequence and position, as the tokens that they are compared with (Daliri et
al., Coupling without Communication and Drafter-Invariant Speculative Decoding, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from quire.draft_paths import agreement
from quire.records import dataclass
from quire.speculate.draft_branches import DraftBranches
from quire.speculate.draft_cache import DraftCache
from quire.speculate.draft_passes import DraftPasses, Draw, PassRow
from quire.speculate.proposer import DraftTree, Offer, Room
from quire.speculate.step_costs import PassCosts
from quire.speculate.tree_growth import GrowingTree
from quire.types import NewSeq

NEAR = 32  # tokens behind that are the price of one step; more are spread over the steps to come
FIRST_ANSWER = 128.0  # tokens of an answer, until some have ended
_LEARN = 0.1  # of an answer in the mean length of answers


@dataclass(slots=True)
class _Text:
    """A sequence. `done` tokens are in the draft's cache; `hashes`: see DraftCache. `tree`: of its latest drafts."""

    line: int
    tokens: list[int]
    prompt_len: int
    most: int  # tokens that it may still get
    done: int
    hashes: list[int]
    tree: GrowingTree | None = None


class DraftModelProposer:
    """Drafts with passes of a model over the lines of running sequences, whose numbers `line` knows; for texts of up to
    `longest` tokens.

    Without `cache` the model writes to the cache of the target, which has every token but the latest. `branches` are of
    the cache that it writes to.
    """

    GRADES = 1
    MOST_SECONDS = float("inf")  # passes are weighed by what they cost

    def __init__(
        self,
        passes: DraftPasses,
        branches: DraftBranches,
        line: Callable[[int], int],
        cache: DraftCache | None,
        longest: int,
    ) -> None:
        self._passes, self.line, self._cache, self._longest = passes, line, cache, longest
        self._branches = branches
        self.passes: PassCosts | None = passes.costs
        self._texts: dict[int, _Text] = {}
        self._answer = FIRST_ANSWER  # mean length

    @property
    def draw(self) -> Draw:
        """What draws the drafts; see DraftPasses."""
        return self._passes.draw

    @draw.setter
    def draw(self, draw: Draw) -> None:
        self._passes.draw = draw

    def start(self, new: NewSeq) -> None:
        if new.soft_tokens:
            return  # the draft knows ids only
        most = 2**31 if new.params.max_tokens is None else new.params.max_tokens
        self._texts[new.seq_id] = _Text(
            self.line(new.seq_id), list(new.token_ids), new.prompt_len, most, 0, []
        )

    def stop(self, seq_id: int) -> None:
        text = self._texts.pop(seq_id, None)
        if text is not None:
            self._answer += _LEARN * (len(text.tokens) - text.prompt_len - self._answer)

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        text = self._texts.get(seq_id)
        if text is None:
            return
        if text.tree is not None:
            if text.tree.own is not None:
                text.done += agreement(text.tree.own.path(), tokens)
            self._passes.growth.learn(text.tree.root, tokens)
            text.tree = None
        text.tokens += tokens
        if self._cache:
            self._cache.note(text.line, text.tokens, text.done, text.hashes)
        else:
            text.done = len(text.tokens) - 1

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        offers, growth = {}, self._passes.growth
        for seq_id in seq_ids:
            text = self._texts.get(seq_id)
            if text is not None and len(text.tokens) + most <= self._longest:
                offer = growth.offer(most, self._behind(text))
                offers[seq_id] = offer._replace(backlog=len(text.tokens) - text.done)
        return offers

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, DraftTree | list[int]]:
        growth, branches = self._passes.growth, self._branches
        trees = self._catch_up(rooms)
        branches.clear()
        left = trees
        while left := {
            s: (text, tree)
            for s, (text, tree) in left.items()
            if branches.go_on(growth, tree, rooms[s], text.line, len(text.tokens))
        }:
            branches.copy()
            rows = [branches.rows(tree, text.line, len(text.tokens)) for text, tree in left.values()]
            drawn = iter(self._passes.run([row for each in rows for row in each]))
            for _, tree in left.values():
                tree.add([next(drawn) for _ in tree.tips])
        return {s: growth.drafts(tree.root, rooms[s].drafts) for s, (_, tree) in trees.items()}

    def _behind(self, text: _Text) -> float:
        """Tokens to compute before the first draft, as Offer counts them."""
        behind = len(text.tokens) - text.done
        if behind <= NEAR:
            return behind
        made = len(text.tokens) - text.prompt_len
        to_come = min(max(self._answer, made), text.most) - made
        return 1 + behind / max(1.0, to_come)

    def _catch_up(self, rooms: Mapping[int, Room]) -> dict[int, tuple[_Text, GrowingTree]]:
        """One pass up to the latest tokens, as far as it holds them; the sequences that now have their first place, if
        a token may stand there."""
        room, pieces, ready = self._passes.max_tokens, list[PassRow](), dict[int, _Text]()
        for seq_id, asked in rooms.items():
            text = self._texts.get(seq_id)
            if text is None or not room:
                continue
            text.done = min(text.done, len(text.tokens) - 1)
            stop = len(text.tokens)
            if self._cache:
                # By now another sequence may have computed blocks that they share.
                text.done = max(text.done, self._cache.computed(text.line, text.tokens, text.hashes))
                stop = self._cache.reach(text.done, min(stop, text.done + room), stop)
            whole = stop == len(text.tokens)
            if self._cache:
                self._cache.write(text.line, text.done, stop + asked.depth * whole)
            room -= stop - text.done
            if stop == text.done:
                continue
            pieces.append(PassRow(text.line, text.done, text.tokens[text.done : stop], whole))
            text.done, text.tree = stop, None
            if whole:
                ready[seq_id] = text
        drawn = self._passes.run(pieces) if pieces else []
        trees = dict[int, tuple[_Text, GrowingTree]]()
        for (seq_id, text), place in zip(ready.items(), drawn, strict=True):
            if place.token_ids:
                text.tree = GrowingTree(place)
                trees[seq_id] = text, text.tree
        return trees
