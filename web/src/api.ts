import { events } from "./sse";
import { BUILT_IN, type Call, type Tool } from "./tools";

/** A message as the chat API takes it. */
export interface ChatMessage {
  role: "system" | "user" | "assistant" | "tool";
  content: string | null;
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  tool_call_id?: string;
}

/** Sampling and output of a request; what is undefined comes from the checkpoint. */
export interface Settings {
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  max_tokens?: number;
  seed?: number;
  schema?: string;
  logprobs?: boolean;
  builtIn?: boolean; // offer the tools of the page
  tools?: string; // further ones, in JSON
  mustCall?: boolean;
}

/** A token with its chance and likely others. `drafted`: it was an accepted draft. */
export interface TokenChance {
  token: string;
  drafted: boolean;
  logprob: number;
  top: { token: string; logprob: number }[];
}

/** What an answer has brought so far. Times are in seconds. */
export interface Answer {
  id: string;
  content: string;
  reasoning: string;
  tokens: TokenChance[];
  calls: Call[];
  promptTokens: number;
  cachedTokens: number;
  outputTokens: number;
  firstToken: number;
  seconds: number;
  finish: string;
}

/** A model or an adapter that the server offers. */
export interface Model {
  id: string;
  parent: string | null;
  max_model_len: number;
  state?: string; // of a server with several models, as what follows
  memory?: number;
  borrowed?: number;
  lent?: number;
}

export class ApiFailure extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export const failure = (error: unknown) =>
  error instanceof ApiFailure ? error : new ApiFailure(0, "The server does not answer.");

const KEY = "quire.key";

export function setKey(key: string): void {
  sessionStorage.setItem(KEY, key);
}

function headers(given = ""): Record<string, string> {
  const key = given || sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function checked(response: Response): Promise<Response> {
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 300) || response.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not the API's own error
  }
  throw new ApiFailure(response.status, message);
}

/** A response of a route; with a `key` in place of the one that the page keeps. Raises ApiFailure. */
export async function open(
  path: string,
  { key = "", ...init }: RequestInit & { key?: string } = {},
): Promise<Response> {
  return checked(await fetch(path, { ...init, headers: headers(key) }));
}

/** The JSON of a route. Raises ApiFailure. */
export async function read<T>(path: string, signal: AbortSignal | null = null, key = ""): Promise<T> {
  return (await open(path, { signal, key })).json();
}

/** Where the time of a request went. */
export interface Explained {
  id: string;
  finished: boolean;
  total_ms: number;
  cause: string;
  sentence: string;
  parts: { name: string; ms: number; says: string }[];
  timeline: { start_ms: number; ms: number; part: string; detail: string }[];
  cache: { kind: string; hit_tokens: number; lost_tokens: number; differs_at: number; changes: string } | null;
}

export async function models(): Promise<Model[]> {
  return (await read<{ data: Model[] }>("/v1/models")).data;
}

/** The tools of a request. Raises SyntaxError for those that are not JSON. */
export function toolsOf(builtIn: boolean | undefined, tools: string | undefined): Tool[] {
  return [...(builtIn ? BUILT_IN : []), ...(tools ? JSON.parse(tools) : [])];
}

/** The body of a request for the next message. Raises SyntaxError for a schema or tools that are not JSON. */
export function requestBody(model: string, messages: ChatMessage[], settings: Settings): Record<string, unknown> {
  const { schema, logprobs, builtIn, tools, mustCall, ...sampling } = settings;
  const offered = toolsOf(builtIn, tools);
  // What was called has a result: the model may answer now.
  const forced = mustCall && messages.at(-1)?.role !== "tool";
  return {
    model,
    messages,
    ...sampling,
    stream: true,
    stream_options: { include_usage: true },
    ...(logprobs ? { logprobs: true, top_logprobs: 5, return_accepted_drafts: true } : {}),
    ...(offered.length > 0 ? { tools: offered, ...(forced ? { tool_choice: "required" } : {}) } : {}),
    ...(schema
      ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } }
      : {}),
  };
}

/** Ask for the next message; `changed` is called with the answer as it grows. Raises ApiFailure. */
export async function ask(
  body: Record<string, unknown>,
  signal: AbortSignal,
  changed: (answer: Answer) => void,
): Promise<Answer> {
  const began = performance.now();
  const response = await open("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const answer = empty();
  if (!response.body) return answer;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiFailure(500, chunk.error.message);
    take(answer, chunk);
    answer.seconds = (performance.now() - began) / 1000;
    if (!answer.firstToken && (answer.content || answer.reasoning || answer.calls.length > 0))
      answer.firstToken = answer.seconds;
    changed({ ...answer });
  }
  return answer;
}

export function empty(): Answer {
  return {
    id: "",
    content: "",
    reasoning: "",
    tokens: [],
    calls: [],
    promptTokens: 0,
    cachedTokens: 0,
    outputTokens: 0,
    firstToken: 0,
    seconds: 0,
    finish: "",
  };
}

/** Add a chunk of the stream to an answer. */
// biome-ignore lint/suspicious/noExplicitAny: a chunk is JSON of the server
export function take(answer: Answer, chunk: any): void {
  answer.id ||= chunk.id ?? "";
  const choice = chunk.choices?.[0];
  if (choice) {
    answer.content += choice.delta?.content ?? "";
    answer.reasoning += choice.delta?.reasoning_content ?? "";
    answer.finish = choice.finish_reason ?? answer.finish;
    for (const one of choice.logprobs?.content ?? []) {
      answer.tokens.push({ token: one.token, drafted: false, logprob: one.logprob, top: one.top_logprobs ?? [] });
    }
    for (const at of choice.accepted_drafts ?? []) {
      const token = answer.tokens[at];
      if (token) token.drafted = true;
    }
    for (const { index, id, function: part } of choice.delta?.tool_calls ?? []) {
      const before = answer.calls[index] ?? { id: "", name: "", args: "" };
      answer.calls[index] = {
        id: id ?? before.id,
        name: before.name + (part?.name ?? ""),
        args: before.args + (part?.arguments ?? ""),
      };
    }
    if (choice.delta?.content || choice.delta?.reasoning_content) answer.outputTokens += 1;
  }
  if (chunk.usage) {
    answer.promptTokens = chunk.usage.prompt_tokens;
    answer.outputTokens = chunk.usage.completion_tokens;
    answer.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
}
