/** What the engine holds, drawn: blocks, the tree of prefixes, lanes of sequences, the parts of a step. */
import { Bars } from "./bars";
import type { Detail, Overview, Past } from "./live";
import { ms, Panel, percent } from "./panel";

const short = (id: string) => (id.length > 16 ? `…${id.slice(-8)}` : id);
const name = (id: string, sample: number) => `${short(id)}${sample ? ` #${sample}` : ""}`;

const ACROSS = 96;

export function Blocks({ detail, cache }: { detail: Detail; cache: Overview["cache"] }) {
  const free = cache.blocks - cache.used - cache.cached;
  const cells: number[] = [];
  for (let i = 0; i < detail.blocks.length; i += 2) {
    for (let k = 0; k < (detail.blocks[i + 1] ?? 0); k++) cells.push(detail.blocks[i] ?? 0);
  }
  const rows = Math.max(1, Math.ceil(cells.length / ACROSS));
  const what = (state: number) => {
    if (state === 0) return "free";
    if (state === -1) return "cached";
    if (state < 0) return "held by several";
    const held = detail.sequences[state - 1];
    return held ? name(held[0], held[1]) : "held";
  };
  const shares = [
    ["held", cache.used],
    ["cached", cache.cached],
    ["free", free],
  ] as const;
  const note = `${cache.blocks.toLocaleString("en")} blocks of ${cache.block_tokens} tokens`;
  return (
    <Panel title="KV cache" note={note}>
      <div class="share" aria-hidden="true">
        {shares.map(([label, value]) => (
          <i key={label} class={label} style={{ flexGrow: value }} />
        ))}
      </div>
      <ul class="legend">
        {shares.map(([label, value]) => (
          <li key={label} class={label}>
            {label} {value.toLocaleString("en")} ({percent(value / (cache.blocks || 1))})
          </li>
        ))}
        <li class="bare">{cache.empty_tokens.toLocaleString("en")} places of held blocks are empty</li>
        {cache.pinned > 0 && <li class="bare">{cache.pinned} pinned</li>}
      </ul>
      {cells.length === 0 ? (
        <p class="hint">No block was taken yet.</p>
      ) : (
        <figure>
          <svg
            class="blocks"
            viewBox={`0 0 ${ACROSS * 10} ${rows * 10}`}
            role="img"
            aria-label={`Map of the blocks that were ever taken: ${shares.map((one) => one.join(" ")).join(", ")}`}
          >
            {cells.map((state, i) => (
              <rect
                key={i}
                class={state > 0 ? `bar series${(state - 1) % 6}` : ["free", "cached", "several"][-state]}
                x={(i % ACROSS) * 10 + 1}
                y={Math.floor(i / ACROSS) * 10 + 1}
                width="8"
                height="8"
              >
                <title>{`block ${i * detail.stride}: ${what(state)}`}</title>
              </rect>
            ))}
          </svg>
          <figcaption>
            {detail.stride > 1 ? `Every ${detail.stride}th block` : "The blocks"} up to the last that was ever taken; a
            colour is a sequence.
          </figcaption>
        </figure>
      )}
    </Panel>
  );
}

const WIDE = 640;
const HIGH = 220;

/** An icicle: a branch is as long as its tokens, and as high as its leaves. */
export function Prefixes({ detail }: { detail: Detail }) {
  const { branches } = detail;
  const leaves = branches.map(() => 0);
  for (let i = branches.length - 1; i >= 0; i--) {
    leaves[i] = leaves[i] || 1;
    const parent = branches[i]?.[0] ?? -1;
    if (parent >= 0) leaves[parent] = (leaves[parent] ?? 0) + (leaves[i] ?? 1);
  }
  const all = branches.reduce((sum, [parent], i) => sum + (parent < 0 ? (leaves[i] ?? 0) : 0), 0) || 1;
  const starts: number[] = [];
  const tops: number[] = [];
  const used = new Map<number, number>(); // leaves of a parent that have their places
  branches.forEach(([parent], i) => {
    const before = used.get(parent) ?? 0;
    starts[i] = parent < 0 ? 0 : (starts[parent] ?? 0) + (branches[parent]?.[1] ?? 0);
    tops[i] = (parent < 0 ? 0 : (tops[parent] ?? 0)) + before;
    used.set(parent, before + (leaves[i] ?? 1));
  });
  const longest = Math.max(1, ...branches.map(([, tokens], i) => (starts[i] ?? 0) + tokens));
  const tokens = branches.reduce((sum, one) => sum + one[1], 0);
  const note = `${tokens.toLocaleString("en")} tokens in ${branches.length} branches`;
  return (
    <Panel title="Cached prefixes" note={note}>
      {branches.length === 0 ? (
        <p class="hint">Nothing is cached.</p>
      ) : (
        <figure>
          <svg viewBox={`0 0 ${WIDE} ${HIGH}`} role="img" aria-label={`Tree of cached prefixes: ${note}`}>
            {branches.map(([, length, sequences], i) => {
              const high = ((leaves[i] ?? 1) / all) * HIGH;
              return (
                <rect
                  key={i}
                  class={sequences ? "in-use" : "cached"}
                  x={((starts[i] ?? 0) / longest) * WIDE}
                  y={((tops[i] ?? 0) / all) * HIGH}
                  width={Math.max(1, (length / longest) * WIDE - 1)}
                  height={Math.max(0.5, high - (high > 4 ? 1 : 0))}
                >
                  <title>{`${length} tokens from position ${starts[i]}${sequences ? `, ${sequences} running` : ""}`}</title>
                </rect>
              );
            })}
          </svg>
          <figcaption>
            From position 0 to {longest.toLocaleString("en")}; where texts part, branches do. Dark ones end in a running
            sequence.
            {detail.other_branches > 0 && ` ${detail.other_branches} smaller branches are left out.`}
          </figcaption>
        </figure>
      )}
    </Panel>
  );
}

const LANE = 14;
const LANES = 32;
const SECONDS = 10;
const ACROSS_ALL = 1280;

interface Run {
  name: string;
  from: number; // seconds ago
  to: number;
  parts: { from: number; to: number; kind: string; tokens: number }[];
}

/** Sequences in lanes: each has one to itself while it runs, and another takes it over afterwards. */
function inLanes(past: Past, now: number): Run[][] {
  const runs = new Map<string, Run>();
  for (const { at, span } of past.spans) {
    const [id, sample, began, ended, kind, tokens] = span;
    const part = { from: now - at + began / 1000, to: now - at + ended / 1000, kind, tokens };
    if (part.to > SECONDS) continue;
    const key = name(id, sample);
    const run = runs.get(key) ?? { name: key, from: part.from, to: part.to, parts: [] };
    run.to = Math.min(run.to, part.to);
    run.parts.push(part);
    runs.set(key, run);
  }
  const lanes: Run[][] = [];
  for (const run of [...runs.values()].sort((a, b) => b.from - a.from)) {
    const free = lanes.find((lane) => (lane.at(-1)?.to ?? 0) > run.from);
    if (free) free.push(run);
    else lanes.push([run]);
  }
  return lanes;
}

/** When steps computed something of each sequence. */
export function Lanes({ past, now }: { past: Past; now: number }) {
  const all = inLanes(past, now);
  const lanes = all.slice(0, LANES);
  const at = (ago: number) => Math.max(0, 1 - ago / SECONDS) * ACROSS_ALL;
  const high = Math.max(4, lanes.length) * LANE;
  const count = all.reduce((sum, lane) => sum + lane.length, 0);
  return (
    <Panel title="Batch" note={`${count} sequences in the last ${SECONDS} seconds`} wide>
      <figure>
        <svg
          class="lanes"
          viewBox={`0 0 ${ACROSS_ALL} ${high + 16}`}
          role="img"
          aria-label={`${count} sequences were computed in the last ${SECONDS} seconds, ${all.length} at once at most`}
        >
          {[8, 6, 4, 2].map((ago) => (
            <line key={ago} class="rule" x1={at(ago)} x2={at(ago)} y1="0" y2={high} />
          ))}
          {lanes.flatMap((lane, row) =>
            lane.flatMap((run) =>
              run.parts.map((part, i) => (
                <rect
                  key={`${run.name} ${i}`}
                  class={part.kind}
                  x={at(part.from)}
                  y={row * LANE + 1}
                  width={Math.max(0.8, at(part.to) - at(part.from))}
                  height={LANE - 3}
                >
                  <title>{`${run.name}: ${part.kind}, ${part.tokens} tokens in ${ms(1000 * (part.from - part.to))}`}</title>
                </rect>
              )),
            ),
          )}
          {[10, 8, 6, 4, 2, 0].map((ago) => (
            <text
              key={ago}
              x={at(ago)}
              y={high + 13}
              text-anchor={ago === 0 ? "end" : ago === SECONDS ? "start" : "middle"}
            >
              {ago === 0 ? "now" : `−${ago} s`}
            </text>
          ))}
        </svg>
        <ul class="legend">
          <li class="prefill">prefill</li>
          <li class="decode">decode</li>
          {all.length > LANES && <li class="bare">{all.length - LANES} more lanes are left out</li>}
        </ul>
      </figure>
    </Panel>
  );
}

export function StepParts({ parts, steps }: { parts: Record<string, number>; steps: number }) {
  const shown = Object.entries(parts).filter(([, value]) => value > 0);
  const sum = shown.reduce((total, [, value]) => total + value, 0);
  return (
    <Panel title="A step" note={sum ? `${ms(sum)} on average, ${steps.toFixed(1)} a second` : ""}>
      {sum === 0 ? (
        <p class="hint">No step ran in the last second.</p>
      ) : (
        <Bars rows={shown.map(([label, value]) => ({ label, value, shown: ms(value) }))} />
      )}
    </Panel>
  );
}
