"""
Native kernels, the executor and the scan of requests. Addresses are integers; the caller keeps what they point at alive.
"""

from collections.abc import Mapping, Sequence
import enum
from typing import Annotated, Final, overload

import numpy
from numpy.typing import NDArray

def supported_isas() -> list[str]:
    """Instruction sets this CPU can run, best first."""

ALIGNMENT: int = 64

CHUNK_BYTES: int = 4194304

GROUP_BITS: int = 8

GROUP_SIZES: tuple[int, ...]

KV_LEVELS: int = 8

LONGEST_MATCH: int = 32

MAXIMA_COLS: int = 64

MAX_EXPERTS: int = 1024

MAX_HEAD_DIM: int = 512

MAX_TOP_K: int = 64

PACK_LAYOUT: int = 1

PANEL_ROWS: int = 64

RANK_LANES: int = 16

SUPER_GROUPS: int = 8

TILE_TOKENS: int = 16

ACTIVATIONS: tuple[str, ...]

GROUP_SCORES: tuple[str, ...]

NORM_KINDS: tuple[str, ...]

ROUTER_SCORES: tuple[str, ...]

class DType(enum.Enum):
    f32 = 0

    bf16 = 1

    f16 = 2

    i8 = 3

    i32 = 4

    bf16_24 = 5

class KVType(enum.Enum):
    f32 = 0

    bf16 = 1

    f16 = 2

    i8 = 3

    e4m3 = 4

    e5m2 = 5

    i4 = 6

    kivi4 = 7

    kivi2 = 8

    kvquant3 = 9

class GroupKind(enum.Enum):
    """Formats of scales and offsets of groups."""

    none = 0

    u8 = 1

    f16 = 2

    bf16 = 3

    f32 = 4

    f16_u8 = 5

class GroupFormat:
    def __init__(
        self, bits: int, size: int, scales: GroupKind, offsets: GroupKind, rotated: bool
    ) -> None: ...
    def row_number_bytes(self, cols: int) -> int:
        """Bytes of the scales, offsets and factors of one output."""

class Param:
    """A parameter in its packed form."""

    @staticmethod
    def panels(matrices: int, rows: int, cols: int, dtype: DType) -> Param: ...
    @staticmethod
    def grouped(matrices: int, rows: int, cols: int, groups: GroupFormat) -> Param: ...
    @staticmethod
    def table(rows: int, cols: int, dtype: DType) -> Param: ...
    @staticmethod
    def vectors(matrices: int, rows: int) -> Param: ...
    @property
    def bytes(self) -> int: ...

def dtype_bytes(dtype: DType) -> int:
    """Bytes of a number of a buffer, table or plain panel."""

def kv_elems(head_dim: int) -> int:
    """Numbers that a key or value of head_dim takes in the cache."""

def kv_pair_bytes(elems: int, type: KVType) -> int:
    """Bytes of a key and a value of so many numbers, with their scales."""

def kv_scale_bytes(elems: int, type: KVType) -> int:
    """Bytes of the scales among them."""

def kv_outliers(elems: int) -> int:
    """
    Numbers of a key, and of a value, of so many that kvquant3 keeps beside its codes.
    """

def kv_late(type: KVType) -> bool:
    """Whether tokens come to the cache when they are no longer recent."""

def kv_widened(type: KVType) -> bool:
    """Whether attention multiplies these numbers as bfloat16."""

def attention_bytes(shapes: Sequence[Sequence[int]], threads: int, max_len: int) -> int:
    """
    Bytes of scratch that attention needs; a shape is (head_dim, heads, kv_heads, rank, whether its cache is widened).
    """

def attention_parts(
    shape: Sequence[int], threads: int, max_len: int, query_start: Sequence[int], positions: Sequence[int]
) -> list[list[int]]:
    """
    How a step's attention is cut: (row, token begin, token end, partition begin, partition end, split, first head of keys, head after the last) with split -1 for a part that covers all its partitions; a shape ends with the window.
    """

def experts_bytes(experts: int, pairs: int) -> int:
    """Bytes of scratch that sorting pairs of tokens and experts needs."""

def rounding_bytes(cols: int, threads: int) -> int:
    """Bytes of scratch that rounding rows of up to `cols` columns needs."""

class Limits:
    def __init__(self) -> None: ...
    @property
    def max_tokens(self) -> int: ...
    @max_tokens.setter
    def max_tokens(self, arg: int, /) -> None: ...
    @property
    def max_rows(self) -> int: ...
    @max_rows.setter
    def max_rows(self, arg: int, /) -> None: ...
    @property
    def max_logit_rows(self) -> int: ...
    @max_logit_rows.setter
    def max_logit_rows(self, arg: int, /) -> None: ...
    @property
    def max_len(self) -> int: ...
    @max_len.setter
    def max_len(self, arg: int, /) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @num_blocks.setter
    def num_blocks(self, arg: int, /) -> None: ...
    @property
    def block_size(self) -> int: ...
    @block_size.setter
    def block_size(self, arg: int, /) -> None: ...
    @property
    def branches(self) -> int: ...
    @branches.setter
    def branches(self, arg: int, /) -> None: ...
    @property
    def branch_blocks(self) -> int: ...
    @branch_blocks.setter
    def branch_blocks(self, arg: int, /) -> None: ...
    @property
    def max_loras(self) -> int: ...
    @max_loras.setter
    def max_loras(self, arg: int, /) -> None: ...
    @property
    def adapter_pages(self) -> int: ...
    @adapter_pages.setter
    def adapter_pages(self, arg: int, /) -> None: ...

class Group:
    pass

class StoredPair:
    """A and B of a part of a linear at some bytes of a file."""

    def __init__(
        self, linear: str, part: int, rank: int, a: int, a_dtype: DType, b: int, b_dtype: DType, scale: float
    ) -> None: ...

class AdapterLayout:
    """How adapters lie in the pages of a pool."""

    def __init__(self) -> None: ...
    def add_linear(self, name: str, cols: int, rank: int, rows: Sequence[int], shared: str) -> None:
        """
        A linear that adapters may change, with the rows of its parts, and the matrix that they share.
        """

    def add_own(self, name: str, param: Param) -> None:
        """A parameter of which adapters may have one of their own."""

    @property
    def page_bytes(self) -> int: ...
    def pages(self, parts: Mapping[str, Sequence[tuple[int, bool]]], own: Sequence[str]) -> int:
        """
        Pages of an adapter: the rank of each part of a linear, 0 for none, and whether it has gains; and parameters of its own.
        """

    def pool_bytes(self, slots: int, pages: int) -> int:
        """Bytes of a pool, its tables included."""

class Executor:
    @overload
    def __init__(self, isa: str, threads: int) -> None: ...
    @overload
    def __init__(self, isa: str, beside: Executor) -> None:
        """One that takes turns with another on its threads."""

    def add_param(self, name: str, param: Param) -> None: ...
    def borrow_param(self, lender: Executor, name: str) -> None:
        """Use a parameter of another executor."""

    def allocate_weights(self) -> None: ...
    def put(self, param: str, row_offset: int, src: int, dtype: DType, rows: int, cols: int) -> int: ...
    def put_codes(self, param: str, row_offset: int, rows: int, arrays: Sequence[int]) -> None: ...
    def save_weights(self, fd: int, first: int, count: int) -> bytes: ...
    def map_weights(self, fd: int, sums: bytes) -> bool: ...
    def add_rope(self, cos: int, sin: int, max_len: int, half: int, interleaved: bool) -> None: ...
    def add_buffer(
        self,
        *,
        name: str,
        cols: int,
        pitch: int,
        dtype: DType,
        offset: int,
        scales_at: int,
        numbers_at: int,
        group: int,
        rotated: bool,
        logits: bool,
        per: int,
        shared: bool,
    ) -> None: ...
    def add_kv_layer(
        self,
        group: int,
        kv_heads: int,
        head_dim: int,
        offset: int,
        type: KVType,
        k_scales: Sequence[float],
        v_scales: Sequence[float],
        books: Sequence[float],
        rope: int,
    ) -> None:
        """
        Scales: what a stored 1 of each head's keys and values stands for; 1 but in an fp8 cache. Books and the number of the rope, or -1: of a kvquant3 cache; see kv_layout.h.
        """

    def add_op(self, kind: str, fields: Mapping[str, None | bool | int | float | str]) -> None:
        """
        An op by the name of its class in program/ops, with all its fields; those of records as "shape.heads".
        """

    def begin_head(self) -> None: ...
    def join(self, group: Group, rank: int) -> None:
        """Meet the other ranks of the program there."""

    def bind(
        self,
        limits: Limits,
        arrays: Sequence[int],
        block_tables: Sequence[int],
        arena_bytes: int,
        block_bytes: int,
        activations: int = 0,
    ) -> None:
        """
        activations: the address of arena_bytes for them; 0 for memory of its own.
        """

    def place_experts(self, router: int, experts: Sequence[int]) -> None:
        """The expert at each place of a router, whose weights are there."""

    def share_experts(self, group: Group, rank: int, shown: int) -> None:
        """
        Meet the ranks of all replicas that share experts there; shown: the address of the rows that this one shows.
        """

    def take_expert_pairs(self, router: int) -> list[int]:
        """Pairs of (token, expert) that each place has had since the last call."""

    def expert_bytes(self, name: str) -> int:
        """Bytes of one expert in a packed parameter."""

    def read_expert(self, name: str, number: int, into: int) -> None: ...
    def replace_expert(self, name: str, number: int, packed: int) -> None:
        """Put what read_expert gave, of the same parameter on another rank."""

    def set_adapter_layout(self, layout: AdapterLayout) -> None: ...
    def open_adapter(
        self, slot: int, parts: Mapping[str, Sequence[tuple[int, bool]]], own: Sequence[str]
    ) -> None: ...
    def put_adapter(
        self,
        slot: int,
        name: str,
        part: int,
        a: int,
        a_dtype: DType,
        b: int,
        b_dtype: DType,
        scale: float,
        gain: int,
        rank: int,
    ) -> None: ...
    def put_stored(self, slot: int, file: int, pairs: Sequence[StoredPair]) -> None: ...
    def put_own_rows(self, slot: int, name: str, first: int, rows: int, count: int, cols: int) -> None: ...
    def clear_adapter(self, slot: int) -> None: ...
    def adapter_pages(self, slot: int) -> list[int]:
        """Numbers of the pages that a slot has."""

    @property
    def free_adapter_pages(self) -> int: ...
    def run(self, tokens: int, rows: int, logit_rows: int) -> None: ...
    def use_step(self, arrays: Sequence[int], block_tables: Sequence[int]) -> None:
        """Later steps are in these arrays, which are as those of bind."""

    def run_head(self, logit_rows: int) -> None: ...
    def run_range(self, tokens: int, rows: int, logit_rows: int, begin: int, end: int) -> None: ...
    def stop_after(self, op: int) -> None:
        """Run no op after this one; -1 runs all."""

    def profile(self, on: bool) -> None: ...
    def take_profile(self) -> list[float]: ...
    def copy_blocks(self, blocks: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of the cache to others."""

    def fill_cache(self, byte: int) -> None:
        """
        Overwrite every byte of the cache; for tests. 255 is NaN, or a scale that is NaN, in every format.
        """

    def buffer(self, name: str) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def adapter_bytes(self) -> int: ...
    @property
    def kv_warmed(self) -> int:
        """Bytes of the cache whose pages are in memory ahead of use."""

    @property
    def activation_bytes(self) -> int: ...
    @property
    def table_bytes(self) -> int: ...
    def arenas(self) -> list[tuple[str, int, int]]: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def use_threads(self, count: int) -> None:
        """Steps from now on run on so many of the threads."""

    def warm_blocks(self, count: int) -> None:
        """
        Pages of blocks from this one on are not brought into memory ahead of use.
        """

class LocalGroup(Group):
    """Ranks in threads of this process."""

    def __init__(self, size: int, uneven: bool = False) -> None: ...
    def leave(self) -> None:
        """End the wait of all other ranks: this one will not come."""

class SharedRanks:
    """Ranks in processes of one host, over a file in memory that all map."""

    def __init__(self, fd: int, bytes: int, size: int, rank: int, crowded: bool) -> None: ...

    HEADER_BYTES: Final[int] = ...
    """(arg: object, /) -> int"""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    def leave(self) -> None:
        """End the wait of all ranks, now and later: one will not come."""

    @property
    def left(self) -> bool: ...
    def beats(self, rank: int) -> int:
        """A number that rises while the process of a rank runs."""

    def worked(self, rank: int) -> int:
        """
        Nanoseconds that a rank has spent in commands, without those in which it waited for others to finish.
        """

    def waited(self, rank: int) -> int:
        """
        Those of them in which it waited for rows of the other ranks of its group.
        """

    def wait_more(self, nanoseconds: int) -> None:
        """
        This rank has waited for rows, elsewhere than in a group of these ranks.
        """

    def say(self, command: Sequence[int]) -> None:
        """Give a command to all other ranks, which have finished the last one."""

    def hear(self) -> list[int] | None:
        """Wait for the next command; None when a rank has left."""

    def finish(self, result: int) -> None:
        """This rank is done with the last command."""

    def finished(self, rank: int, result: int, worked: int, waited: int) -> None:
        """
        A rank on another node is done with the last command; it has worked and waited so many nanoseconds in all.
        """

    def wait(self, first: int, count: int) -> bool:
        """
        Wait until these ranks have finished the last command; False when one has left.
        """

    def result(self, rank: int) -> int: ...
    def begin_round(self, round: int) -> None:
        """
        Have the leading ranks of all replicas come to this round, in which each gives a command to its own.
        """

    def await_round(self, round: int) -> bool:
        """
        Wait until there is a round behind this one, or for `rouse`; False when a rank has left.
        """

    @property
    def round(self) -> int:
        """The last round that was begun."""

    def rouse(self) -> None:
        """End the wait for a round."""

class SharedGroup(Group):
    """Some of the ranks, which run a program together."""

    def __init__(self, ranks: SharedRanks, first: int, size: int, uneven: bool = False) -> None: ...

class WireHeart:
    """Shows a process on another host that this one runs, over a socket."""

    def __init__(self, fd: int) -> None: ...
    @property
    def beats(self) -> int:
        """A number that rises while the other process runs."""

class SpanningGroup(Group):
    """Some of the ranks, of which some are on other nodes."""

    def __init__(
        self,
        ranks: SharedRanks,
        first: int,
        size: int,
        here: int,
        count: int,
        peers: Sequence[tuple[int, int]],
    ) -> None: ...

class BandwidthProbe:
    def __init__(self, executor: Executor, size: int) -> None: ...
    def measure(self, passes: int = 1) -> float:
        """Bytes per second that all threads read together, in so many passes."""

def measure_flops(executor: Executor, dtype: DType, iterations: int) -> float:
    """Operations per second of all threads of an executor."""

def count_kernels(on: bool) -> None:
    """Whether executors and samplers that are made from now on count calls."""

def take_kernel_calls() -> dict[str, int]:
    """Counted calls of every kernel, by name, since the last call of this."""

class Tasks:
    def __init__(self, threads: int) -> None: ...
    def deal(self, tasks: int) -> None: ...
    def claim(self, thread: int) -> int: ...

SUM_KEY_BYTES: int = 1072

def sum_pages(
    data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    key: bytes,
    above: bytes = ...,
    isa: str = "",
) -> bytes:
    """
    Four NH check sums of 64 bits for every 1024 bytes; key: SUM_KEY_BYTES bytes. With another key `above`, the sums of these sums: four for every 32 KiB. The same on every instruction set. Releases the interpreter lock.
    """

def claim_all(threads: int, phases: Sequence[int]) -> list[list[list[int]]]:
    """
    What each thread of a pool claims of phases of so many tasks: [phase][thread][task].
    """

class Processors:
    def __init__(self, threads: int) -> None: ...
    def note(self, thread: int) -> None: ...
    def part(self, thread: int) -> bool: ...
    def seen(self, thread: int) -> int: ...

class PageWarmer:
    def __init__(self, address: int, size: int, ahead: int) -> None: ...
    def used(self, size: int) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    @property
    def warmed(self) -> int: ...

def attend_tiles(
    executor: Executor, q: int, k: int, v: int, out: int, tokens: int, head_dim: int, rows: int
) -> int:
    """
    Attention of one head in both directions, `rows` queries at a time: q, k, v and out are addresses of float32 [tokens, head_dim]. Returns the numbers that the kernel has read and written.
    """

def attend_tile_bytes(head_dim: int, rows: int) -> int:
    """Bytes of scratch that attend_tiles needs for a tile."""

class SlotParams:
    def __init__(self, params: object) -> None:
        """The numbers of a SamplingParams, by name."""

    @property
    def seed(self) -> int: ...
    @seed.setter
    def seed(self, arg: int, /) -> None: ...
    @property
    def sample_index(self) -> int: ...
    @sample_index.setter
    def sample_index(self, arg: int, /) -> None: ...
    @property
    def prompt_len(self) -> int: ...
    @prompt_len.setter
    def prompt_len(self, arg: int, /) -> None: ...
    @property
    def restricted(self) -> bool: ...
    @restricted.setter
    def restricted(self, arg: bool, /) -> None: ...
    @property
    def allowed(self) -> list[int]: ...
    @allowed.setter
    def allowed(self, arg: Sequence[int], /) -> None: ...
    @property
    def banned(self) -> list[int]: ...
    @banned.setter
    def banned(self, arg: Sequence[int], /) -> None: ...
    @property
    def stop_ids(self) -> list[int]: ...
    @stop_ids.setter
    def stop_ids(self, arg: Sequence[int], /) -> None: ...
    @property
    def bias_ids(self) -> list[int]: ...
    @bias_ids.setter
    def bias_ids(self, arg: Sequence[int], /) -> None: ...
    @property
    def bias_values(self) -> list[float]: ...
    @bias_values.setter
    def bias_values(self, arg: Sequence[float], /) -> None: ...
    @property
    def bad_tokens(self) -> list[int]: ...
    @bad_tokens.setter
    def bad_tokens(self, arg: Sequence[int], /) -> None: ...
    @property
    def bad_ends(self) -> list[int]: ...
    @bad_ends.setter
    def bad_ends(self, arg: Sequence[int], /) -> None: ...
    @property
    def breakers(self) -> list[int]: ...
    @breakers.setter
    def breakers(self, arg: Sequence[int], /) -> None: ...
    @property
    def ordered(self) -> bool: ...
    @ordered.setter
    def ordered(self, arg: bool, /) -> None: ...
    @property
    def order(self) -> list[int]: ...
    @order.setter
    def order(self, arg: Sequence[int], /) -> None: ...
    @property
    def surprise(self) -> float: ...
    @surprise.setter
    def surprise(self, arg: float, /) -> None: ...
    @property
    def needs_tokens(self) -> bool: ...

class SamplerSizes:
    def __init__(self, vocab: int, max_slots: int, max_rows: int, max_logprobs: int) -> None: ...

class Judging:
    def __init__(
        self,
        acceptance: str,
        epsilon: float,
        proposals: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ]
        | None,
        lines: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None,
    ) -> None: ...

class Sampler:
    @overload
    def __init__(self, sizes: SamplerSizes, isa: str, threads: int) -> None: ...
    @overload
    def __init__(self, sizes: SamplerSizes, executor: Executor) -> None: ...
    def add(
        self,
        slot: int,
        params: SlotParams,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def drop(self, slot: int) -> None: ...
    def sample(
        self,
        logits: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        positions: Annotated[
            NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        masks: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ]
        | None,
        lines: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None,
        maxima: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ]
        | None,
        drafts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None,
        places: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        judging: Judging | None = None,
        distributions: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")]
        | None = None,
        guesses: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu")]
        | None = None,
        chances: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")]
        | None = None,
        guides: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> int: ...
    def commit(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def logprobs(self, row: int) -> tuple[float, int, list[int], list[float]]: ...
    def surprise(self, slot: int) -> float: ...
    def score(
        self,
        logits: NDArray[numpy.float32],
        target_token_ids: NDArray[numpy.int32],
        count: int,
        maxima: NDArray[numpy.float32] | None,
    ) -> list[tuple[float, int, list[int], list[float]]] | None: ...
    def tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        The last step's tokens, -1 where a row failed: a view of [max_rows], rewritten by the next sample().
        """

    def status(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        The last step's outcome: 0 sampled, 1 NaN or inf in the logits, 2 no token left. A view like tokens().
        """

    def memory(self) -> int: ...
    @staticmethod
    def bound(sizes: SamplerSizes, threads: int, max_len: int, named: int) -> int: ...

def philox4x32(counter: Sequence[int], key0: int, key1: int) -> list[int]:
    """Philox4x32-10 of a counter and a key."""

def race_times(
    seed: int, sample_index: int, position: int, vocab: int
) -> Annotated[NDArray[numpy.float32], dict(shape=(None,))]:
    """
    The time of each token in the draw at a position: the least time divided by a weight wins.
    """

class NgramIndex:
    """The last tokens of a text, and where its end stood before in them."""

    def __init__(self, shortest: int, longest: int, window: int) -> None: ...
    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text."""

    def append_array(self, tokens: Sequence[int]) -> None:
        """The same for an array of int32."""

    def append_end_of(self, other: NgramIndex, count: int) -> None:
        """Add the last tokens of another text."""

    def lookup(self, count: int) -> tuple[int, list[int]]:
        """
        How many tokens before an earlier place equal those at the end of the text, and `count` tokens after it.
        """

    def lookup_end_of(self, other: NgramIndex, count: int) -> tuple[int, list[int]]:
        """The same for the end of another text."""

    def align(self, tail: Sequence[int], near: int) -> tuple[int, int]:
        """
        The place whose tokens before equal the most at the end of another text, of several the nearest to `near`: how many these are, and how many tokens stand before the place.
        """

    def memory(self) -> int:
        """Bytes held now."""

    @staticmethod
    def bound(window: int) -> int:
        """The most bytes ever held."""

def scan_json(text: bytes, depth: int, parts: int, values: int) -> tuple[list[str], str, str | None]:
    """
    The keys of the outermost object of a JSON text in UTF-8, or why it is refused, and the key that this is about: a key that repeats in an object, nesting over `depth`, more strings and brackets than `parts` or more values than `values`. Malformed text may pass. Releases the interpreter lock.
    """
