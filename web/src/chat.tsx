import { useEffect, useRef, useState } from "preact/hooks";
import { Figures, Markdown, Tokens } from "./answer";
import {
  ApiFailure,
  ask,
  type ChatMessage,
  failure,
  type Model,
  models,
  requestBody,
  type Settings,
  toolsOf,
} from "./api";
import { Calls } from "./calls";
import {
  added,
  begin,
  branch,
  type Conversation,
  changed,
  lastBelow,
  load,
  messages,
  save,
  siblings,
  type Turn,
} from "./conversation";
import { Explanation } from "./explanation";
import { Problem } from "./problem";
import { Prompt } from "./prompt";
import { SettingsPanel } from "./settings";

const AGAIN_MS = 1000;

/** The chat: conversations at the side, the shown branch, what is asked next. */
export function Chat() {
  const [all, setAll] = useState<Conversation[]>(() => {
    const stored = load();
    return stored.length > 0 ? stored : [begin()];
  });
  const [shown, setShown] = useState(all[0]?.id ?? "");
  const [offered, setOffered] = useState<Model[]>([]);
  const [model, setModel] = useState("");
  const [settings, setSettings] = useState<Settings>({});
  const [problem, setProblem] = useState<ApiFailure | null>(null);
  const [running, setRunning] = useState<string | null>(null);
  const stop = useRef<AbortController | null>(null);
  const conversation = all.find((one) => one.id === shown) ?? all[0] ?? begin();

  const connect = () =>
    models().then(
      (found) => {
        setOffered(found);
        setModel((before) => (found.some((one) => one.id === before) ? before : (found[0]?.id ?? "")));
        setProblem(null);
      },
      (error) => {
        setProblem(failure(error));
        return failure(error);
      },
    );
  useEffect(() => {
    let again = 0;
    // A server that is loading is asked until it has a model.
    const run = () =>
      connect().then((failed) => {
        if (failed && failed.status !== 401) again = window.setTimeout(run, AGAIN_MS);
      });
    run();
    return () => clearTimeout(again);
  }, []);
  useEffect(() => {
    if (running === null) save(all);
  }, [all, running]);

  const update = (id: string, how: (one: Conversation) => Conversation) =>
    setAll((before) => before.map((one) => (one.id === id ? how(one) : one)));

  async function answer(from: Conversation, parent: string) {
    const { id } = from;
    const turn: Turn = { id: crypto.randomUUID(), parent, role: "assistant", content: "" };
    const control = new AbortController();
    stop.current = control;
    setRunning(turn.id);
    update(id, (one) => added(one, turn));
    const show = (fields: Partial<Turn>) => update(id, (one) => changed(one, turn.id, fields));
    try {
      const body = requestBody(model, messages(from, parent), settings);
      const whole = await ask(body, control.signal, (so) => show({ content: so.content, answer: so }));
      show({ content: whole.content, answer: whole });
    } catch (error) {
      if (error instanceof ApiFailure && error.status === 401) setProblem(error);
      if (!control.signal.aborted) show({ error: error instanceof Error ? error.message : String(error) });
    } finally {
      setRunning(null);
      stop.current = null;
    }
  }

  function say(text: string, parent: string | null) {
    const turn: Turn = { id: crypto.randomUUID(), parent, role: "user", content: text };
    const next = added(conversation, turn);
    update(conversation.id, () => next);
    answer(next, turn.id);
  }

  /** Give the results of an answer's calls, and ask on. */
  function tell(from: Turn, results: string[]) {
    let next = conversation;
    let parent = from.id;
    for (const [at, call] of (from.answer?.calls ?? []).entries()) {
      const turn: Turn = { id: crypto.randomUUID(), parent, role: "tool", content: results[at] ?? "", call: call.id };
      next = added(next, turn);
      parent = turn.id;
    }
    update(conversation.id, () => next);
    answer(next, parent);
  }

  function fresh() {
    const one = begin();
    setAll((before) => [one, ...before.filter((other) => other.leaf)]);
    setShown(one.id);
  }

  function remove(id: string) {
    const left = all.filter((one) => one.id !== id);
    setAll(left.length > 0 ? left : [begin()]);
    if (id === shown) setShown(left[0]?.id ?? "");
  }

  function keep() {
    const file = new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(file);
    link.download = `${conversation.title.replace(/\W+/g, "-") || "conversation"}.json`;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  return (
    <div class="page">
      <nav aria-label="Conversations">
        <h1>
          <img src="/ui/quire.svg" alt="" width="28" height="28" /> Quire
        </h1>
        <a href="/learn">How inference works</a>
        <a href="/dashboard">Control room</a>
        <a href="/docs">API</a>
        <button type="button" class="primary" onClick={fresh}>
          New chat
        </button>
        <ul>
          {all.map((one) => (
            <li key={one.id}>
              <button type="button" aria-current={one.id === conversation.id} onClick={() => setShown(one.id)}>
                {one.title || "New chat"}
              </button>
              <button
                type="button"
                class="quiet"
                aria-label={`Remove ${one.title || "this chat"}`}
                onClick={() => remove(one.id)}
              >
                ×
              </button>
            </li>
          ))}
        </ul>
        <details>
          <summary>Settings</summary>
          <SettingsPanel
            models={offered}
            model={model}
            system={conversation.system}
            settings={settings}
            onModel={setModel}
            onSystem={(system) => update(conversation.id, (one) => ({ ...one, system }))}
            onSettings={setSettings}
          />
        </details>
        <button type="button" class="quiet" onClick={keep} disabled={!conversation.leaf}>
          Save as a file
        </button>
      </nav>
      <main>
        {problem && <Problem problem={problem} onTry={connect} />}
        <ol class="turns" aria-live="polite" aria-busy={running !== null}>
          {branch(conversation).map((turn) => (
            <TurnView
              key={turn.id}
              turn={turn}
              places={siblings(conversation, turn)}
              running={running === turn.id}
              busy={running !== null}
              onShow={(id) => update(conversation.id, (one) => ({ ...one, leaf: lastBelow(one, id) }))}
              onAgain={() => turn.parent && answer(conversation, turn.parent)}
              onEdit={(text) => say(text, turn.parent)}
              onResults={turn.id === conversation.leaf ? (results) => tell(turn, results) : null}
              read={() => messages(conversation, turn.parent)}
              model={model}
              settings={settings}
            />
          ))}
        </ol>
        {!conversation.leaf && !problem && <Welcome model={model} onAsk={(text) => say(text, null)} />}
        <Composer
          busy={running !== null}
          ready={model !== ""}
          onSay={(text) => say(text, conversation.leaf)}
          onStop={() => stop.current?.abort()}
        />
      </main>
    </div>
  );
}

const EXAMPLES = [
  "What is TTFT?",
  "What can you do?",
  "What does the KV cache do?",
  "Write a short poem about the sea.",
];

function Welcome({ model, onAsk }: { model: string; onAsk: (text: string) => void }) {
  return (
    <section class="welcome">
      <h2>{model || "…"}</h2>
      <p>Everything stays on this server: the page loads nothing from elsewhere.</p>
      <p>
        {EXAMPLES.map((text) => (
          <button type="button" key={text} onClick={() => onAsk(text)} disabled={!model}>
            {text}
          </button>
        ))}
      </p>
    </section>
  );
}

interface TurnProps {
  turn: Turn;
  places: Turn[];
  running: boolean;
  busy: boolean;
  onShow: (id: string) => void;
  onAgain: () => void;
  onEdit: (text: string) => void;
  onResults: ((results: string[]) => void) | null; // of the last turn
  read: () => ChatMessage[];
  model: string;
  settings: Settings;
}

function TurnView(props: TurnProps) {
  const { turn, places, running, busy, onShow, onAgain, onEdit, onResults, read, model, settings } = props;
  const [draft, setDraft] = useState<string | null>(null);
  const [chances, setChances] = useState(false);
  const [why, setWhy] = useState(false);
  const [prompt, setPrompt] = useState(false);
  const at = places.findIndex((one) => one.id === turn.id);
  const { answer } = turn;
  if (draft !== null) {
    return (
      <li class="turn user">
        <form
          class="edit"
          onSubmit={(event) => {
            event.preventDefault();
            setDraft(null);
            onEdit(draft);
          }}
        >
          <textarea
            aria-label="Your message"
            rows={3}
            value={draft}
            onInput={(event) => setDraft(event.currentTarget.value)}
          />
          <button type="submit" class="primary" disabled={!draft.trim()}>
            Send
          </button>
          <button type="button" onClick={() => setDraft(null)}>
            Cancel
          </button>
        </form>
      </li>
    );
  }
  return (
    <li class={`turn ${turn.role}`}>
      {answer?.reasoning && (
        <details class="reasoning" open={running && !turn.content}>
          <summary>Reasoning</summary>
          <Markdown text={answer.reasoning} />
        </details>
      )}
      {turn.role !== "assistant" ? (
        <p class="said">{turn.content}</p>
      ) : chances && answer ? (
        <Tokens tokens={answer.tokens} />
      ) : (
        <Markdown text={turn.content} />
      )}
      {running && !turn.content && <span class="waiting">…</span>}
      {answer && answer.calls.length > 0 && (
        <Calls calls={answer.calls} onResults={running || busy ? null : onResults} />
      )}
      {turn.error && (
        <p class="error" role="alert">
          {turn.error}
        </p>
      )}
      {answer && <Figures answer={answer} running={running} />}
      <div class="tools">
        {places.length > 1 && (
          <span class="places">
            <button
              type="button"
              aria-label="The one before"
              disabled={at === 0 || busy}
              onClick={() => onShow(places[at - 1]?.id ?? turn.id)}
            >
              ‹
            </button>
            {at + 1} of {places.length}
            <button
              type="button"
              aria-label="The next one"
              disabled={at === places.length - 1 || busy}
              onClick={() => onShow(places[at + 1]?.id ?? turn.id)}
            >
              ›
            </button>
          </span>
        )}
        {turn.role === "assistant" && !busy && (
          <button type="button" onClick={onAgain}>
            Again
          </button>
        )}
        {turn.role === "user" && !busy && (
          <button type="button" onClick={() => setDraft(turn.content)}>
            Edit
          </button>
        )}
        {!running && turn.content && (
          <button type="button" onClick={() => navigator.clipboard.writeText(turn.content)}>
            Copy
          </button>
        )}
        {answer && answer.tokens.length > 0 && !running && (
          <button type="button" aria-pressed={chances} onClick={() => setChances(!chances)}>
            Chances
          </button>
        )}
        {answer && answer.promptTokens > 0 && !running && (
          <button type="button" aria-expanded={prompt} onClick={() => setPrompt(!prompt)}>
            Prompt
          </button>
        )}
        {answer?.id && !running && (
          <button type="button" aria-expanded={why} onClick={() => setWhy(!why)}>
            Why so long?
          </button>
        )}
      </div>
      {prompt && answer && (
        <Prompt model={model} messages={read()} tools={safely(settings)} cached={answer.cachedTokens} />
      )}
      {why && answer && <Explanation id={answer.id} />}
    </li>
  );
}

/** The tools that are set now; none while they are not JSON. */
function safely({ builtIn, tools }: Settings) {
  try {
    return toolsOf(builtIn, tools);
  } catch {
    return [];
  }
}

interface ComposerProps {
  busy: boolean;
  ready: boolean;
  onSay: (text: string) => void;
  onStop: () => void;
}

function Composer({ busy, ready, onSay, onStop }: ComposerProps) {
  const [text, setText] = useState("");
  const send = () => {
    if (!text.trim() || busy || !ready) return;
    onSay(text.trim());
    setText("");
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <textarea
        aria-label="Message"
        placeholder="Message: Enter sends, Shift+Enter begins a line"
        rows={Math.min(8, text.split("\n").length)}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            send();
          } else if (event.key === "Escape" && busy) {
            onStop();
          }
        }}
      />
      {busy ? (
        <button type="button" class="primary" onClick={onStop}>
          Stop
        </button>
      ) : (
        <button type="submit" class="primary" disabled={!text.trim() || !ready}>
          Send
        </button>
      )}
    </form>
  );
}
