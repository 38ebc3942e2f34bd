import { expect, test } from "vitest";
import { events } from "../src/sse";

function stream(pieces: Uint8Array[]): ReadableStream<Uint8Array> {
  return new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(piece);
      controller.close();
    },
  });
}

async function read(pieces: Uint8Array[]): Promise<string[]> {
  const found: string[] = [];
  for await (const data of events(stream(pieces))) found.push(data);
  return found;
}

const TEXT = 'data: {"a":"ä€😀"}\n\n: ping\n\ndata: one\r\ndata: two\r\n\r\ndata:last\n\n';
const WANTED = ['{"a":"ä€😀"}', "one\ntwo", "last"];

test("any cut of the bytes gives the same events", async () => {
  const bytes = new TextEncoder().encode(TEXT);
  expect(await read([bytes])).toEqual(WANTED);
  expect(await read([...bytes].map((byte) => Uint8Array.of(byte)))).toEqual(WANTED);
  for (let cut = 1; cut < bytes.length; cut += 1) {
    expect(await read([bytes.slice(0, cut), bytes.slice(cut)])).toEqual(WANTED);
  }
});

test("an event that is not complete is not given", async () => {
  expect(await read([new TextEncoder().encode("data: a\n\ndata: b\n")])).toEqual(["a"]);
});
