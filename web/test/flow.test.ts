import { expect, test } from "vitest";
import { between, momentBy } from "../src/flow";

test("arrows begin and end at boxes, and those that face each other do not meet", () => {
  const [from, to] = between({ x: 0, y: 0 }, { x: 200, y: 0 }, 80);
  expect([from.x, to.x]).toEqual([43, 157]);
  const [back] = between({ x: 200, y: 0 }, { x: 0, y: 0 }, 80);
  expect(from.y).toBe(-back.y);
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
