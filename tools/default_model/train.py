"""Trains the model, or, with a teacher, its draft. Resumable; CPU or CUDA.

python -m tools.default_model.train mini --tokenizer DIR --out DIR --hours 8

The rate stays at its peak until the time left is the cooldown's share. `--finish` cools down from the last checkpoint
instead; more `--hours` than a finished run had go on from where its cooldown began.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from . import hf_folder, wiring
from . import tokenizer as tokenizers
from .batching import Batches, BatchPlan, MicroBatch, Source
from .corpus.draw import Split
from .corpus.mixture import GENERATOR_VERSION, conversation
from .growth import grown
from .machine import Clock, autocast, keep_memory, precision, stay_behind, workers
from .model import Decoder
from .optimizer import Optimizer, Schedule, load_run, save_run
from .plot import loss_curve
from .shape import SHAPES, Shape

COLUMNS = ("step", "tokens", "loss", "eval_loss", "rate", "norm", "seconds")
_FLUSH = 20  # steps whose losses stay on the device until they are logged
_SAY_EVERY = 60.0  # seconds between lines of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that determines the result of a run, and its output folder.

    A run is `steps` long, or as many steps as the computing time `hours` allows. `cooldown` is a share of it.
    """

    shape: str
    tokenizer: Path
    out: Path
    steps: int = 0
    hours: float = 0.0
    finish: bool = False
    seed: int = 1
    rate: float = 1e-2
    warmup: int = 100
    cooldown: float = 0.3
    muon: bool = True
    prompts: float = 0.1
    repeat_tokens: int = 512
    pool: int = 512
    steps_per_pool: int = 12
    held_out: int = 192
    precision: str = "auto"
    start: Path | None = None
    blend: float = 0.0
    teacher: Path | None = None
    eval_minutes: float = 10.0
    save_minutes: float = 5.0
    keep: int = 0
    threads: int = 0
    stop_after: int = 0


# Options that may change between parts of one run.
_FREE = {
    "blend", "out", "tokenizer", "hours", "finish", "teacher", "threads", "stop_after", "held_out", "save_minutes",
    "keep", "eval_minutes", "precision",
}  # fmt: skip


class Trainer:
    """One run: a model, its optimizer, its batches and its log."""

    def __init__(self, options: Options) -> None:
        if bool(options.steps) == bool(options.hours) or not 0 < options.cooldown < 1:
            raise ValueError("options: give steps or hours, and a cooldown between 0 and 1")
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if options.threads:
            torch.set_num_threads(options.threads)
        vocabulary = tokenizers.load(options.tokenizer)
        if vocabulary.get_vocab_size() > SHAPES[options.shape].vocab:
            raise ValueError(
                f"tokenizer: more than the {SHAPES[options.shape].vocab} entries of {options.shape}"
            )
        self.model = Decoder(SHAPES[options.shape])
        if options.start:
            self.model.load_state_dict(_begun(options.start, SHAPES[options.shape]).state_dict())
        else:
            wiring.initialize(self.model, torch.Generator().manual_seed(options.seed))
        self.model.to(self.device)
        self.teacher = hf_folder.load(options.teacher, self.device) if options.teacher else None
        self.optimizer = Optimizer(self.model, muon=options.muon)
        self.schedule = Schedule(peak=options.rate, warmup=options.warmup)
        self.clock = Clock(self.device)
        self.step, self.tokens, self.seconds, self._recent = 0, 0, 0.0, math.nan
        self._unlogged: list[tuple[int, int, Tensor, float, Tensor, float]] = []
        self._resume()
        plan = BatchPlan(
            seed=options.seed,
            pool=options.pool,
            steps_per_pool=options.steps_per_pool,
            prompts=options.prompts,
            repeat_tokens=options.repeat_tokens,
        )
        if self.device == "cuda":
            plan = replace(plan, group_tokens=8192, micro_tokens=65536)
        elif self.precision == "bfloat16":
            plan = replace(plan, micro_tokens=4096)
        source: Source = partial(conversation, options.seed, Split.TRAIN)
        self.batches = Batches(source, vocabulary, plan, workers())
        held_out = BatchPlan(seed=0, pool=options.held_out, steps_per_pool=1)
        self.held_out = Batches(partial(conversation, 0, Split.EVAL), vocabulary, held_out)

    def _resume(self) -> None:
        """Continue from the checkpoint in the output folder; refuse one of another run."""
        options, out = self.options, self.options.out
        out.mkdir(parents=True, exist_ok=True)
        decides = {k: str(v) for k, v in asdict(options).items() if k not in _FREE}
        decides["generator_version"] = str(GENERATOR_VERSION)
        note, log = out / "run.json", out / "loss.csv"
        going_on = (out / "run.safetensors").exists()
        if options.finish and not going_on:
            raise ValueError(f"finish: {out} has no checkpoint to cool down from")
        noted = json.loads(note.read_text()) if going_on else {}
        self.precision = noted.pop("precision", "auto")
        if options.precision != "auto" or self.precision == "auto":
            self.precision = precision(self.device) if options.precision == "auto" else options.precision
        if going_on and noted != decides:
            raise ValueError(f"out: {out} holds a run with other options, see {note.name}")
        if going_on:
            self._load()
            with log.open() as file:
                rows = [r for r in csv.DictReader(file) if int(r["step"]) < self.step]
        else:
            rows = []
        _write(note, {**decides, "precision": self.precision})
        with log.with_suffix(".tmp").open("w") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        log.with_suffix(".tmp").replace(log)
        self._held = next((float(r["eval_loss"]) for r in reversed(rows) if r["eval_loss"]), None)
        print(
            f"{self.device}, {torch.get_num_threads()} threads, {self.precision}; step {self.step}",
            flush=True,
        )

    def _load(self) -> None:
        """The last checkpoint, or, when this run may be longer than planned, the one before the cooldown."""
        out, options = self.options.out, self.options
        plan = out / "cooldown.json"
        longer = False
        if plan.exists():
            noted = json.loads(plan.read_text())
            longer = not options.finish and noted["seconds"] < self._peak_seconds()
            self.schedule = replace(self.schedule, start=noted["start"], cooldown=noted["steps"])
        if longer:
            shutil.copyfile(out / "peak.safetensors", out / "run.tmp")
            (out / "run.tmp").replace(out / "run.safetensors")
            plan.unlink()
            shutil.rmtree(out / "model", ignore_errors=True)
            self.schedule = Schedule(peak=options.rate, warmup=options.warmup)
        facts = load_run(out / "run.safetensors", self.model, self.optimizer)
        self.step, self.tokens, self.seconds = int(facts["step"]), int(facts["tokens"]), facts["seconds"]

    def _peak_seconds(self) -> float:
        return self.options.hours * 3600 * (1 - self.options.cooldown)

    def run(self) -> None:
        """Train to the end (or `stop_after` steps from here), then write the model folder and the plot."""
        options = self.options
        last = self.step + options.stop_after if options.stop_after else None
        self._began = saved = evaluated = said = time.monotonic()
        self._seconds_before = self.seconds
        self.clock.lap()
        done = self._done(last)
        while not done:
            self._train_step()
            done = self._done(last)
            if done:
                break
            now = time.monotonic()
            if now - evaluated > options.eval_minutes * 60:
                self._flush(self.held_out_loss())
                evaluated = now
            elif len(self._unlogged) >= _FLUSH:
                self._flush()
            if now - saved > options.save_minutes * 60:
                self._save()
                saved = now
            if now - said > _SAY_EVERY:
                self._say()
                said = now
        if self._unlogged:
            self._flush(self.held_out_loss())
            self._save()
            self._say()
        if options.blend and options.start:
            self._blend(options.start, options.blend)
        hf_folder.save(self.model, options.out / "model", options.tokenizer)
        loss_curve(
            options.out / "loss.csv", options.out / "loss.svg", f"quire-{options.shape}: loss on answers"
        )

    @torch.no_grad()
    def _blend(self, start: Path, share: float) -> None:
        """Take the mean of these weights and those that the run began with, in place of these."""
        began = _begun(start, self.model.shape).state_dict()
        for name, weight in self.model.state_dict().items():
            weight.lerp_(began[name].to(weight), share)

    def _done(self, last: int | None) -> bool:
        """Whether this was the last step. Begins the cooldown when it is time."""
        options, step = self.options, self.step
        if self.schedule.start is None:
            share = options.cooldown
            due = (
                step >= round(options.steps * (1 - share))
                if options.steps
                else self.seconds >= self._peak_seconds()
            )
            if due or (options.finish and step):
                steps = max(1, options.steps - step if options.steps else round(step * share / (1 - share)))
                self._save()
                shutil.copyfile(options.out / "run.safetensors", options.out / "peak.safetensors")
                _write(
                    options.out / "cooldown.json", {"start": step, "steps": steps, "seconds": self.seconds}
                )
                self.schedule = replace(self.schedule, start=step, cooldown=steps)
                print(f"cooldown: {steps} steps from step {step}", flush=True)
        return step in (last, self.schedule.end)

    def _train_step(self) -> None:
        self.model.train()
        rate = self.schedule.rate(self.step)
        batches = self.batches.step(self.step)
        rows = sum(len(b.rows) for b in batches)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self._loss(batch.to(self.device)) / rows
            loss.backward()
            total += loss.detach()
        with autocast(self.device, self.precision):  # for Muon's products
            norm = self.optimizer.step(rate)
        self.step += 1
        self.tokens += sum(len(b.ids) for b in batches)
        self.seconds += self.clock.lap()
        self._unlogged.append((self.step - 1, self.tokens, total, rate, norm, self.seconds))

    def _logits(self, model: Decoder, batch: MicroBatch) -> Tensor:
        with autocast(self.device, self.precision):
            return model.logits(model(batch.ids, batch.groups, batch.rows)).float()

    def _loss(self, batch: MicroBatch) -> Tensor:
        """Summed cross-entropy of the targets; with a teacher, half of it is against the teacher's distribution."""
        logits = self._logits(self.model, batch)
        loss = F.cross_entropy(logits, batch.targets, reduction="sum")
        if self.teacher is None:
            return loss
        with torch.no_grad():
            wanted = self._logits(self.teacher, batch).log_softmax(-1)
        apart = F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)
        return 0.5 * loss + 0.5 * apart

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean cross-entropy of the answers of `held_out` held-out conversations, in nats per token."""
        self.model.eval()
        total, rows = 0.0, 0
        for batch in self.held_out.step(0):
            moved = batch.to(self.device)
            total += float(F.cross_entropy(self._logits(self.model, moved), moved.targets, reduction="sum"))
            rows += len(batch.rows)
        self.clock.lap()  # evaluations are no part of the run
        self._held = total / rows
        return self._held

    def _flush(self, held: float | None = None) -> None:
        """Write the rows that wait; the last one gets the held-out loss."""
        with (self.options.out / "loss.csv").open("a") as file:
            writer = csv.writer(file)
            for row, (step, tokens, loss, rate, norm, seconds) in enumerate(self._unlogged, 1):
                shown = "" if held is None or row < len(self._unlogged) else f"{held:.4f}"
                self._recent = float(loss)
                numbers = (f"{rate:.6f}", f"{float(norm):.3f}", f"{seconds:.1f}")
                writer.writerow((step, tokens, f"{self._recent:.4f}", shown, *numbers))
        self._unlogged.clear()

    def _save(self) -> None:
        self._flush()
        facts = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        run = self.options.out / "run.safetensors"
        save_run(run, facts, self.model, self.optimizer)
        if self.options.keep:
            kept = self.options.out / "kept"
            kept.mkdir(exist_ok=True)
            shutil.copyfile(run, kept / f"{self.step:07}.safetensors")
            for old in sorted(kept.iterdir())[: -self.options.keep]:
                old.unlink()

    def _say(self) -> None:
        """A line of progress. Hours are computing time, the time to the end is wall time."""
        self._flush()
        end, options = self.schedule.end, self.options
        speed = self.tokens / max(self.seconds, 1e-9)
        each = self.seconds / max(self.step, 1)
        whole = (end or options.steps) * each or options.hours * 3600
        slower = (time.monotonic() - self._began) / max(self.seconds - self._seconds_before, 1e-9)
        held = "-" if self._held is None else f"{self._held:.3f}"
        print(
            f"step {self.step} loss {self._recent:.3f} held-out {held} tokens {self.tokens / 1e6:.2f} M "
            f"({speed:.0f}/s) {self.seconds / 3600:.2f} of {whole / 3600:.2f} h, "
            f"{max(0.0, whole - self.seconds) * slower / 3600:.2f} h to go",
            flush=True,
        )


def _begun(start: Path, shape: Shape) -> Decoder:
    """The model that a run begins with, grown where the run's is larger."""
    model = hf_folder.load(start)
    return model if model.shape == shape else grown(model, shape, torch.Generator().manual_seed(0))


def _write(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, default=0)
    length.add_argument("--hours", type=float, default=0.0, help="of computing")
    parser.add_argument("--finish", action="store_true", help="cool down from the last checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument(
        "--cooldown", type=float, default=0.3, help="share of the run in which the rate falls to nothing"
    )
    parser.add_argument("--adamw", dest="muon", action="store_false", help="AdamW for every weight")
    parser.add_argument(
        "--prompts", type=float, default=0.1, help="share of conversations whose user turns are learned too"
    )
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument(
        "--repeat-tokens", type=int, default=512, help="tokens per step of random sequences repeated once"
    )
    parser.add_argument("--pool", type=int, default=512, help="conversations sorted by length together")
    parser.add_argument("--steps-per-pool", type=int, default=12)
    parser.add_argument(
        "--start", type=Path, help="model folder whose weights a new run begins with; give it another seed"
    )
    parser.add_argument(
        "--blend", type=float, default=0.0, metavar="SHARE",
        help="the model is the mean of the run's end and, with this weight, of --start",
    )  # fmt: skip
    parser.add_argument("--teacher", type=Path, help="model folder to distil from")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--eval-minutes", type=float, default=10.0)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument(
        "--keep", type=int, default=0, help="checkpoints kept in OUT/kept for `average`, the newest ones"
    )
    parser.add_argument(
        "--stop-after", type=int, default=0, help="stop after this many steps; run again to continue"
    )
    options = Options(**vars(parser.parse_args()))
    stay_behind()
    keep_memory()
    Trainer(options).run()


if __name__ == "__main__":
    main()
