import { useEffect, useState } from "preact/hooks";
import { failure, read } from "./api";
import { Flow, type FlowData } from "./flow";
import { Cells, type CellsData, Chart, type ChartData } from "./pictures";
import { Player } from "./player";

interface Control {
  name: string;
  label: string;
  default: number | string | boolean;
  choices: string[];
  least: number;
  most: number;
  step: number;
  unit: string;
}

export interface Simulation {
  number: number;
  name: string;
  title: string;
  about: string;
  source: string;
  speed: number; // of a replay, 0 where nothing happens over time
  controls: Control[];
}

export interface Scene {
  figures: { label: string; shown: string; remark: string }[];
  charts: ChartData[];
  cells: CellsData[];
  tables: { title: string; columns: string[]; rows: string[][] }[];
  flows: FlowData[];
  remark: string;
}

const SOURCES: Record<string, string> = {
  calculators: "Numbers from the calculators of this server (quire calc)",
  engine: "Computed now by this server, with parts of its engine; “this server” and “this model” is the engine itself",
  simulator: "From the simulator, which runs the scheduler of this server",
};

/** One simulation: its controls, and what the server says for their values; at first `given` ones. Within a chapter
 * its heading is one of a part. */
export function Stage({
  simulation,
  given = {},
  within,
}: {
  simulation: Simulation;
  given?: Record<string, string>;
  within?: boolean;
}) {
  const [values, setValues] = useState<Record<string, string>>(() => ({
    ...Object.fromEntries(simulation.controls.map((one) => [one.name, String(one.default)])),
    ...given,
  }));
  const [scene, setScene] = useState<Scene | null>(null);
  const [problem, setProblem] = useState("");
  const [part, setPart] = useState(1); // of the time that is shown
  useEffect(() => {
    const stop = new AbortController();
    const ask = setTimeout(() => {
      read<Scene>(`/learn/api/sim/${simulation.name}?${new URLSearchParams(values)}`, stop.signal).then(
        (found) => {
          setScene(found);
          setPart(1);
          setProblem("");
        },
        (error) => stop.signal.aborted || setProblem(failure(error).message),
      );
    }, 120); // a slider that moves asks once
    return () => {
      clearTimeout(ask);
      stop.abort();
    };
  }, [values, simulation.name]);
  const set = (name: string, value: string) => setValues((before) => ({ ...before, [name]: value }));
  /** What choosing a bar of a chart does, where its bars are the choices of a control. */
  const pick = ({ kind, series }: ChartData) => {
    const names = kind === "bars" ? (series[0]?.x.map(String) ?? []) : [];
    const control = simulation.controls.find((one) => names.length > 0 && names.every((x) => one.choices.includes(x)));
    return control && ((name: string) => set(control.name, name));
  };
  return (
    <>
      {within ? <h3>{simulation.title}</h3> : <h2>{simulation.title}</h2>}
      <p>{simulation.about}</p>
      <form class="controls" onSubmit={(event) => event.preventDefault()}>
        {simulation.controls.map((one) => (
          <Field
            key={one.name}
            control={one}
            value={values[one.name] ?? ""}
            onValue={(value) => set(one.name, value)}
          />
        ))}
      </form>
      <p class="error" role="alert">
        {problem}
      </p>
      {scene && !problem && simulation.speed > 0 && <Player first={simulation.speed} part={part} onPart={setPart} />}
      {scene && !problem && <Shown scene={scene} part={part} pick={pick} />}
      <p class="source">{SOURCES[simulation.source]}</p>
    </>
  );
}

function Field({ control, value, onValue }: { control: Control; value: string; onValue: (value: string) => void }) {
  const { name, label, choices, least, most, step, unit } = control;
  if (choices.length > 0) {
    return (
      <label>
        {label}
        <select value={value} onChange={(event) => onValue(event.currentTarget.value)}>
          {choices.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
      </label>
    );
  }
  if (typeof control.default === "boolean") {
    return (
      <label class="switch">
        <input
          type="checkbox"
          checked={value === "true"}
          onChange={(event) => onValue(String(event.currentTarget.checked))}
        />
        {label}
      </label>
    );
  }
  const put = (event: { currentTarget: HTMLInputElement }) => onValue(event.currentTarget.value);
  return (
    <label>
      <span>
        {label}
        {unit && ` (${unit})`}
      </span>
      <span class="pair">
        {most <= 1000 && (
          <input type="range" min={least} max={most} step={step} value={value} aria-label={label} onInput={put} />
        )}
        <input type="number" name={name} min={least} max={most} step={step} value={value} onInput={put} />
      </span>
    </label>
  );
}

interface ShownProps {
  scene: Scene;
  part?: number;
  pick?: (chart: ChartData) => ((name: string) => void) | undefined;
}

export function Shown({ scene, part = 1, pick }: ShownProps) {
  return (
    <section aria-live="polite">
      <dl>
        {scene.figures.map((one) => (
          <div key={one.label}>
            <dt>{one.label}</dt>
            <dd>
              {one.shown} {one.remark && <small>{one.remark}</small>}
            </dd>
          </div>
        ))}
      </dl>
      {scene.remark && <p>{scene.remark}</p>}
      {scene.flows.map((one) => (
        <Flow key={one.title} data={one} part={part} />
      ))}
      {scene.cells.map((one) => (
        <Cells key={one.title} data={one} />
      ))}
      {scene.charts.map((one) => (
        <Chart key={one.title} data={one} part={part} onPick={pick?.(one)} />
      ))}
      {scene.tables.map((one) => (
        // biome-ignore lint/a11y/noNoninteractiveTabindex: a table that scrolls is reached with the keyboard
        <section key={one.title} class="wide" aria-label={one.title} tabIndex={0}>
          <table>
            <caption>{one.title}</caption>
            <thead>
              <tr>
                {one.columns.map((column) => (
                  <th key={column} scope="col">
                    {column}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {one.rows.map((row) => (
                <tr key={row[0]}>
                  {row.map((cell, i) => (
                    <td key={one.columns[i]}>{cell}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </section>
      ))}
    </section>
  );
}
