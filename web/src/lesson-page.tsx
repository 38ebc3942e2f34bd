import { useEffect, useRef, useState } from "preact/hooks";
import { type ApiFailure, failure, read } from "./api";
import { Chapter, type ChapterInfo } from "./chapter";
import { Fence } from "./fence";
import { Problem } from "./problem";
import { Quiz } from "./quiz";
import { type Simulation, Stage } from "./simulations";

/** Chapters, simulations and the quiz, one at a time; the one that is shown stands behind the # of the address. */
export function Lesson() {
  const [chapters, setChapters] = useState<ChapterInfo[]>([]);
  const [simulations, setSimulations] = useState<Simulation[]>([]);
  const [name, setName] = useState(location.hash.slice(1));
  const [problem, setProblem] = useState<ApiFailure | null>(null);
  const place = useRef<HTMLElement>(null);
  const connect = () =>
    Promise.all([
      read<{ data: ChapterInfo[] }>("/learn/api/chapters"),
      read<{ data: Simulation[] }>("/learn/api/sims"),
    ]).then(
      ([all, sims]) => {
        setChapters(all.data);
        setSimulations(sims.data);
        setProblem(null);
      },
      (error) => setProblem(failure(error)),
    );
  useEffect(() => {
    connect();
    const move = () => {
      setName(location.hash.slice(1));
      place.current?.scrollTo(0, 0);
      place.current?.focus();
    };
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  const quiz = name === "quiz";
  const simulation = simulations.find((one) => one.name === name);
  const at = Math.max(
    0,
    chapters.findIndex((one) => one.name === name),
  );
  const chapter = quiz || simulation ? undefined : chapters[at];
  return (
    <div class="page">
      <nav aria-label="Lesson">
        <h1>
          <img src="/ui/quire.svg" alt="" width="28" height="28" /> Quire
        </h1>
        <a href="/">Chat</a>
        <a href="/dashboard">Control room</a>
        <ul class="chapters" aria-label="Chapters">
          {chapters.map((one) => (
            <Entry key={one.name} {...one} shown={one === chapter} />
          ))}
          <Entry name="quiz" number={null} title="Quiz" shown={quiz} />
        </ul>
        <ul class="simulations" aria-label="Simulations">
          {simulations.map((one) => (
            <Entry key={one.name} {...one} shown={one === simulation} />
          ))}
        </ul>
      </nav>
      <main class="lesson" ref={place} tabIndex={-1}>
        {problem && <Problem problem={problem} onTry={connect} />}
        {quiz && <Quiz />}
        {simulation && (
          <Fence key={name} name={simulation.title}>
            <Stage simulation={simulation} />
          </Fence>
        )}
        {chapter && (
          <Chapter
            key={chapter.name}
            info={chapter}
            before={chapters[at - 1]}
            after={chapters[at + 1]}
            simulations={simulations}
          />
        )}
      </main>
    </div>
  );
}

function Entry({ name, number, title, shown }: { name: string; number: number | null; title: string; shown: boolean }) {
  return (
    <li>
      <a href={`#${name}`} aria-current={shown ? "page" : undefined}>
        {number === null ? title : `${number}. ${title}`}
      </a>
    </li>
  );
}
