import { open } from "./api";
import { events } from "./sse";

/** What GET /v1/overview says; see the server's watched_engine. */
export interface Overview {
  time: number;
  seconds: number;
  model: string;
  state: string;
  running: number;
  waiting: number;
  waiting_tokens: number;
  rates: Record<string, number>;
  busy: number;
  step_ms: Record<string, number>;
  request_ms: Record<string, number>;
  preemptions: number;
  limits: Record<string, number>;
  cache: {
    blocks: number;
    used: number;
    cached: number;
    pinned: number;
    block_tokens: number;
    empty_tokens: number;
    hit_share: number | null;
  };
  drafts: { drafted: number; accepted: number; seconds_won: number };
  classes: { name: string; levels: Record<string, number>; goodput: number; kept: number; missed: number }[];
  adapters: { name: string; rank: number; loads: number; evictions: number }[];
  degraded: string[];
  memory: Record<string, number>;
  resident: number;
}

/** A request, its sample, prompt tokens, computed tokens, tokens, cached tokens, blocks. */
export type RunningSequence = [string, number, number, number, number, number, number];
/** The branch before, tokens, sequences that end here. */
export type Branch = [number, number, number];
/** A request, its sample, milliseconds before now, what was done, tokens. */
export type Span = [string, number, number, number, "prefill" | "decode", number];

export interface Detail {
  stride: number;
  blocks: number[];
  sequences: RunningSequence[];
  branches: Branch[];
  other_branches: number;
  spans: Span[];
}

export interface RequestRow {
  id: string;
  model: string;
  status: string;
  service_class: string | null;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  max_tokens: number | null;
  age: number;
  queued: number;
  ttft: number | null;
  tenant: string | null;
}

export interface Moment {
  overview: Overview;
  detail: Detail | null;
  requests: RequestRow[];
  slowest: { id: string; ended: number; ms: number }[];
}

const HELD = 60; // seconds that charts show
const LANE_SECONDS = 12;

/** What was seen lately: bounded, so that a page may stay open. */
export interface Past {
  moments: Moment[];
  spans: { at: number; span: Span }[];
}

export function remember(past: Past, moment: Moment): Past {
  const { time } = moment.overview;
  const fresh = (moment.detail?.spans ?? []).map((span) => ({ at: time, span }));
  // Only the newest moment needs what the engine holds.
  const bare = past.moments.map((one) => (one.detail ? { ...one, detail: null, requests: [], slowest: [] } : one));
  return {
    moments: [...bare, moment].slice(-HELD),
    spans: [...past.spans, ...fresh].filter((one) => time - one.at < LANE_SECONDS).slice(-4000),
  };
}

/** Tell of every second until the signal; while the page is hidden nothing is asked. Raises ApiFailure. */
export async function watch(model: string, signal: AbortSignal, seen: (moment: Moment) => void): Promise<void> {
  const query = new URLSearchParams({ stream: "true", ...(model ? { model } : {}) });
  const response = await open(`/v1/overview?${query}`, { signal });
  if (!response.body) return;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    seen(JSON.parse(data));
  }
}
