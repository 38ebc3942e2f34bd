import { useEffect, useRef, useState } from "preact/hooks";
import { failure, read } from "./api";
import { Block, Blocks, Inline, type Node, Rows, sources } from "./blocks";
import { Fence } from "./fence";
import { Quiz } from "./quiz";
import { type Scene, Shown, type Simulation, Stage } from "./simulations";

export interface ChapterInfo {
  number: number | null;
  name: string;
  title: string;
  about: string;
}

/** A block of a chapter: plain Markdown, or what a directive stands for. */
interface Special extends Node {
  name?: string;
  values?: Record<string, string>;
  run?: string;
  blocks?: Node[];
  answer?: Node[];
  figures?: { place: string; printed: string; note: string; right: { text: string; source: string } }[];
}

interface Body extends ChapterInfo {
  blocks: Special[];
  given: Record<string, string>;
  listings: Record<string, { about: string; source: string; output: string }>;
  sights: Record<string, { title: string; about: string }>;
}

/** A chapter: its text with its simulations and exercises, its question, and where its numbers come from. */
export function Chapter({
  info,
  before,
  after,
  simulations,
}: {
  info: ChapterInfo;
  before: ChapterInfo | undefined;
  after: ChapterInfo | undefined;
  simulations: Simulation[];
}) {
  const [body, setBody] = useState<Body | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    read<Body>(`/learn/api/chapters/${info.name}`).then(setBody, (error) => setProblem(failure(error).message));
  }, [info.name]);
  return (
    <article>
      <h2>{info.title}</h2>
      <p class="about">{info.about}</p>
      {problem && (
        <p class="error" role="alert">
          {problem}
        </p>
      )}
      {body?.blocks.map((block, at) => (
        <Fence key={at} name={block.name ?? "A part"}>
          <Piece block={block} body={body} simulations={simulations} />
        </Fence>
      ))}
      {body && info.number !== null && <Quiz chapter={info.number} />}
      {body && <Origins body={body} />}
      <p class="steps">
        {before && <a href={`#${before.name}`}>← {before.title}</a>}
        {after && <a href={`#${after.name}`}>{after.title} →</a>}
      </p>
    </article>
  );
}

function Piece({ block, body, simulations }: { block: Special; body: Body; simulations: Simulation[] }) {
  const { kind, name = "", blocks = [], answer = [] } = block;
  if (kind === "simulation") {
    const found = simulations.find((one) => one.name === name);
    return found ? <Later simulation={found} given={block.values ?? {}} /> : null;
  }
  const listing = kind === "listing" && body.listings[name];
  if (listing) return <ListingBox name={name} {...listing} />;
  const sight = kind === "see" && body.sights[name];
  if (sight) return <Sight name={name} {...sight} />;
  if (kind === "worked") {
    const rows = (block.figures ?? []).map(({ place, printed, right, note }) => [
      place,
      printed,
      <span key={place} class="number" title={right.source}>
        {right.text}
      </span>,
      note,
    ]);
    return <Rows label="Published figures" heads={["Figure", "Printed", "Computed", "Why"]} rows={rows} />;
  }
  if (kind === "note")
    return (
      <aside class="note">
        <Blocks nodes={blocks} />
      </aside>
    );
  if (kind === "rubric")
    return (
      <section class="rubric">
        <h3>After this chapter you can</h3>
        <Blocks nodes={blocks} />
      </section>
    );
  if (kind === "exercise")
    return (
      <section class="exercise">
        <h3>
          Exercise <small>{block.level}</small>
        </h3>
        <Blocks nodes={blocks} />
        <details>
          <summary>Answer</summary>
          <Blocks nodes={answer} />
        </details>
      </section>
    );
  if (kind === "question")
    return (
      <details class="exercise">
        <summary>
          <Inline nodes={block.inline} />
        </summary>
        <Blocks nodes={answer} />
        <p class="source">
          Shown by <code>{block.run}</code>
        </p>
      </details>
    );
  return <Block node={block} />;
}

/** A simulation that starts when it comes into view. */
function Later({ simulation, given }: { simulation: Simulation; given: Record<string, string> }) {
  const [seen, see] = useState(false);
  const place = useRef<HTMLElement>(null);
  useEffect(() => {
    const watch = new IntersectionObserver(
      (entries) => {
        if (entries.some((one) => one.isIntersecting)) see(true);
      },
      { rootMargin: "300px" },
    );
    if (place.current) watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  return (
    <section class="simulation" ref={place} aria-label={`Simulation: ${simulation.title}`}>
      {seen ? <Stage simulation={simulation} given={given} within /> : <h3>{simulation.title}</h3>}
    </section>
  );
}

function ListingBox({ name, about, source, output }: { name: string; about: string; source: string; output: string }) {
  return (
    <details class="listing">
      <summary>
        Listing: {about} <code>quire learn run {name}</code>
      </summary>
      <Block node={{ kind: "fence", text: source }} />
      <p>prints</p>
      <Block node={{ kind: "fence", text: output }} />
    </details>
  );
}

/** Something that the engine of this server shows, when asked. */
function Sight({ name, title, about }: { name: string; title: string; about: string }) {
  const [scene, setScene] = useState<Scene | null>(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const run = () => {
    setBusy(true);
    setProblem("");
    read<Scene>(`/learn/api/see/${name}`)
      .then(setScene, (error) => setProblem(failure(error).message))
      .finally(() => setBusy(false));
  };
  return (
    <section class="simulation" aria-label={`See it in the engine: ${title}`}>
      <h3>
        {title} <small>see it in the engine</small>
      </h3>
      <p>{about}</p>
      <button type="button" onClick={run} disabled={busy}>
        {busy ? "Running …" : "Run it on this server"}
      </button>
      <p class="error" role="alert">
        {problem}
      </p>
      {scene && !problem && <Shown scene={scene} />}
    </section>
  );
}

function Origins({ body }: { body: Body }) {
  const given = Object.entries(body.given);
  const computed = [...sources(body.blocks)];
  return (
    <details class="listing">
      <summary>Where the numbers come from</summary>
      <Rows
        label="Sources of numbers"
        heads={["Number", "From"]}
        rows={[
          ...computed.map(([source, text]) => [text, <code key={source}>{source}</code>]),
          ...given.map(([text, source]) => [text, `given: ${source}`]),
        ]}
      />
    </details>
  );
}
