import type { Overview, Past } from "./live";
import { ms, percent } from "./panel";
import { brief } from "./pictures";

interface Figure {
  label: string;
  about: string;
  value: (overview: Overview) => number | null;
  shown: (value: number) => string;
}

const per = (name: string) => (overview: Overview) => overview.rates[name] ?? 0;
const mean = (name: string) => (overview: Overview) => overview.request_ms[name] ?? null;
const count = (value: number) => brief(value);

const FIGURES: Figure[] = [
  { label: "Output", about: "tokens/s", value: per("output_tokens"), shown: count },
  { label: "Prompts", about: "tokens/s computed", value: per("prompt_tokens"), shown: count },
  { label: "Running", about: "sequences", value: (overview) => overview.running, shown: count },
  { label: "Waiting", about: "sequences", value: (overview) => overview.waiting, shown: count },
  { label: "First token", about: "TTFT, mean", value: mean("ttft"), shown: ms },
  { label: "Between tokens", about: "ITL, mean", value: mean("itl"), shown: ms },
  {
    label: "Step",
    about: "mean",
    value: ({ step_ms, rates }) => (rates.steps ? Object.values(step_ms).reduce((sum, one) => sum + one, 0) : null),
    shown: ms,
  },
  { label: "Busy", about: "time in steps", value: (overview) => overview.busy, shown: percent },
  {
    label: "KV held",
    about: "of all blocks",
    value: ({ cache }) => (cache.blocks ? cache.used / cache.blocks : null),
    shown: percent,
  },
  { label: "Cache hits", about: "of prompt tokens", value: ({ cache }) => cache.hit_share, shown: percent },
  {
    label: "Drafts right",
    about: "of those run",
    value: ({ drafts }) => (drafts.drafted ? drafts.accepted / drafts.drafted : null),
    shown: percent,
  },
  { label: "Requests", about: "ended, per second", value: per("requests"), shown: count },
];

/** The figures of this second, each with its last minutes. */
export function Tiles({ past }: { past: Past }) {
  return (
    <ul class="tiles">
      {FIGURES.map((figure) => {
        const values = past.moments.map(({ overview }) => (overview.seconds ? figure.value(overview) : null));
        const now = values.at(-1) ?? null;
        return (
          <li key={figure.label}>
            <span class="label">{figure.label}</span>
            <strong>{now === null ? "–" : figure.shown(now)}</strong> <small>{figure.about}</small>
            <Spark values={values} />
          </li>
        );
      })}
    </ul>
  );
}

const ACROSS = 60;

function Spark({ values }: { values: (number | null)[] }) {
  const top = Math.max(...values.map((one) => one ?? 0)) || 1;
  const from = ACROSS - values.length;
  // A second without a value is a gap.
  const path = values
    .map((value, i) => {
      if (value === null) return "";
      const joined = i > 0 && values[i - 1] !== null;
      return `${joined ? "L" : "M"}${from + i} ${(23 - (22 * value) / top).toFixed(1)}${joined ? "" : "h.5"}`;
    })
    .join("");
  return (
    <svg class="spark" viewBox={`0 0 ${ACROSS} 24`} preserveAspectRatio="none" aria-hidden="true">
      <path d={path} />
    </svg>
  );
}
