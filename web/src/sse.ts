/** The data of server-sent events, from chunks of bytes cut anywhere (WHATWG HTML, 9.2). */
export async function* events(stream: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let text = "";
  let data: string[] = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      text += decoder.decode(value, { stream: !done });
      for (let end = text.search(/\r\n|\n|\r(?=[^\n])/); end >= 0; end = text.search(/\r\n|\n|\r(?=[^\n])/)) {
        const line = text.slice(0, end);
        text = text.slice(end + (text.startsWith("\r\n", end) ? 2 : 1));
        if (line === "") {
          if (data.length > 0) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
