import type { Answer, ChatMessage } from "./api";

/** A message in a tree: one that was edited or asked again has siblings. */
export interface Turn {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  call?: string; // whose result it is, for a tool
  answer?: Answer;
  error?: string;
}

/** A conversation: its turns, and the last one of the branch that is shown. */
export interface Conversation {
  id: string;
  title: string;
  system: string;
  turns: Record<string, Turn>;
  leaf: string | null;
}

export function begin(): Conversation {
  return { id: crypto.randomUUID(), title: "", system: "", turns: {}, leaf: null };
}

/** The turns from the first to `leaf`. */
export function branch(conversation: Conversation, leaf = conversation.leaf): Turn[] {
  const found: Turn[] = [];
  for (let id = leaf; id; ) {
    const turn: Turn | undefined = conversation.turns[id];
    if (!turn) break;
    found.unshift(turn);
    id = turn.parent;
  }
  return found;
}

/** The turns that stand in the same place, in the order they were made. */
export function siblings(conversation: Conversation, turn: Turn): Turn[] {
  return Object.values(conversation.turns).filter((one) => one.parent === turn.parent && one.role === turn.role);
}

/** The newest turn below `id`, along the newest of each branching. */
export function lastBelow(conversation: Conversation, id: string): string {
  const next = Object.values(conversation.turns).filter((one) => one.parent === id);
  const newest = next[next.length - 1];
  return newest ? lastBelow(conversation, newest.id) : id;
}

/** The conversation with a further turn, which is shown. */
export function added(conversation: Conversation, turn: Turn): Conversation {
  const title = conversation.title || turn.content.slice(0, 60);
  return { ...conversation, title, turns: { ...conversation.turns, [turn.id]: turn }, leaf: turn.id };
}

/** The conversation with fields of a turn changed. */
export function changed(conversation: Conversation, id: string, fields: Partial<Turn>): Conversation {
  const turn = conversation.turns[id];
  return turn ? { ...conversation, turns: { ...conversation.turns, [id]: { ...turn, ...fields } } } : conversation;
}

/** The messages of a request that continues behind `leaf`. */
export function messages(conversation: Conversation, leaf: string | null): ChatMessage[] {
  const said = branch(conversation, leaf).map(({ role, content, call, answer }): ChatMessage => {
    const calls = answer?.calls ?? [];
    if (role === "tool") return { role, content, tool_call_id: call ?? "" };
    if (calls.length === 0) return { role, content };
    const made = calls.map(({ id, name, args }) => ({
      id,
      type: "function" as const,
      function: { name, arguments: args },
    }));
    return { role, content: content || null, tool_calls: made };
  });
  return conversation.system ? [{ role: "system", content: conversation.system }, ...said] : said;
}

const STORED = "quire.conversations";
const KEPT = 50;

export function load(): Conversation[] {
  try {
    return JSON.parse(localStorage.getItem(STORED) ?? "[]");
  } catch {
    return [];
  }
}

/** Keep the newest conversations; without their token chances where the browser has no room. */
export function save(conversations: Conversation[]): void {
  const kept = conversations.filter((one) => one.leaf).slice(0, KEPT);
  const slim = (key: string, value: unknown) => (key === "tokens" ? [] : value);
  for (const text of [() => JSON.stringify(kept), () => JSON.stringify(kept.slice(0, 10), slim)]) {
    try {
      localStorage.setItem(STORED, text());
      return;
    } catch {
      // full: try the shorter one
    }
  }
}
