"""The options of a scheduler, and the requests it refuses."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import field, replace

from quire.cache_kinds import CacheGroup, FullGroup, StateGroup
from quire.context_window import check_window
from quire.core.capacity import most_tokens, peak_blocks
from quire.core.guidance import check_guidance, negative_of
from quire.core.policy import OVERTAKE_SECONDS, Policies
from quire.core.soft_tokens import check_soft_tokens
from quire.records import dataclass
from quire.types import NO_POOLING, ContextLengthError, Request, RequestError, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine. Raises ValueError naming the field when a value is out of range.

    num_blocks              blocks in the pool, shared by all groups
    block_size              tokens per block
    max_num_seqs            sequences that may run at once
    max_num_batched_tokens  token budget of a step
    max_model_len           tokens of a sequence, prompt and output together
    max_draft_tokens        drafts run in a step, over all sequences; the worker has room for the logits of
                            max_num_seqs + max_draft_tokens positions
    steps_in_flight         1, or 2: a step may be scheduled while the one before it runs
    takes_turns             with two steps in flight: a sequence whose token is being sampled sits the second one out,
                            and each has half of the sequences that decode; see core.step_sharing
    groups                  cache groups; one block table each
    soft_tokens             whether the model takes embeddings in place of ids
    enable_prefix_caching   keep computed blocks findable after their sequence ends
    enable_chunked_prefill  split prompts over steps; off: a prompt runs whole, in one step
    copy_partial            a prefix that ends inside of a block is copied from it: needs full attention in all groups
    cache_by_uses           evict what is used least often first; else what was not used for longest
    cache_ttl               seconds without use after which cached blocks are forgotten
    cache_pin_share         part of the pool of which each tenant may pin blocks
    pooling                 the model gives a row of numbers for a prompt, and no tokens
    policy                  the order of sequences: see core.policy
    class_policies          those of classes of service, by their number; "": the same
    overtake                seconds: a request is overtaken only by those that arrive less than that after it
    floors                  blocks by tenant that no other takes from it; changed while an engine runs
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    max_draft_tokens: int = 0
    steps_in_flight: int = 1
    takes_turns: bool = False
    groups: tuple[CacheGroup, ...] = (FullGroup((0,)),)
    soft_tokens: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    copy_partial: bool = False
    cache_by_uses: bool = False
    cache_ttl: float | None = None
    cache_pin_share: float = 0.5
    pooling: bool = False
    policy: str = "fcfs"
    class_policies: tuple[str, ...] = ()
    overtake: float = OVERTAKE_SECONDS
    floors: Mapping[str, int] = field(default_factory=dict)

    @property
    def window(self) -> int:
        """Tokens of a prompt and one of output; a model with pooling has none."""
        return self.max_model_len + self.pooling

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below the minimum of 1")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens: {self.max_draft_tokens} is negative")
        if self.steps_in_flight not in (1, 2):
            raise ValueError(f"steps_in_flight: {self.steps_in_flight} is not 1 or 2")
        if self.takes_turns and self.steps_in_flight < 2:
            raise ValueError("takes_turns: needs two steps in flight")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len: {self.max_model_len} leaves no room for a prompt and an output")
        if not self.groups or any(group.window < 0 for group in self.groups):
            raise ValueError("groups: at least one is required, with windows >= 0")
        if self.max_draft_tokens and any(isinstance(group, StateGroup) for group in self.groups):
            raise ValueError(
                f"max_draft_tokens: {self.max_draft_tokens} must be 0 for a model with a state per sequence: "
                "a rejected draft cannot be taken out of it"
            )
        if self.copy_partial and not all(isinstance(group, FullGroup) for group in self.groups):
            raise ValueError("copy_partial: needs full attention in all groups")
        self.policies()
        if peak_blocks(self.groups, 1, 1, self.block_size) > self.num_blocks:
            raise ValueError(
                f"num_blocks: {self.num_blocks} cannot hold one token in {len(self.groups)} groups"
            )

    def policies(self) -> Policies:
        """The policies, parsed."""
        return Policies.parse(self.policy, self.class_policies, self.overtake)

    def length_limit(self, request: Request) -> int:
        """The length in tokens at which the request's sequences end, of pairs the leaders.

        Raises RequestError, naming field and limit, when a single sequence, or pair, could not run to that length: what
        is admitted always completes. Without `max_tokens` the limit is the capacity of the pool, less the floors of
        other tenants.
        """
        if self.floors:
            return self._limit_beside_floors(request)
        limit = self._single_limit(request)
        guided = request.params.guidance_scale != 1 or request.negative_prompt is not None
        return self._pair_limit(request, limit) if guided else limit

    def _limit_beside_floors(self, request: Request) -> int:
        blocks = self.num_blocks - sum(self.floors.values()) + self.floors.get(request.tenant, 0)
        kept = f"{self.num_blocks - blocks} of {self.num_blocks} blocks of the KV cache are kept for other tenants"
        try:
            alone = replace(self, num_blocks=blocks, floors={})
        except ValueError:
            raise ContextLengthError("prompt_token_ids", kept) from None
        try:
            return alone.length_limit(request)
        except ContextLengthError as error:
            raise ContextLengthError(error.field, f"{error.message}; {kept}") from None

    def _single_limit(self, request: Request) -> int:
        prompt, given = request.prompt_token_ids, max(map(len, request.given), default=0)
        _check_token_ids(prompt)
        length, max_tokens = len(prompt), request.params.max_tokens
        if request.pooling != self.pooling:
            raise RequestError("model", _OTHER_TASK[self.pooling])
        if self.pooling:
            return self._pooled_length(length)
        check_window(length, max_tokens, self.max_model_len)
        if request.soft_tokens:
            if not self.soft_tokens:
                raise RequestError("soft_tokens", "this model takes no embeddings")
            check_soft_tokens(request.soft_tokens, length)
        if not self.enable_chunked_prefill:
            self._check_whole_prompt(length + given)
        holds = self._holds(None if max_tokens is None else length + max(1, max_tokens))
        if length + 1 > holds:
            raise ContextLengthError(
                "prompt_token_ids",
                f"{length} tokens and one of output exceed the KV cache, which holds {holds} tokens",
            )
        limit = holds if max_tokens is None else length + max_tokens
        if given and length + given >= min(limit, holds):
            raise ContextLengthError(
                "given", f"{length} prompt tokens and {given} of output leave no room for more"
            )
        if limit > holds:
            raise ContextLengthError(
                "max_tokens",
                f"{length} prompt tokens and {max_tokens} of output exceed the KV cache,"
                f" which holds {holds} tokens",
            )
        return limit

    def _holds(self, wanted: int | None) -> int:
        """A length, within the model's, that a sequence alone can reach: the one that is wanted, or else the most."""
        # The last token is sampled but never computed, so a sequence of n tokens needs room for n - 1.
        if wanted is not None and peak_blocks(self.groups, wanted - 1, 1, self.block_size) <= self.num_blocks:
            return wanted
        return 1 + most_tokens(self.groups, self.num_blocks, self.block_size, self.max_model_len - 1)

    def _pooled_length(self, length: int) -> int:
        """The same for a request without output."""
        if (
            length > self.max_model_len
            or peak_blocks(self.groups, length, 1, self.block_size) > self.num_blocks
        ):
            holds = most_tokens(self.groups, self.num_blocks, self.block_size, self.max_model_len)
            which = "KV cache" if holds < self.max_model_len else "model's context (max_model_len)"
            raise ContextLengthError(
                "prompt_token_ids",
                f"{length} tokens are over the {min(holds, self.max_model_len)} tokens of the {which}",
            )
        if not self.enable_chunked_prefill:
            self._check_whole_prompt(length)
        return length + 1

    def _pair_limit(self, request: Request, limit: int) -> int:
        """The length at which the leaders end whose samples alone would end at `limit`.

        Raises RequestError, naming field and limit, if a pair could not run to that length, or not at all.
        """
        check_guidance(request)
        if min(self.max_num_seqs, self.max_num_batched_tokens) < 2:
            raise RequestError(
                "guidance_scale", "needs max_num_seqs and max_num_batched_tokens of at least 2"
            )
        prompt, negative = len(request.prompt_token_ids), len(request.negative_prompt or ())
        try:
            other = self.length_limit(
                negative_of(request, limit if request.params.max_tokens else prompt + 1, 0)
            )
        except RequestError as error:
            raise type(error)("negative_prompt", error.message) from None
        if not self.enable_chunked_prefill and max(prompt, negative) >= self.max_num_batched_tokens:
            raise RequestError(
                "negative_prompt",
                f"a prompt of {max(prompt, negative)} tokens and a token of its pair exceed max_num_batched_tokens"
                f" {self.max_num_batched_tokens}, and chunked prefill is off",
            )
        if request.params.max_tokens is None:
            other = negative + self.max_model_len - max(prompt, negative)
        limit = min(limit, other - negative + prompt)

        def blocks(length: int) -> int:
            sizes = length - 1, length - 1 + negative - prompt
            return sum(peak_blocks(self.groups, size, 1, self.block_size) for size in sizes)

        fits = prompt + bisect_right(range(prompt + 1, limit + 1), self.num_blocks, key=blocks)
        if fits < limit and (request.params.max_tokens is not None or fits == prompt):
            raise ContextLengthError(
                "max_tokens" if fits > prompt else "negative_prompt",
                f"with a negative prompt of {negative} tokens, prompt and output may have {fits} tokens:"
                " the KV cache holds both sequences of a pair",
            )
        return min(limit, fits)

    def _check_whole_prompt(self, length: int) -> None:
        if length > self.max_num_batched_tokens:
            raise RequestError(
                "prompt_token_ids",
                f"{length} tokens exceed max_num_batched_tokens {self.max_num_batched_tokens},"
                " and chunked prefill is off",
            )
        needs = peak_blocks(self.groups, length, length, self.block_size)
        if needs > self.num_blocks:
            raise RequestError(
                "prompt_token_ids",
                f"{length} tokens in one step need {needs} of the KV cache's {self.num_blocks} blocks,"
                " and chunked prefill is off",
            )


_OTHER_TASK = {
    False: NO_POOLING,
    True: "this model gives vectors or scores for texts and generates none",
}


def _check_token_ids(prompt: object) -> None:
    if not isinstance(prompt, list | tuple | array) or not prompt:
        raise RequestError("prompt_token_ids", "must be a non-empty list of token ids")
    try:
        smallest = min(prompt if isinstance(prompt, TokenIds) else TokenIds(prompt))
    except (TypeError, OverflowError) as error:
        raise RequestError("prompt_token_ids", f"must be integers below {2**31}: {error}") from None
    if smallest < 0:
        raise RequestError("prompt_token_ids", f"{smallest} is not a token id")
