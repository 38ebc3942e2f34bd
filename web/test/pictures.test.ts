import { expect, test } from "vitest";
import { brief, pointsBy, ticks } from "../src/pictures";

test("ticks are round and reach the largest value", () => {
  expect(ticks(100)).toEqual([0, 50, 100]);
  expect(ticks(7.3)).toEqual([0, 2, 4, 6, 8]);
  expect(ticks(0)).toEqual([0, 1]);
  expect(ticks(0.42).at(-1)).toBeGreaterThanOrEqual(0.42);
});

test("a part of the time has a part of the points", () => {
  expect([0, 0.5, 0.99, 1].map((part) => pointsBy([0, 1, 2, 4], 0, 4, part))).toEqual([1, 3, 3, 4]);
});

test("numbers are brief", () => {
  expect(brief(0)).toBe("0");
  expect(brief(0.12345)).toBe("0.123");
  expect(brief(1_500_000)).toBe("1.5M");
});
