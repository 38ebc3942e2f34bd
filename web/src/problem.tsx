import { useState } from "preact/hooks";
import { type ApiFailure, setKey } from "./api";

/** What is wrong, with a field for the key that the server asks for. */
export function Problem({ problem, onTry }: { problem: ApiFailure; onTry: () => void }) {
  const [key, write] = useState("");
  const enter = (event: Event) => {
    event.preventDefault();
    if (key) setKey(key);
    onTry();
  };
  return (
    <form class="problem" role="alert" onSubmit={enter}>
      <p>{problem.message}</p>
      {problem.status === 401 && (
        <label>
          API key{" "}
          <input type="password" value={key} autocomplete="off" onInput={(event) => write(event.currentTarget.value)} />
        </label>
      )}
      <button type="submit">Try again</button>
    </form>
  );
}
