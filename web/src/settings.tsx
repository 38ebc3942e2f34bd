import type { Model, Settings } from "./api";

interface Props {
  models: Model[];
  model: string;
  system: string;
  settings: Settings;
  onModel: (id: string) => void;
  onSystem: (text: string) => void;
  onSettings: (settings: Settings) => void;
}

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 5, step: 0.1, about: "0 takes the likeliest token" },
  {
    name: "top_p",
    label: "Top-p",
    min: 0.01,
    max: 1,
    step: 0.01,
    about: "tokens that reach this probability together",
  },
  { name: "top_k", label: "Top-k", min: 0, max: 1000, step: 1, about: "the likeliest tokens; 0 is all" },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, about: "this part of the likeliest token's chance" },
  { name: "max_tokens", label: "Most tokens", min: 1, max: 1_000_000, step: 1, about: "the answer is cut there" },
  { name: "seed", label: "Seed", min: 0, max: 2 ** 31, step: 1, about: "the same answer again" },
] as const;

const SWITCHES = [
  { name: "builtIn", label: "Offer a clock, dice and a calculator" },
  { name: "mustCall", label: "It must call a tool" },
  { name: "logprobs", label: "Show the chance of each token" },
] as const;

/** The model, the system prompt, and how tokens are drawn. Empty fields leave it to the model. */
export function SettingsPanel({ models, model, system, settings, onModel, onSystem, onSettings }: Props) {
  const set = (name: keyof Settings, value: number | string | boolean | undefined) => {
    const { [name]: _, ...rest } = settings;
    onSettings(value === undefined ? rest : { ...rest, [name]: value });
  };
  return (
    <form class="settings" onSubmit={(event) => event.preventDefault()}>
      <label>
        Model
        <select value={model} onChange={(event) => onModel(event.currentTarget.value)}>
          {models.map((one) => (
            <option key={one.id} value={one.id}>
              {one.parent ? `${one.id} (adapter)` : one.id}
            </option>
          ))}
        </select>
      </label>
      <label>
        System prompt
        <textarea rows={3} value={system} onInput={(event) => onSystem(event.currentTarget.value)} />
      </label>
      {NUMBERS.map(({ name, label, about, ...bounds }) => (
        <label key={name}>
          {label}
          <input
            type="number"
            {...bounds}
            placeholder="the model's own"
            title={about}
            value={settings[name] ?? ""}
            onInput={(event) => {
              const field = event.currentTarget;
              if (field.validity.valid) set(name, field.value === "" ? undefined : field.valueAsNumber);
            }}
          />
        </label>
      ))}
      <label>
        JSON schema of the answer
        <textarea
          rows={3}
          spellcheck={false}
          placeholder="none: the answer is free"
          value={settings.schema ?? ""}
          onInput={(event) => set("schema", event.currentTarget.value || undefined)}
        />
      </label>
      <label>
        Tools, as in the API
        <textarea
          rows={3}
          spellcheck={false}
          placeholder='[{"type": "function", …}]: their results are yours to write'
          value={settings.tools ?? ""}
          onInput={(event) => set("tools", event.currentTarget.value || undefined)}
        />
      </label>
      {SWITCHES.map(({ name, label }) => (
        <label class="switch" key={name}>
          <input
            type="checkbox"
            checked={settings[name] ?? false}
            onChange={(event) => set(name, event.currentTarget.checked || undefined)}
          />
          {label}
        </label>
      ))}
    </form>
  );
}
