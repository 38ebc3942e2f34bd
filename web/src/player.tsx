import { useEffect, useState } from "preact/hooks";

const SECONDS = 20; // that a replay takes at speed 1
const TICK_MS = 50;

/** Plays pictures over time again: start, stop, reset, and how fast. `onPart` is told what part of the time to show. */
export function Player({ first, part, onPart }: { first: number; part: number; onPart: (part: number) => void }) {
  const [speed, setSpeed] = useState(first);
  const [running, run] = useState(false);
  useEffect(() => {
    if (!running) return;
    const timer = setTimeout(() => {
      const next = Math.min(1, part + (speed * TICK_MS) / 1000 / SECONDS);
      onPart(next);
      if (next === 1) run(false);
    }, TICK_MS);
    return () => clearTimeout(timer);
  }, [running, part, speed]);
  const start = () => {
    if (part === 1) onPart(0);
    run(true);
  };
  return (
    <p class="player">
      <button type="button" onClick={running ? () => run(false) : start}>
        {running ? "Stop" : "Start"}
      </button>
      <button
        type="button"
        onClick={() => {
          run(false);
          onPart(1);
        }}
      >
        Reset
      </button>
      <label>
        Speed{" "}
        <input
          type="number"
          min="1"
          max="20"
          value={speed}
          onInput={(event) => setSpeed(event.currentTarget.valueAsNumber || 1)}
        />
      </label>
      <progress max="1" value={part} aria-label="Shown of the time" />
    </p>
  );
}
