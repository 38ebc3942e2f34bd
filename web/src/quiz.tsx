import { useEffect, useState } from "preact/hooks";
import { failure, read } from "./api";

interface Question {
  chapter: number;
  text: string;
  choices: string[];
}

interface Judgement {
  correct: boolean;
  right: string;
  why: string;
  simulation: string;
}

/** The questions of the lesson, or that of one chapter. */
export function Quiz({ chapter }: { chapter?: number }) {
  const [all, setAll] = useState<Question[]>([]);
  useEffect(() => {
    read<{ data: Question[] }>("/learn/api/quiz").then(
      ({ data }) => setAll(data.filter((one) => chapter === undefined || one.chapter === chapter)),
      () => {}, // the list of chapters has said what is wrong
    );
  }, [chapter]);
  if (all.length === 0) return null;
  return (
    <>
      {chapter === undefined ? <h2>Quiz</h2> : <h3>Quiz</h3>}
      {all.map((one) => (
        <Asked key={one.chapter} question={one} numbered={chapter === undefined} />
      ))}
    </>
  );
}

/** A question. The server judges a choice, and says why. */
function Asked({ question, numbered }: { question: Question; numbered: boolean }) {
  const [chosen, choose] = useState("");
  const [said, setSaid] = useState<Judgement | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    if (!chosen) return;
    const stop = new AbortController();
    read<Judgement>(`/learn/api/quiz/${question.chapter}?${new URLSearchParams({ answer: chosen })}`, stop.signal).then(
      (found) => {
        setSaid(found);
        setProblem("");
      },
      (error) => stop.signal.aborted || setProblem(failure(error).message),
    );
    return () => stop.abort();
  }, [chosen, question.chapter]);
  return (
    <fieldset class="asked">
      <legend>
        {numbered && `${question.chapter}. `}
        {question.text}
      </legend>
      {question.choices.map((one) => (
        <label key={one} class="choice">
          <input
            type="radio"
            name={`chapter${question.chapter}`}
            checked={chosen === one}
            onChange={() => choose(one)}
          />{" "}
          {one}
        </label>
      ))}
      <output>
        {problem}
        {said && !problem && (
          <>
            <strong>{said.correct ? "Right." : `No: ${said.right}.`}</strong> {said.why}{" "}
            <a href={`#${said.simulation}`}>See it</a>
          </>
        )}
      </output>
    </fieldset>
  );
}
