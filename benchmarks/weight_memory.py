"""Steps of a model of which a part is in memory (--weight-memory), by that part.

    python -m benchmarks.weight_memory MODEL [--shares 1 0.75 0.5] [--tokens 12] [--rounds 3]

`MODEL` is a folder with weights, which are packed into `--folder` first. For each share of their bytes, in turns: how
long a decoding step of one sequence takes and waits for weights, and what it brought in. Weights that make room come
back from the page cache, and in the last two columns from the disk: there the benchmark has their pages dropped.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import time
from pathlib import Path
from statistics import median

from quire import LLM, SamplingParams
from quire.executor.paged_weights import PagedWeights
from quire.util.sizes import format_size


def drop_from_cache(paging: PagedWeights, folder: Path) -> int:
    """From now on what makes room leaves the page cache, too. Returns the file, to be closed."""
    (path,) = folder.glob("*.weights")
    fd, plain = os.open(path, os.O_RDONLY), paging._advise

    def advise(begin: int, end: int, advice: int) -> None:
        plain(begin, end, advice)
        if advice == mmap.MADV_DONTNEED:
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)

    paging._advise = advise  # type: ignore[method-assign]
    return fd


def steps(args: argparse.Namespace, bound: int | None, cold: bool = False) -> tuple[float, float, float, int]:
    """Milliseconds of a step, of these those that it waited, MB that came in, and bytes of all weights."""
    llm = LLM(args.model, weight_cache_dir=str(args.folder), weight_memory=bound, max_model_len=512, max_num_seqs=1,
              max_num_batched_tokens=64, progress=False)  # fmt: skip
    try:
        paging = llm._built.executor.paging
        fd = drop_from_cache(paging, args.folder) if cold and isinstance(paging, PagedWeights) else -1
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        before = paging.counts if paging is not None else None
        start = time.perf_counter()
        asked = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
        llm.generate([[8, 9, 10]], asked, use_tqdm=False)
        spent = 1e3 * (time.perf_counter() - start) / args.tokens
        if fd >= 0:
            os.close(fd)
        whole = llm._built.executor.memory()["weights"]
        if paging is None or before is None:
            return spent, 0.0, 0.0, whole
        after = paging.counts
        waited = 1e3 * (after.seconds - before.seconds) / args.tokens
        return spent, waited, (after.paged_in - before.paged_in) / args.tokens / 1e6, whole
    finally:
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.75, 0.5])
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/weight_memory"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        *_, whole = steps(args, None)
        print(
            f"weights: {format_size(whole)}; one sequence, {args.tokens} tokens, medians of {args.rounds}\n"
        )
        found: dict[float, list[tuple[float, ...]]] = {share: [] for share in args.shares}
        for _ in range(args.rounds):
            for share in args.shares:
                bound = int(share * whole) if share < 1 else None
                found[share].append((*steps(args, bound)[:3], *steps(args, bound, cold=True)[:2]))
        print(
            "| share in memory | step, ms | waiting, ms | came in, MB | from the disk: step, ms | waiting, ms |"
        )
        print("|--:|--:|--:|--:|--:|--:|")
        for share, rounds in found.items():
            middle = [f"{median(each[part] for each in rounds):.0f}" for part in range(5)]
            print(f"| {share:.2f} | {' | '.join(middle)} |")
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
