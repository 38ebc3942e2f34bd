import { useEffect, useState } from "preact/hooks";
import { type ApiFailure, failure, read } from "./api";
import { Cells, type CellsData, Chart, type ChartData } from "./pictures";
import { Problem } from "./problem";
import { Quiz } from "./quiz";

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

interface Simulation {
  number: number;
  name: string;
  title: string;
  about: string;
  source: string;
  controls: Control[];
}

interface Scene {
  figures: { label: string; shown: string; remark: string }[];
  charts: ChartData[];
  cells: CellsData[];
  tables: { title: string; columns: string[]; rows: string[][] }[];
  remark: string;
}

const SOURCES: Record<string, string> = {
  calculators: "Numbers from the calculators of this server (quire calc)",
  engine: "Computed now by this server, with parts of its engine",
  simulator: "From the simulator, which runs the scheduler of this server",
};

/** All simulations, one at a time; the one that is shown stands behind the # of the address. */
export function Lesson() {
  const [all, setAll] = useState<Simulation[]>([]);
  const [name, setName] = useState(location.hash.slice(1));
  const [problem, setProblem] = useState<ApiFailure | null>(null);
  const connect = () =>
    read<{ data: Simulation[] }>("/learn/api/sims").then(
      ({ data }) => {
        setAll(data);
        setProblem(null);
      },
      (error) => setProblem(failure(error)),
    );
  useEffect(() => {
    connect();
    const move = () => setName(location.hash.slice(1));
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  const quiz = name === "quiz";
  const shown = quiz ? undefined : (all.find((one) => one.name === name) ?? all[0]);
  return (
    <div class="page">
      <nav aria-label="Simulations">
        <h1>
          <img src="/ui/quire.svg" alt="" width="28" height="28" /> Quire
        </h1>
        <a href="/">Chat</a>
        <a href="/dashboard">Control room</a>
        <ul>
          {all.map((one) => (
            <li key={one.name}>
              <a href={`#${one.name}`} aria-current={one === shown ? "page" : undefined}>
                {one.number}. {one.title}
              </a>
            </li>
          ))}
          <li>
            <a href="#quiz" aria-current={quiz ? "page" : undefined}>
              Quiz
            </a>
          </li>
        </ul>
      </nav>
      <main class="lesson">
        {problem && <Problem problem={problem} onTry={connect} />}
        {quiz ? <Quiz /> : shown && <Stage key={shown.name} simulation={shown} />}
      </main>
    </div>
  );
}

/** One simulation: its controls, and what the server says for their values. */
function Stage({ simulation }: { simulation: Simulation }) {
  const [values, setValues] = useState<Record<string, string>>(() =>
    Object.fromEntries(simulation.controls.map((one) => [one.name, String(one.default)])),
  );
  const [scene, setScene] = useState<Scene | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    const ask = setTimeout(() => {
      read<Scene>(`/learn/api/sim/${simulation.name}?${new URLSearchParams(values)}`, stop.signal).then(
        (found) => {
          setScene(found);
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
  return (
    <>
      <h2>{simulation.title}</h2>
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
      {scene && !problem && <Shown scene={scene} />}
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

function Shown({ scene }: { scene: Scene }) {
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
      {scene.cells.map((one) => (
        <Cells key={one.title} data={one} />
      ))}
      {scene.charts.map((one) => (
        <Chart key={one.title} data={one} />
      ))}
      {scene.tables.map((one) => (
        <div key={one.title} class="wide">
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
        </div>
      ))}
    </section>
  );
}
