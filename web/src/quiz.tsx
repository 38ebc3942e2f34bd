import { useEffect, useState } from "preact/hooks";
import { read } from "./api";

interface Question {
  chapter: number;
  text: string;
  choices: string[];
  right: string;
  why: string;
  simulation: string;
}

/** The questions of the lesson. A choice shows the answer, why, and where to see it. */
export function Quiz() {
  const [all, setAll] = useState<Question[]>([]);
  useEffect(() => {
    read<{ data: Question[] }>("/learn/api/quiz").then(
      ({ data }) => setAll(data),
      () => {}, // the list of simulations has said what is wrong
    );
  }, []);
  return (
    <>
      <h2>Quiz</h2>
      {all.map((one) => (
        <Asked key={one.chapter} question={one} />
      ))}
    </>
  );
}

function Asked({ question }: { question: Question }) {
  const [chosen, choose] = useState("");
  return (
    <fieldset class="asked">
      <legend>
        {question.chapter}. {question.text}
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
        {chosen && (
          <>
            <strong>{chosen === question.right ? "Right." : `No: ${question.right}.`}</strong> {question.why}{" "}
            <a href={`#${question.simulation}`}>See it</a>
          </>
        )}
      </output>
    </fieldset>
  );
}
