"""The contract of executors: they hold weights, caches and buffers, and run a program for one step.

Three protocols say what different callers need: Loadable takes weights, Runnable runs steps, Inspectable shows what
happens inside. An Executor is all three; an ExecutorKind says what one will hold, and makes it.

A step is described by StepArrays: preallocated int32 arrays that the worker fills and the executor has bound
once, so that a step itself passes three integers.

    query_start   0      3   4        9          row b of the step owns tokens query_start[b] … query_start[b+1]-1
    token_ids     a b c  d   e f g h i
    positions     0 1 2  41  16 17 18 19 20      position of each token in its sequence
    slots         2      0   5                   row b's line in each group's block table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.executor.plans import Paging, PlanCounts, StepSize
from quire.loader.packed import Packer
from quire.loader.source import Sink
from quire.logprobs import LogprobTable
from quire.program.program import Entry, Program
from quire.program.tensors import Adapted, AdapterShape, Owned
from quire.quant.floats import FloatsOrBits
from quire.records import dataclass
from quire.types import FinishReason, NewSeq, UnsupportedModelError

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
# What a step left, by the names of Program.outputs, until the next run. Looking an output up brings it to host memory.
# An executor on a device returns a mapping of its own, in which the executor's sampler finds the rows on the device.
Outputs = Mapping[str, F32]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes an executor is built for; a step never exceeds them.

    max_tokens: tokens in one step. max_rows: sequences in one step, and slots of the block tables.
    max_logit_rows: rows of one head run. max_len: positions of one sequence. num_blocks: KV blocks, each of
    block_size tokens (a multiple of 16) for layers_per_group layers, or of their states. branches: rows of a step
    behind those of sequences, each with a line behind those of slots; branch_blocks: blocks that only they write.
    max_loras: slots for adapters; adapter_pages: pages that all of them share, see AdapterLayout.
    """

    max_tokens: int
    max_rows: int
    max_logit_rows: int
    max_len: int
    num_blocks: int
    block_size: int = 16
    branches: int = 0
    branch_blocks: int = 0
    max_loras: int = 0
    adapter_pages: int = 0

    @property
    def lines(self) -> int:
        """Lines of a block table, and the most rows of a step."""
        return self.max_rows + self.branches

    @property
    def blocks(self) -> int:
        """All blocks of the cache."""
        return self.num_blocks + self.branch_blocks

    @property
    def max_mirrors(self) -> int:
        """See StepArrays: of each branch at most one for every other token of a block, and one that ends the list."""
        return self.branches * (self.block_size - 1) + 1

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_len // self.block_size)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Soft tokens of a step: tokens start, start + 1, … have these rows [tokens, dim] in place of the embeddings of
    their ids, which are placeholders. No multiplier of embeddings applies to them."""

    start: int
    rows: F32


class StepArrays:
    """The step's int32 arrays, allocated once: what a worker fills and an executor reads.

    `embeddings` are those of the step's soft tokens, none in most steps. `tables`: block tables that others have too.
    `twin`: where the step is that another one runs beside; None if none does. Both have the same lines.
    """

    def __init__(
        self,
        limits: Limits,
        num_groups: int,
        tables: tuple[I32, ...] | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        self.token_ids: I32 = np.zeros(limits.max_tokens, np.int32)
        self.positions: I32 = np.zeros(limits.max_tokens, np.int32)
        self.query_start: I32 = np.zeros(limits.lines + 1, np.int32)
        self.slots: I32 = np.zeros(limits.lines, np.int32)
        self.logit_rows: I32 = np.zeros(limits.max_logit_rows, np.int32)
        # Slot of the adapter of each line, -1 for none.
        self.adapters: I32 = np.full(limits.lines, -1, np.int32)
        self.embeddings: list[Embeddings] = []
        # [begin, end, line, stop]: tokens begin … end - 1, of one row and one block, are also written to the blocks of
        # `line`, a branch whose row goes up to position stop - 1. The first that ends at 0 ends the list.
        self.mirrors: I32 = np.zeros((limits.max_mirrors, 4), np.int32)
        # [group][slot, k]: block id of tokens k·block_size …; only entries a step can read need be valid. In a group of
        # states that block has those after the last token computed of its own.
        self.block_tables: tuple[I32, ...] = tables or tuple(
            np.zeros((limits.lines, limits.blocks_per_row), np.int32) for _ in range(num_groups)
        )
        self.twin = StepArrays(limits, num_groups, self.block_tables) if overlaps else None
        if self.twin is not None:
            self.twin.adapters = self.adapters

    def move_to(self, memory: U8, *, keep: bool = True) -> None:
        """Lie in `memory`, of at least step_array_bytes, from now on; with what is there already unless `keep`."""
        at = 0

        def moved(array: I32) -> I32:
            nonlocal at
            place = memory[at : at + array.nbytes].view(np.int32).reshape(array.shape)
            if keep:
                place[:] = array
            at += array.nbytes
            return place

        for each in (self, self.twin):
            for name in _OWN_ARRAYS if each is not None else ():
                setattr(each, name, moved(getattr(each, name)))
        self.adapters = moved(self.adapters)
        self.block_tables = tuple(map(moved, self.block_tables))
        if self.twin is not None:
            self.twin.adapters, self.twin.block_tables = self.adapters, self.block_tables


_OWN_ARRAYS = "token_ids", "positions", "query_start", "slots", "logit_rows", "mirrors"


def step_array_bytes(limits: Limits, num_groups: int, *, overlaps: bool = False) -> int:
    """Bytes of StepArrays of these limits."""
    own = 2 * limits.max_tokens + 2 * limits.lines + 1 + limits.max_logit_rows + 4 * limits.max_mirrors
    words = own * (1 + overlaps) + limits.lines
    return 4 * (words + num_groups * limits.lines * limits.blocks_per_row)


def check_program(program: Program) -> None:
    """Raise UnsupportedModelError for a program that no executor can run, before its weights are loaded."""
    if program.state_layers:
        layers = ", ".join(str(layer.layer) for layer in program.state_layers)
        raise UnsupportedModelError(
            f"layers {layers} keep a state for each sequence, and no executor has ops for states"
        )


def check_embeddings(program: Program, embeddings: Sequence[Embeddings], num_tokens: int) -> Entry:
    """Where they enter the program. Raises ValueError for rows of another shape, beyond the step's tokens, or of a
    program that takes none."""
    if program.entry is None:
        raise ValueError("embeddings: the program takes none")
    dim = program.buffer(program.entry.buffer).cols
    for given in embeddings:
        if given.rows.dtype != np.float32 or given.rows.ndim != 2 or given.rows.shape[1] != dim:
            raise ValueError(
                f"embeddings: {given.rows.dtype} {list(given.rows.shape)} is not float32 [tokens, {dim}]"
            )
        if given.start < 0 or given.start + len(given.rows) > num_tokens:
            last = given.start + len(given.rows) - 1
            raise ValueError(f"embeddings: tokens {given.start} to {last} are not in the step's {num_tokens}")
    return program.entry


def check_blocks(limits: Limits, block_bytes: int, blocks: Sequence[int], content: U8) -> None:
    """Raise ValueError unless these are arguments for read_blocks or write_blocks."""
    if blocks and not 0 <= min(blocks) <= max(blocks) < limits.num_blocks:
        raise ValueError(f"blocks: {list(blocks)} are not all in [0, {limits.num_blocks - 1}]")
    shape = len(blocks), block_bytes
    if content.shape != shape or content.dtype != np.uint8:
        raise ValueError(f"content: {content.dtype} {list(content.shape)} is not uint8 {list(shape)}")


def check_adapter(
    linears: Mapping[str, Adapted],
    name: str,
    part: int,
    a: FloatsOrBits,
    b: FloatsOrBits,
    gain: F32 | None = None,
) -> Adapted:
    """The linear of that name. Raises ValueError unless these are arguments for put_adapter."""
    found = linears.get(name)
    if found is None or not 0 <= part < len(found.parts):
        raise ValueError(f"{name}: part {part} of no linear that adapters may change")
    rank, rows = len(a), found.parts[part].rows
    if not 1 <= rank <= found.rank or a.shape != (rank, found.cols) or b.shape != (rows, rank):
        raise ValueError(
            f"{name}: {list(a.shape)} and {list(b.shape)} are not [rank, {found.cols}] and [{rows}, rank] with "
            f"a rank of 1 to {found.rank}"
        )
    if gain is not None and (found.shared or gain.shape != (rows,)):
        raise ValueError(f"{name}: takes no gain of {list(gain.shape)}")
    return found


def check_own_rows(program: Program, name: str, first: int, rows: F32) -> Owned:
    """The parameter of that name. Raises ValueError unless these are arguments for put_own_rows."""
    found = next((each for each in program.owned if each.name == name), None)
    if found is None:
        raise ValueError(f"{name}: no parameter that adapters may replace")
    param = found.param
    if rows.ndim != 2 or rows.shape[1] != param.cols or first < 0 or first + len(rows) > param.rows:
        raise ValueError(
            f"{name}: {list(rows.shape)} from row {first} on is not in {[param.rows, param.cols]}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Bitmask:
    """The tokens that some rows may sample.

    words: int32 [lines, ceil(vocab / 32)]; token i is allowed where bit i % 32 of word i // 32 is set.
    lines: int32 [rows], each row's line of words; -1 for a row that may sample every token.
    """

    words: I32
    lines: I32


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The result of one call of a sampler, row for row.

    token_ids: int32 [rows], -1 where the row failed. failed: row -> NO_TOKEN where the model gives every token that the
    request allows no probability, else ERROR. logprobs: per row the chosen token and then the most likely ones, None
    where the slot did not ask or the row failed.
    """

    token_ids: I32
    failed: dict[int, FinishReason]
    logprobs: list[LogprobTable | None]


@dataclass(frozen=True, slots=True)
class Guesses:
    """The tokens that rows would sample, and those that come next: what they would sample in place of these.

    token_ids: int32 [rows, count], -1 where no more can be sampled, in all of a row that failed. sure: float32 [rows,
    count], in [0, 1], and 0 where there is no token. At temperature 0 the probability of the token; else its share of
    what the named tokens have as speeds in the draw, at temperature 1.
    """

    token_ids: I32
    sure: F32


@dataclass(frozen=True, slots=True)
class Judging:
    """How drafts are judged other than by the sample.

    acceptance: "rejection" or "typical", the latter with its epsilon. proposals: float32 [lines, vocab], what drafts
    were drawn from. lines: int32 [rows], the line of each row's draft; -1 for one that was certain. None: all were.
    """

    acceptance: str
    epsilon: float = 0.0
    proposals: F32 | None = None
    lines: I32 | None = None


class Sampler(Protocol):
    """Turns the outputs of the executor that made it into tokens, for sequences in slots. One call at a time."""

    def add(self, slot: int, new: NewSeq) -> None:
        """Assign a slot to a sequence, new or resumed: penalties see all of new.token_ids.

        Raises ValueError if the slot is taken or a token id is not in the vocabulary.
        """

    def drop(self, slot: int) -> None:
        """Free a slot. Raises ValueError if it is not in use."""

    def top_n(self, slot: int) -> int:
        """The number of likely tokens that the slot's prompt_logprobs asks for."""

    def sample(
        self,
        outputs: Outputs,
        slots: I32,
        positions: I32,
        bitmask: Bitmask | None = None,
        places: I32 | None = None,
        guides: I32 | None = None,
    ) -> SampledRows:
        """Sample one token for every row of logits, or for those at `places`, and count it as output of its slot.

        slots: [rows], no slot twice. positions: [rows], index in its sequence of the token to sample. guides: [rows],
        the row of logits that a row is guided away from, -1 for none. Raises ValueError, without a change, if these
        disagree.
        """

    def verify(
        self,
        outputs: Outputs,
        slots: I32,
        positions: I32,
        drafts: I32,
        bitmask: Bitmask | None = None,
        *,
        judging: Judging | None = None,
        guides: I32 | None = None,
    ) -> SampledRows:
        """Sample one token for every row and count none; `commit` counts those that are accepted.

        As `sample`, but a slot may have several rows, one after the other, for positions that rise by one.
        drafts: [rows], the token assumed at a row's position by the slot's later rows; -1 in the last of them. A row
        gives the token that `sample` would give after the drafts before it. Raises ValueError, as `sample`.

        judging: a row gives its draft if that is accepted, else another token.
        """

    def guess(
        self, outputs: Outputs, slots: I32, positions: I32, count: int, distributions: F32 | None = None
    ) -> Guesses:
        """What every row would sample, and the `count` - 1 tokens behind, 1 to 64 in all; counts none.

        As `sample`, but a slot may have several rows. distributions: [rows, vocab], takes what each row was drawn from,
        if its temperature is not 0. Raises ValueError, as `sample`.
        """

    def commit(self, slots: I32, tokens: I32) -> None:
        """Count tokens[i] as output of slots[i]. Raises ValueError, without a change, for a free slot or a token
        outside the vocabulary."""

    def surprise(self, slot: int) -> float:
        """Mirostat's mu of a slot after the tokens that were counted; for NewSeq.surprise. Raises ValueError."""

    def likeliest(self, outputs: Outputs, rows: slice) -> list[int]:
        """The token with the greatest logit in each of some rows, the first of equal ones. Changes nothing."""

    def prompt_logprobs(self, outputs: Outputs, target_token_ids: I32, top_n: int) -> LogprobTable | None:
        """Log-probabilities of target_token_ids[i] under row i of the logits, and of the top_n likeliest.

        None if a row holds NaN or +inf, or nothing but -inf: the sequence has failed. Raises ValueError for a target
        outside the vocabulary or top_n outside [0, 64].
        """


class Loadable(Sink, Protocol):
    """Takes the weights of a program; see loader.Sink."""

    @property
    def packer(self) -> Packer | None:
        """The packed weights, which can be kept on disk; None if this kind of executor has no such form."""


class AdapterSlots(Protocol):
    """Slots for adapters, of what computes `program`.

    No step that runs has a row of a slot that changes; steps of other slots may run meanwhile. After bind; one call at
    a time. All may raise RuntimeError if a rank has ended.
    """

    program: Program

    def open_adapter(self, slot: int, shape: AdapterShape) -> None:
        """Give a slot the pages for an adapter, in place of what it has.

        Raises ValueError for a slot that does not exist and for a shape that the program has no room for, and
        RuntimeError if too few pages are free: then the slot is empty.
        """

    def put_adapter(
        self,
        slot: int,
        name: str,
        part: int,
        a: FloatsOrBits,
        b: FloatsOrBits,
        gain: F32 | None = None,
        scale: float = 1.0,
    ) -> None:
        """Fill a part of Program.adapted[name] in a slot that was opened for it, with a [rank, cols] and
        scale · b [rows, rank], which are rounded to bfloat16, and `gain` [rows]: see Linear.

        Raises ValueError for a slot or part that does not exist, and for matrices of other shapes.
        """

    def put_own_rows(self, slot: int, name: str, first: int, rows: F32) -> None:
        """Fill rows from `first` on of Program.owned[name] in a slot that was opened for it, rounded to the parameter's
        format. All rows are filled before a step has a row of that slot.

        Raises ValueError for a slot that does not exist, and for rows that do not fit.
        """

    def clear_adapter(self, slot: int) -> None:
        """Take all parts out of a slot, and give its pages back."""

    def settle_adapters(self) -> None:
        """Return when steps find all that was put. Raises what was wrong with it, if that is not known yet."""


class ExpertLoads(Protocol):
    """How busy the experts of a model are, over all its ranks.

    The experts of a layer are at places 0, 1, …; with `ranks` above 1, ranks hold even runs of them (even_share).
    """

    @property
    def ranks(self) -> int:
        """Ranks that hold whole experts; 1 if each has a part of all, or there is one rank."""

    @property
    def move(self) -> bool:
        """Whether experts can change places now: they are not too large for a pause, and the last exchange is over."""

    def take_pairs(self) -> Mapping[int, I64]:
        """By layer: pairs of (token, expert) that each place has had since the last call. Between steps."""

    @property
    def placed(self) -> Mapping[int, Sequence[int]]:
        """By layer: the expert at each place. With more places than experts some are at several."""

    def swap(self, layer: int, one: int, other: int) -> None:
        """Let the experts at two places change. Between steps; changes no bit of a result."""

    def copy(self, layer: int, one: int, other: int) -> None:
        """Have the expert at a place at another one, too, in place of the one there. As swap."""


class Runnable(AdapterSlots, Protocol):
    """Runs steps of a program, once all weights are there."""

    paging: Paging | None  # of weights of which a part is in memory; None if all are

    def bind(self, limits: Limits, arrays: StepArrays) -> None:
        """Allocate cache and buffers, and remember the arrays. Called once.

        Raises MemoryBudgetError if they cannot be allocated.
        """

    def sampler(self) -> Sampler:
        """A sampler for outputs of this executor, with a slot for each row of the limits. Called after bind."""

    def prepare(self, sizes: Sequence[StepSize]) -> None:
        """Plan steps of these sizes ahead (see plans.StepPlans). Steps of other sizes run all the same."""

    @property
    def plans(self) -> PlanCounts:
        """The prepared sizes, and how many steps had one of them."""

    @property
    def overlaps(self) -> bool:
        """Whether halves of two steps may run side by side; then this is an Overlapping, and its arrays have a twin."""

    @property
    def experts(self) -> ExpertLoads:
        """Those of the model; without layers if it has none."""

    def write(self, buffer: str, rows: F32) -> None:
        """Fill the first rows of the buffer of an input, before a step; see Program.inputs."""

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int, first_op: int = 0) -> Outputs:
        """One whole step: body over the tokens, head over arrays.logit_rows. Other Python threads run meanwhile.

        `first_op` is that of the program's input which was filled. Returns the program's outputs, valid until the next
        run or run_head: those of logit rows [num_logit_rows, cols], others [num_tokens, cols]. Raises ValueError for a
        step beyond the limits.
        """

    def run_head(self, num_logit_rows: int) -> Outputs:
        """The head again for other arrays.logit_rows of the same step (prompt logprobs in slices)."""

    @property
    def adapter_slots(self) -> Sequence[AdapterSlots]:
        """Where adapters are put: this executor, and the ranks that it leads."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block; after bind."""

    def read_blocks(self, blocks: Sequence[int], into: U8) -> None:
        """Copy KV blocks out: into[i] is the content of blocks[i], of block_bytes.

        Only an executor of the same kind with the same program and block size can use them. Raises ValueError for a
        block that does not exist or an array of another shape.
        """

    def write_blocks(self, blocks: Sequence[int], content: U8) -> None:
        """Copy KV blocks in: the opposite of read_blocks."""

    def copy_blocks(self, blocks: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the content of each block to another, those of branches included. No block is named twice among targets,
        or in both. Raises ValueError for a block that does not exist."""

    def use_threads(self, count: int) -> None:
        """Run steps from now on with so many of its threads, if it has its own. Changes no bit of a result."""

    def warm_blocks(self, count: int) -> int | None:
        """Bring no pages of blocks from this one on into memory before they are written. Returns the first block of
        whose pages none is there, None if all are.
        """

    def give_pages(self) -> None:
        """Give the system back the pages of the cache, whose contents are lost, and those of files that are read again.
        See util/given_pages."""

    def close(self) -> None:
        """Free everything."""


class HalfStep(NamedTuple):
    """A step of which a half is to run: its size, and whether its arrays are the twin."""

    size: StepSize
    twin: bool


class Overlapping(Runnable, Protocol):
    """Runs steps by halves of the model's layers, two steps at a time."""

    def run_halves(self, first: HalfStep | None, second: HalfStep | None) -> Outputs:
        """Begin the first half of a step, and run the second half of the one that was begun by the call before.

        Returns the outputs of the latter, as `run` does; the first half may still run. Its arrays stay as they are
        until its second half has run. Other calls wait for it. Raises as `run`.
        """


class Inspectable(Protocol):
    """Shows what an executor holds, and what its ops compute and cost."""

    @property
    def isa(self) -> str:
        """The instruction set of its kernels; "torch" if torch chooses them."""

    def memory(self) -> Mapping[str, int]:
        """Bytes held by part: weights, kv, activations, tables."""

    def areas(self) -> Sequence[tuple[str, int, int]]:
        """Parts in this process that the kernel can count pages of: name, address, bytes. May be empty."""

    def read(self, buffer: str, rows: int) -> F32:
        """A copy of the first rows of a buffer after the last run, as float32; see `stop_after`."""

    def stop_after(self, op_index: int | None) -> None:
        """Make later runs end after that op of Program.ops (None: run all), so that buffers can be compared."""

    def run_range(self, num_tokens: int, num_rows: int, num_logit_rows: int, begin: int, end: int) -> None:
        """Run only ops begin … end - 1 of Program.ops, on whatever their buffers hold."""

    def profile(self, on: bool) -> None:
        """Measure every op of later steps, or stop measuring. Called after bind. Costs nothing while it is off."""

    def take_profile(self) -> tuple[list[float], list[float]]:
        """For each of Program.ops: seconds since the last call, and of these the mean that threads waited for others.

        Empty if nothing is measured. What runs after the last op of a step (threads that finish later) is not in it.
        """


class Executor(Loadable, Runnable, Inspectable, Protocol):
    """Runs a Program. Its life: every part is put, then bind(limits, arrays), then steps, then close."""


class ExecutorKind(Protocol):
    """What is known of an executor before it exists."""

    @property
    def layout(self) -> str:
        """What packed weights depend on besides the program; "" if there are none (see Loadable.packer)."""

    def held(self, program: Program) -> Sequence[Program]:
        """The parts of a model that an executor of this part and those that it leads hold."""

    def planned_bytes(self, program: Program, limits: Limits) -> dict[str, int]:
        """What an executor of these limits will hold, by the parts of Inspectable.memory."""

    def block_bytes(self, program: Program, block_size: int) -> int:
        """Bytes of a KV block."""

    def sampler_bytes(self, program: Program, limits: Limits) -> int:
        """The most bytes that its sampler will ever hold."""

    def make(self, program: Program, beside: Executor | None = None) -> Executor:
        """An executor without weights. It and the one `beside` it, of the same kind, never run at the same time: they
        share threads, and that one, which outlives it, holds the parameters that the program borrows."""
