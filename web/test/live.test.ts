import { expect, test } from "vitest";
import { type Moment, type Past, remember, type Span } from "../src/live";

const moment = (time: number): Moment => {
  const spans: Span[] = Array.from({ length: 100 }, (_, i) => [`r${i}`, 0, 900, 800, "decode", 1]);
  return {
    overview: { time } as Moment["overview"],
    detail: { stride: 1, blocks: [], sequences: [], branches: [], other_branches: 0, spans },
    requests: [],
    slowest: [],
  };
};

test("a page that is open for an hour keeps what one keeps that is open for a minute", () => {
  let past: Past = { moments: [], spans: [] };
  const sizes: number[] = [];
  for (let second = 1000; second < 4600; second++) {
    past = remember(past, moment(second));
    if (second % 60 === 0) sizes.push(JSON.stringify(past).length);
  }
  expect(Math.max(...sizes)).toBeLessThanOrEqual(Math.max(...sizes.slice(0, 3)) + 200);
  expect(past.moments.length).toBe(60);
  expect(past.moments.filter((one) => one.detail).length).toBe(1);
});
