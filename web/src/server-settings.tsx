import { useState } from "preact/hooks";
import { failure, open, read } from "./api";
import { ms, Panel } from "./panel";

type Value = number | string | string[] | Record<string, number>;
type Config = Record<string, Value>;

interface Change {
  dry_run: boolean;
  changed: Config;
  config: Config;
  effect: Record<"before" | "after", Record<string, number> | null>;
}

/** A value as a field shows it, and back: lists are separated by blanks, maps are JSON. */
const written = (value: Value) =>
  Array.isArray(value) ? value.join(" ") : typeof value === "object" ? JSON.stringify(value) : String(value);

function parsed(text: string, like: Value): Value {
  if (Array.isArray(like)) return text.split(/\s+/).filter(Boolean);
  return typeof like === "string" ? text : JSON.parse(text);
}

/**
 * What an administrator may change while the server runs. The key stays in its field until something is changed, and
 * nowhere else: each change needs it again.
 */
export function Settings({ model }: { model: string }) {
  const [key, setKey] = useState("");
  const [config, setConfig] = useState<Config | null>(null);
  const [texts, setTexts] = useState<Record<string, string>>({});
  const [said, say] = useState("");
  const [effect, setEffect] = useState<Change["effect"] | null>(null);
  const of = model ? `model=${encodeURIComponent(model)}` : "";

  const show = (found: Config) => {
    setConfig(found);
    setTexts(Object.fromEntries(Object.entries(found).map(([name, value]) => [name, written(value)])));
  };
  const failed = (error: unknown) => say(error instanceof SyntaxError ? "A number is wrong." : failure(error).message);
  const get = () =>
    read<{ config: Config }>(`/admin/config?${of}`, null, key).then(({ config: found }) => {
      show(found);
      setEffect(null);
      say("");
    }, failed);

  async function change(dry: boolean) {
    if (!config) return;
    try {
      const changes = Object.fromEntries(
        Object.entries(config)
          .filter(([name, value]) => texts[name] !== written(value))
          .map(([name, value]) => [name, parsed(texts[name] ?? "", value)]),
      );
      if (Object.keys(changes).length === 0) return say("Nothing was changed.");
      const query = [dry ? "dry_run=true" : "", of].filter(Boolean).join("&");
      const body = JSON.stringify(changes);
      const made: Change = await (await open(`/admin/config?${query}`, { method: "PATCH", body, key })).json();
      setEffect(made.effect);
      const names = Object.entries(made.changed).map(([name, value]) => `${name} = ${written(value)}`);
      say(`${dry ? "Would change" : "Changed"}: ${names.join(", ") || "nothing"}`);
      if (!dry) {
        show(made.config);
        setKey("");
      }
    } catch (error) {
      failed(error);
    }
  }

  const act = (path: string, done: string) =>
    open(`${path}${path.includes("?") ? "&" : "?"}${of}`, { method: "POST", key }).then(() => {
      say(done);
      setKey("");
    }, failed);

  return (
    <Panel title="Settings" note="for administrators" wide>
      <form class="admin" onSubmit={(event) => event.preventDefault()}>
        <label>
          Administrator's key
          <input
            type="password"
            value={key}
            autocomplete="off"
            onInput={(event) => setKey(event.currentTarget.value)}
          />
        </label>
        <button type="button" onClick={get} disabled={!key}>
          Read
        </button>
        <button type="button" onClick={() => act("/reset_prefix_cache", "The cache is empty.")} disabled={!key}>
          Empty the prefix cache
        </button>
        <button type="button" onClick={() => act("/sleep?level=1", "The model sleeps.")} disabled={!key}>
          Sleep
        </button>
        <button type="button" onClick={() => act("/wake_up", "The model is awake.")} disabled={!key}>
          Wake
        </button>
      </form>
      {config && (
        <form class="fields" onSubmit={(event) => event.preventDefault()}>
          {Object.keys(config).map((name) => (
            <label key={name}>
              <code>{name}</code>
              <input
                class={texts[name] === written(config[name] ?? "") ? "" : "touched"}
                value={texts[name]}
                onInput={(event) => setTexts({ ...texts, [name]: event.currentTarget.value })}
              />
            </label>
          ))}
          <p>
            <button type="button" onClick={() => change(true)} disabled={!key}>
              Try
            </button>{" "}
            <button type="button" class="primary" onClick={() => change(false)} disabled={!key}>
              Change
            </button>
          </p>
        </form>
      )}
      <output>{said}</output>
      {effect?.before && effect.after && (
        <ul class="legend">
          {Object.entries(effect.after).map(([name, seconds]) => (
            <li key={name} class="bare">
              {name.replaceAll("_", " ")}: {ms(1000 * (effect.before?.[name] ?? 0))} → {ms(1000 * seconds)}
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}
