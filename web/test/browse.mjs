// Drives the pages of a running server in Chromium: node browse.mjs URL FOLDER PART. Prints what was seen as JSON.
import { readFileSync } from "node:fs";
import { AxeBuilder } from "@axe-core/playwright";
import { chromium } from "playwright-core";

const [, , base, folder, part] = process.argv;
const flags = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: flags });
const seen = { errors: [], outside: [], axe: [], views: {} };

async function open(options, path = "/") {
  const context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"], ...options });
  const page = await context.newPage();
  page.on("console", (message) => message.type() === "error" && seen.errors.push(message.text()));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith(base) && !/^(data|blob):/.test(request.url())) seen.outside.push(request.url());
  });
  await page.goto(base + path);
  return page;
}

async function axe(page, name) {
  const { violations } = await new AxeBuilder({ page }).analyze();
  for (const one of violations) {
    if (["serious", "critical"].includes(one.impact)) seen.axe.push(`${name}: ${one.id} ${one.nodes[0].html}`);
  }
}

const done = (page) =>
  page.waitForFunction(() => document.querySelector(".turns")?.getAttribute("aria-busy") === "false");

async function chat() {
  const page = await open({ colorScheme: "light", viewport: { width: 1280, height: 800 } });
  await page.waitForSelector(".welcome h2");
  seen.views.painted = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime);
  seen.views.loaded = await page.evaluate(() =>
    performance.getEntriesByType("resource").reduce((sum, one) => sum + one.encodedBodySize, 0),
  );
  await axe(page, "welcome");
  await page.screenshot({ path: `${folder}/welcome.png` });
  await page.getByLabel("Message").fill("What is TTFT?");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".turn.assistant .markdown");
  await done(page);
  seen.views.answer = await page.locator(".turn.assistant .markdown").innerText();
  seen.views.figures = await page.locator(".turn.assistant .figures").innerText();
  await page.locator(".turn.assistant").getByRole("button", { name: "Copy" }).last().click();
  seen.views.copied = await page.evaluate(() => navigator.clipboard.readText());
  const [saved] = await Promise.all([
    page.waitForEvent("download"),
    page.getByRole("button", { name: "Save as a file" }).click(),
  ]);
  seen.views.saved = Object.values(JSON.parse(readFileSync(await saved.path(), "utf8")).turns).map((one) => one.role);
  await page.getByRole("button", { name: "Again" }).click();
  await page.waitForSelector(".places");
  await done(page);
  seen.views.places = await page.locator(".turn.assistant .places").innerText();
  await page.getByRole("button", { name: "Edit" }).click();
  await page.getByLabel("Your message").fill("What is TPOT?");
  await page.getByRole("button", { name: "Send" }).first().click();
  await page.waitForSelector(".turn.user .places");
  await done(page);
  seen.views.edited = await page.locator(".turn.user .said").innerText();
  await page.getByRole("button", { name: "The one before" }).first().click();
  seen.views.before = await page.locator(".turn.user .said").innerText();

  await page.getByText("Settings").click();
  await page.getByLabel("Show the chance of each token").check();
  await page.getByLabel("Temperature").fill("0");
  await page.getByRole("button", { name: "New chat" }).first().click();
  await page.getByLabel("Message").fill("What is 2 + 3?");
  await page.getByRole("button", { name: "Send" }).click();
  await page.waitForSelector(".turn.assistant .markdown");
  await done(page);
  await page.getByRole("button", { name: "Chances" }).click();
  seen.views.tokens = await page.locator(".token").count();
  await page.locator(".token").first().focus();
  await page.waitForSelector(".alternatives");
  seen.views.alternatives = await page.locator(".alternatives > span").count();
  await page.getByRole("button", { name: "Why so long?" }).click();
  await page.waitForSelector(".explanation .bars");
  seen.views.why = await page.locator(".explanation p").first().innerText();
  await axe(page, "chances");
  await page.screenshot({ path: `${folder}/chances.png` });
  await page.reload();
  await page.waitForSelector(".turn.assistant");
  seen.views.kept = await page.locator("nav li").count();

  // A schema makes the model say exactly this. None of it may run, load, or become a form or a frame.
  const hostile = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg onload=window.hacked=1><animate onbegin=window.hacked=1></svg>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<a href=javascript:window.hacked=1>link</a> [link](javascript:window.hacked=1)",
    "<math><mtext><style><img src=x onerror=window.hacked=1></style></mtext></math>",
    "<form action=/v1/models><input autofocus onfocus=window.hacked=1></form>",
    "<details open ontoggle=window.hacked=1>d</details>",
    "![picture](/v1/models)",
  ];
  seen.views.hostile = [];
  await page.getByText("Settings").click(); // folded since the page was loaded again
  for (const text of hostile) {
    await page.getByRole("button", { name: "New chat" }).first().click();
    await page.getByLabel("JSON schema of the answer").fill(JSON.stringify({ const: text }));
    await page.getByLabel("Message").fill("Say it.");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".turn.assistant .markdown");
    await done(page);
    for (const link of await page.locator(".turn.assistant .markdown a").all()) await link.dispatchEvent("click");
    seen.views.hostile.push(
      await page.evaluate(() => ({
        hacked: "hacked" in window,
        shown: document.querySelector(".turn.assistant .markdown")?.textContent?.length ?? 0,
        made: document.querySelectorAll(
          ".markdown :is(script, img, svg, iframe, style, form, input, [onerror], [onload], [ontoggle], [href^=javascript])",
        ).length,
      })),
    );
  }
  await page.getByLabel("JSON schema of the answer").fill("");

  // A tool is called, its result goes back, and the prompt says what of it was cached.
  await page.getByRole("button", { name: "New chat" }).first().click();
  await page.getByLabel("Offer a clock, dice and a calculator").check();
  await page.getByLabel("It must call a tool").check();
  await page.getByLabel("Message").fill("Throw a die.");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".calls button");
  seen.views.called = await page.locator(".calls code").first().innerText();
  await page.getByLabel("Result of").first().fill("4");
  await page.getByRole("button", { name: "Send the results" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".turn.assistant").length === 2);
  await done(page);
  seen.views.told = await page.locator(".turn.tool .said").first().innerText();
  await page.getByRole("button", { name: "Prompt" }).last().click();
  await page.waitForSelector(".prompt mark");
  seen.views.prompt = await page.locator(".prompt figcaption").innerText();
  seen.views["side overflow"] = await page.evaluate(() => {
    const side = document.querySelector("nav");
    return side.scrollWidth > side.clientWidth;
  });
  await axe(page, "tools");
  await page.screenshot({ path: `${folder}/tools.png` });
  await page.getByLabel("Offer a clock, dice and a calculator").uncheck();
  await page.getByLabel("It must call a tool").uncheck();

  // A long answer is stopped, and what was said stays.
  await page.getByRole("button", { name: "New chat" }).first().click();
  await page.getByLabel("Message").fill("Tell me a long story about a fox and a raven.");
  await page.keyboard.press("Enter");
  const stop = page.getByRole("button", { name: "Stop" });
  seen.views.stopped = await stop.click({ timeout: 2000 }).then(
    () => true,
    () => false,
  );
  await done(page);

  for (const [name, options] of Object.entries({
    dark: { colorScheme: "dark", viewport: { width: 1280, height: 800 } },
    phone: { colorScheme: "light", viewport: { width: 390, height: 780 }, isMobile: true, hasTouch: true },
  })) {
    const other = await open(options);
    await other.getByRole("button", { name: "What is TTFT?" }).click();
    await other.waitForSelector(".turn.assistant .markdown");
    await done(other);
    await axe(other, name);
    await other.screenshot({ path: `${folder}/${name}.png` });
    seen.views[`${name} overflow`] = await other.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  }
}

async function lesson() {
  for (const [name, options] of Object.entries({
    lesson: { colorScheme: "light", viewport: { width: 1280, height: 900 } },
    "lesson dark": { colorScheme: "dark", viewport: { width: 1280, height: 900 } },
    "lesson phone": { colorScheme: "light", viewport: { width: 390, height: 780 }, isMobile: true, hasTouch: true },
  })) {
    const other = await open({ ...options }, "/learn");
    await other.waitForSelector("article h3");
    seen.views[name] = [];
    seen.views[`${name} chapters`] = [];
    seen.views[`${name} other`] = [];
    const told = {}; // what the server said last, by simulation
    other.on("response", async (response) => {
      const { pathname } = new URL(response.url());
      if (pathname.startsWith("/learn/api/sim/")) told[pathname.slice(15)] = await response.json().catch(() => null);
    });
    for (const link of await other.locator('nav li a:not([href="#quiz"])').all()) {
      const chapter = (await link.locator("xpath=../..").getAttribute("class")) === "chapters";
      await link.click();
      await other.waitForFunction(
        (title) => document.querySelector("h2")?.textContent === title,
        (await link.innerText()).replace(/^\d+\. /, ""),
      );
      await other.waitForSelector(chapter ? "article details" : "dl dd");
      seen.views[chapter ? `${name} chapters` : name].push(await other.locator("h2").innerText());
      if (!chapter) {
        const figures = told[(await link.getAttribute("href")).slice(1)]?.figures ?? [];
        const shown = await other.locator("dl dd").allInnerTexts();
        const same = figures.length > 0 && figures.every((one, i) => (shown[i] ?? "").startsWith(one.shown));
        if (!same || shown.length !== figures.length) seen.views[`${name} other`].push(await link.innerText());
      }
      for (const run of chapter && name === "lesson" ? await other.getByRole("button", { name: "Run it" }).all() : []) {
        const place = run.locator("xpath=..");
        await run.click();
        await place.locator("dl dd").first().waitFor();
        seen.views.sights = (seen.views.sights ?? 0) + 1;
      }
      await axe(other, `${name}: ${await link.innerText()}`);
      await other.screenshot({ path: `${folder}/${name} ${await link.getAttribute("href")}.png`.replace("#", "") });
      seen.views[`${name} overflow`] ||= await other.evaluate(() => document.documentElement.scrollWidth > innerWidth);
    }
    await other.locator('nav a[href="#quiz"]').click();
    await other.getByLabel("6.5 GB").check();
    const judged = other.locator("fieldset", { hasText: "13B" }).getByRole("status");
    await judged.locator("strong").waitFor();
    seen.views[`${name} quiz`] = await judged.innerText();
    await axe(other, `${name}: quiz`);
    if (name === "lesson") {
      await other.locator('nav a[href="#production"]').click();
      const points = () => other.locator("polyline").first().getAttribute("points");
      const whole = (await points()).length;
      await other.getByRole("button", { name: "Start" }).click();
      await other.waitForFunction(
        (most) => {
          const length = document.querySelector("polyline").getAttribute("points").length;
          return length > most / 20 && length < most / 2;
        },
        whole,
        { polling: 20 },
      );
      await other.getByRole("button", { name: "Stop" }).click();
      await axe(other, `${name}: replay`);
      await other.getByRole("button", { name: "Reset" }).click();
      seen.views.replayed = (await points()).length === whole;
      await other.locator('nav a[href="#lifecycle"]').click();
      await other.waitForSelector(".flow polygon");
      await other.getByRole("button", { name: "Start" }).click();
      await other.waitForSelector(".flow .now");
      await axe(other, `${name}: where it is`);
      await other.getByRole("button", { name: "Reset" }).click();
      await other.locator('nav a[href="#parallelism"]').click();
      await other.waitForFunction(() => document.querySelectorAll(".flow .along").length === 4);
      seen.views.arrows = await other.locator(".flow .along").allTextContents();
      await other.locator('nav a[href="#memory-hierarchy"]').click();
      await other.getByRole("button", { name: "L2 cache" }).focus();
      await other.waitForFunction(() => document.querySelectorAll("dl dd")[1]?.textContent?.startsWith("12,000 GB/s"));
      await other.getByRole("button", { name: "NVMe drive" }).hover();
      await other.waitForFunction(() => document.querySelectorAll("dl dd")[1]?.textContent?.startsWith("7 GB/s"));
      await axe(other, `${name}: pointed at`);
      await other.locator('nav a[href="#prefix-cache"]').click();
      await other.getByLabel("In the cache").uncheck();
      await other.waitForFunction(() => document.querySelector("dl dd")?.textContent?.includes("1,040"));
      await other.getByLabel("New tokens").last().fill("0");
      await other.waitForFunction(() => document.querySelector(".error")?.textContent?.includes("new: '0' must be"));
    }
  }
}

async function fence() {
  // One simulation brings the page an answer that it cannot show: the chapter around it goes on, and so do the others.
  const fenced = await open({ viewport: { width: 1280, height: 900 } }, "/learn");
  await fenced.route("**/learn/api/sim/memory-hierarchy*", (route) => route.fulfill({ json: { figures: [null] } }));
  await fenced.locator('nav a[href="#memory-and-roofline"]').click();
  await fenced.waitForSelector("article details");
  // It may have failed already: then its section is gone.
  await fenced.evaluate(() => document.querySelector('section[aria-label^="Simulation"]')?.scrollIntoView());
  await fenced.waitForSelector(".fence");
  seen.views.fenced = await fenced.locator(".fence").allInnerTexts();
  seen.views["beside the fence"] = await fenced.locator("article .exercise").count();
  await fenced.locator('nav a[href="#kv-growth"]').click();
  await fenced.waitForSelector("dl dd");
}

async function room() {
  const headers = { "content-type": "application/json" };
  const body = JSON.stringify({ prompt: "The cat", max_tokens: 8 });
  const asked = await fetch(`${base}/v1/completions`, { method: "POST", headers, body });
  if (!asked.ok) throw new Error(await asked.text());
  for (const [name, options] of Object.entries({
    room: { colorScheme: "light", viewport: { width: 1280, height: 900 } },
    "room dark": { colorScheme: "dark", viewport: { width: 1280, height: 900 } },
    "room phone": { colorScheme: "light", viewport: { width: 390, height: 780 }, isMobile: true, hasTouch: true },
  })) {
    const room = await open(options, "/dashboard");
    await room.waitForFunction(() => document.querySelectorAll(".tiles li").length === 12);
    await room.waitForSelector(".slowest button");
    await room.locator(".slowest button").first().click();
    await room.waitForSelector(".explanation .bars");
    seen.views[name] = await room.locator("main h2").allInnerTexts();
    seen.views[`${name} why`] = await room.locator(".explanation p").first().innerText();
    await room.getByLabel("Administrator's key").fill("key-of-an-administrator");
    await room.getByRole("button", { name: "Read", exact: true }).click();
    await room.getByLabel("max_num_seqs").fill("3");
    await room.getByRole("button", { name: "Try" }).click();
    await room.waitForFunction(() => document.querySelector("main output")?.textContent?.startsWith("Would change"));
    seen.views[`${name} tried`] = await room.locator("main output").innerText();
    if (name === "room phone") {
      await room.getByRole("button", { name: "Change" }).click();
      await room.waitForFunction(() => document.querySelector("main output")?.textContent?.startsWith("Changed"));
      seen.views["room key"] = await room.getByLabel("Administrator's key").inputValue();
      seen.views["room kept"] = await room.evaluate(() => JSON.stringify({ ...sessionStorage, ...localStorage }));
    }
    await axe(room, name);
    await room.screenshot({ path: `${folder}/${name}.png`, fullPage: true });
    seen.views[`${name} overflow`] = await room.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  }
}

async function api() {
  for (const [name, options] of Object.entries({
    api: { colorScheme: "light", viewport: { width: 1280, height: 900 } },
    "api phone": { colorScheme: "dark", viewport: { width: 390, height: 780 }, isMobile: true, hasTouch: true },
  })) {
    const api = await open(options, "/docs");
    await api.waitForSelector(".reference summary");
    await api.getByLabel("Search").fill("/v1/chat/completions");
    await api.locator(".reference summary").first().click();
    await api.waitForSelector(".route dl");
    seen.views[name] = await api.locator(".route dt code").allInnerTexts();
    await axe(api, name);
    await api.screenshot({ path: `${folder}/${name}.png` });
    seen.views[`${name} overflow`] = await api.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  }
}

// A server with API keys: the page asks for one, keeps it for its tab alone, and puts it into no address.
async function locked() {
  const key = "key-of-a-client";
  const page = await open({ viewport: { width: 1280, height: 800 } });
  const addresses = [];
  page.on("request", (request) => addresses.push(request.url(), request.headers().referer ?? ""));
  await page.getByLabel("API key").fill(key);
  await axe(page, "locked");
  await page.getByRole("button", { name: "Try again" }).click();
  await page.locator(".welcome button:enabled").first().click();
  await page.waitForFunction(() => document.querySelector(".turn.assistant .markdown")?.textContent);
  await done(page);
  seen.views.told = addresses.filter((one) => one.includes(key));
  seen.views.kept = await page.evaluate(() => JSON.stringify({ ...localStorage }) + document.cookie + location.href);
  seen.views.asked = [];
  for (const path of ["/", "/learn", "/dashboard", "/docs"]) {
    const other = await page.context().newPage();
    await other.goto(base + path);
    await other.getByLabel("API key").waitFor();
    seen.views.asked.push(path);
  }
}

await { chat, lesson, fence, room, api, locked }[part]();
await browser.close();
console.log(JSON.stringify(seen));
