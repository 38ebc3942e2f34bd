import { expect, test } from "vitest";
import { between, momentBy } from "../src/flow";

test("arrows begin and end at boxes, and those that face each other do not meet", () => {
  const [from, to] = between({ x: 0, y: 0 }, { x: 200, y: 0 }, 80, false);
  expect([from.x, to.x, from.y]).toEqual([45, 155, 0]);
  const [there] = between({ x: 0, y: 0 }, { x: 200, y: 0 }, 80, true);
  const [back] = between({ x: 200, y: 0 }, { x: 0, y: 0 }, 80, true);
  expect(there.y).toBe(-back.y);
  expect(there.y).not.toBe(0);
});

test("a replay stands where it was at that part of the time", () => {
  const moments: [number, number][] = [
    [0, 0],
    [4, 2],
    [10, 5],
  ];
  expect([0, 0.3, 0.4, 0.99, 1].map((part) => momentBy(moments, part))).toEqual([0, 0, 1, 1, 2]);
  expect(momentBy([], 0.5)).toBe(-1);
});
