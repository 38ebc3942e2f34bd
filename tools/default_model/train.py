"""Trains the model, or, with a teacher, its draft. Resumable; CPU or CUDA.

python -m tools.default_model.train mini --tokenizer DIR --out DIR --steps 3000
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from . import hf_folder, wiring
from . import tokenizer as tokenizers
from .batching import Batches, BatchPlan, MicroBatch, Source
from .corpus.conversation import Conversation
from .corpus.draw import Split
from .corpus.mixture import GENERATOR_VERSION, conversation
from .model import Decoder
from .optimizer import Optimizer, Schedule, load_run, save_run
from .plot import loss_curve
from .shape import SHAPES

COLUMNS = ("step", "tokens", "loss", "eval_loss", "rate", "norm", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that determines the result of a run, and its output folder."""

    shape: str
    tokenizer: Path
    out: Path
    steps: int
    seed: int = 1
    rate: float = 1e-2
    warmup: int = 100
    horizon: int = 0
    cooldown: int = 0
    muon: bool = True
    learn_all: bool = False
    repeat_tokens: int = 1024
    pool: int = 512
    steps_per_pool: int = 12
    held_out: int = 256
    bf16: bool = True
    teacher: Path | None = None
    eval_every: int = 200
    save_every: int = 200
    threads: int = 0
    stop_after: int = 0


class Trainer:
    """One run: a model, its optimizer, its batches and its log."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if options.threads:
            torch.set_num_threads(options.threads)
        self.vocabulary = tokenizers.load(options.tokenizer)
        self.model = Decoder(SHAPES[options.shape])
        wiring.initialize(self.model, torch.Generator().manual_seed(options.seed))
        self.model.to(self.device)
        self.teacher = hf_folder.load(options.teacher, self.device) if options.teacher else None
        self.optimizer = Optimizer(self.model, muon=options.muon)
        self.schedule = Schedule(
            peak=options.rate,
            steps=options.steps,
            warmup=options.warmup,
            horizon=options.horizon,
            cooldown=options.cooldown,
        )
        plan = BatchPlan(
            seed=options.seed,
            pool=options.pool,
            steps_per_pool=options.steps_per_pool,
            learn_all=options.learn_all,
            repeat_tokens=options.repeat_tokens,
        )
        self.batches = Batches(self._source(Split.TRAIN, options.seed), self.vocabulary, plan)
        held_out = BatchPlan(seed=0, pool=options.held_out, steps_per_pool=1)
        self.held_out = Batches(self._source(Split.EVAL, 0), self.vocabulary, held_out)
        self.step, self.tokens, self.seconds, self.norm = 0, 0, 0.0, 0.0
        self._resume()

    @staticmethod
    def _source(split: Split, seed: int) -> Source:
        def source(index: int) -> Conversation:
            return conversation(seed, split, index)

        return source

    def _resume(self) -> None:
        """Continue from the checkpoint in the output folder; refuse one of another run."""
        out = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        decides = {k: str(v) for k, v in asdict(self.options).items() if k not in _FREE}
        decides["generator_version"] = str(GENERATOR_VERSION)
        note = out / "run.json"
        if not (out / "run.safetensors").exists():
            note.write_text(json.dumps(decides, indent=2) + "\n")
            with (out / "loss.csv").open("w") as file:
                csv.writer(file).writerow(COLUMNS)
            return
        if json.loads(note.read_text()) != decides:
            raise ValueError(f"out: {out} holds a run with other options, see {note.name}")
        self.step = load_run(out / "run.safetensors", self.model, self.optimizer)
        with (out / "loss.csv").open() as file:
            rows = [r for r in csv.DictReader(file) if int(r["step"]) < self.step]
        with (out / "loss.csv").open("w") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        self.tokens, self.seconds = int(rows[-1]["tokens"]), float(rows[-1]["seconds"])

    def run(self) -> None:
        """Train to the last step (or `stop_after` steps from here), then write the model folder and the plot."""
        options = self.options
        last = min(options.steps, self.step + options.stop_after) if options.stop_after else options.steps
        while self.step < last:
            began = time.perf_counter()
            rate = self.schedule.rate(self.step)
            loss, tokens = self._train_step(rate)
            self.tokens += tokens
            self.seconds += time.perf_counter() - began
            self.step += 1
            evaluate = self.step % options.eval_every == 0 or self.step == last
            self._log(loss, self.held_out_loss() if evaluate else None, rate)
            if self.step % options.save_every == 0 or self.step == last:
                save_run(options.out / "run.safetensors", self.step, self.model, self.optimizer)
        hf_folder.save(self.model, options.out / "model", options.tokenizer)
        loss_curve(
            options.out / "loss.csv", options.out / "loss.svg", f"quire-{options.shape}: loss on answers"
        )

    def _train_step(self, rate: float) -> tuple[float, int]:
        self.model.train()
        batches = self.batches.step(self.step)
        rows = sum(len(b.rows) for b in batches)
        total = 0.0
        for batch in batches:
            loss = self._loss(batch.to(self.device)) / rows
            loss.backward()
            total += loss.item()
        self.norm = self.optimizer.step(rate)
        return total, sum(len(b.ids) for b in batches)

    def _logits(self, model: Decoder, batch: MicroBatch) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.options.bf16):
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
        return total / rows

    def _log(self, loss: float, held: float | None, rate: float) -> None:
        shown = "" if held is None else f"{held:.4f}"
        numbers = (f"{rate:.6f}", f"{self.norm:.3f}", f"{self.seconds:.1f}")
        row = (self.step - 1, self.tokens, f"{loss:.4f}", shown, *numbers)
        with (self.options.out / "loss.csv").open("a") as file:
            csv.writer(file).writerow(row)
        if held is not None or self.step % 20 == 0:
            speed = self.tokens / self.seconds
            state = f"step {self.step} loss {loss:.3f} held-out {shown or '-'}"
            print(f"{state} tokens {self.tokens} ({speed:.0f}/s)", flush=True)


# Options that may change between parts of one run.
_FREE = {"out", "tokenizer", "teacher", "threads", "stop_after", "held_out", "save_every", "eval_every"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--horizon", type=int, default=0, help="steps of the cosine; 0: all")
    parser.add_argument(
        "--cooldown", type=int, default=0, help="last steps, over which the rate falls to nothing"
    )
    parser.add_argument("--adamw", dest="muon", action="store_false", help="AdamW for every weight")
    parser.add_argument("--learn-all", action="store_true", help="learn prompts too")
    parser.add_argument("--float32", dest="bf16", action="store_false", help="no bfloat16 autocast")
    parser.add_argument(
        "--repeat-tokens",
        type=int,
        default=1024,
        help="tokens per step of random sequences repeated once",
    )
    parser.add_argument("--pool", type=int, default=512, help="conversations sorted by length together")
    parser.add_argument("--steps-per-pool", type=int, default=12)
    parser.add_argument("--teacher", type=Path, help="model folder to distil from")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument(
        "--stop-after", type=int, default=0, help="stop after this many steps; run again to continue"
    )
    Trainer(Options(**vars(parser.parse_args()))).run()


if __name__ == "__main__":
    main()
