import { useEffect, useState } from "preact/hooks";
import { type ApiFailure, failure, type Model, models } from "./api";
import { Blocks, Lanes, Prefixes, StepParts } from "./engine-pictures";
import { type Moment, type Past, remember, watch } from "./live";
import { Models } from "./models";
import { Problem } from "./problem";
import { Requests, Slowest } from "./requests";
import { Settings } from "./server-settings";
import { Adapters, Classes, Memory } from "./tables";
import { Tiles } from "./tiles";

const EMPTY: Past = { moments: [], spans: [] };
const AGAIN_MS = 3000;

/** The control room: what the server does, second by second. */
export function ControlRoom() {
  const [offered, setOffered] = useState<Model[]>([]);
  const [model, setModel] = useState("");
  const [past, setPast] = useState<Past>(EMPTY);
  const [problem, setProblem] = useState<ApiFailure | null>(null);
  const [tries, setTries] = useState(0);

  useEffect(() => {
    let stop = new AbortController();
    let again = 0;
    const run = () => {
      if (document.hidden) return;
      stop = new AbortController();
      models().then(setOffered, () => {}); // the stream says what is wrong
      watch(model, stop.signal, (moment: Moment) => {
        setProblem(null);
        setPast((before) => remember(before, moment));
      }).then(
        () => later(),
        (error) => {
          if (stop.signal.aborted) return;
          const failed = failure(error);
          setProblem(failed);
          if (failed.status !== 401) later();
        },
      );
    };
    const later = () => {
      if (!stop.signal.aborted) again = window.setTimeout(run, AGAIN_MS);
    };
    const shown = () => {
      stop.abort(); // a hidden page costs nothing
      clearTimeout(again);
      run();
    };
    setPast(EMPTY);
    run();
    document.addEventListener("visibilitychange", shown);
    return () => {
      stop.abort();
      clearTimeout(again);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [model, tries]); // another try asks again

  const now = past.moments.at(-1);
  const bases = offered.filter((one) => !one.parent);
  return (
    <>
      <header>
        <h1>
          <img src="/ui/quire.svg" alt="" width="28" height="28" /> Control room
        </h1>
        <nav aria-label="Pages">
          <a href="/">Chat</a>
          <a href="/learn">Lesson</a>
        </nav>
        {bases.length > 1 && (
          <label>
            Model{" "}
            <select value={model || bases[0]?.id} onChange={(event) => setModel(event.currentTarget.value)}>
              {bases.map((one) => (
                <option key={one.id}>{one.id}</option>
              ))}
            </select>
          </label>
        )}
        {now && (
          <output class={`state ${problem ? "lost" : now.overview.state}`}>
            {problem ? "no connection" : now.overview.state}
            {now.overview.degraded.length > 0 && `, degraded: ${now.overview.degraded.join(", ")}`}
          </output>
        )}
      </header>
      <main>
        {problem && <Problem problem={problem} onTry={() => setTries((before) => before + 1)} />}
        {now && <Room now={now} past={past} models={offered} model={model} />}
      </main>
    </>
  );
}

function Room({ now, past, models, model }: { now: Moment; past: Past; models: Model[]; model: string }) {
  const { overview, detail } = now;
  return (
    <>
      <Tiles past={past} />
      <Requests rows={now.requests} />
      {detail && <Lanes past={past} now={overview.time} />}
      {!detail && (
        <p class="hint wide">Blocks, prefixes and lanes of all clients are shown to an administrator's key.</p>
      )}
      <div class="column">
        {detail && <Blocks detail={detail} cache={overview.cache} />}
        <StepParts parts={overview.step_ms} steps={overview.rates.steps ?? 0} />
        <Classes rows={overview.classes} />
        <Models all={models} />
        <Adapters rows={overview.adapters} />
      </div>
      <div class="column">
        {detail && <Prefixes detail={detail} />}
        <Slowest rows={now.slowest} />
        <Memory planned={overview.memory} />
      </div>
      <Settings model={model} />
    </>
  );
}
