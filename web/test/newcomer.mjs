// What a newcomer does: opens the page as soon as there is one, and presses the first thing on it: node newcomer.mjs URL.
// Prints when the page was there and when an answer was, in ms since this began.
import { chromium } from "playwright-core";

const began = performance.now();
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox", "--disable-gpu"] });
const page = await browser.newPage();
while (!(await page.goto(process.argv[2]).catch(() => null))) await page.waitForTimeout(50);
await page.locator(".welcome button:enabled").first().waitFor();
const there = performance.now() - began;
await page.locator(".welcome button:enabled").first().click();
await page.waitForFunction(() => document.querySelector(".turn.assistant .markdown")?.textContent);
const answered = performance.now() - began;
await browser.close();
console.log(JSON.stringify({ there, answered }));
