import { readdirSync, readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

/** The licences of what is bundled, as a file beside it. */
function licences(packages: string[]): Plugin {
  return {
    name: "licences",
    generateBundle() {
      const texts = packages.map((name) => {
        const folder = `node_modules/${name}`;
        const file = readdirSync(folder).find((one) => /^licen[sc]e/i.test(one));
        const { version } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
        return `${name} ${version}\n\n${readFileSync(`${folder}/${file}`, "utf8").trim()}\n`;
      });
      this.emitFile({ type: "asset", fileName: "licenses.txt", source: texts.join(`\n${"-".repeat(80)}\n\n`) });
    },
  };
}

// Names without digests: the server sends each file with an ETag, and a commit shows which file changed.
export default defineConfig({
  base: "/ui/",
  plugins: [licences(["dompurify", "marked", "preact"])],
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "eof" },
  build: {
    outDir: "../src/quire/server/pages/built",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      input: { index: "index.html", learn: "learn.html", dashboard: "dashboard.html", reference: "reference.html" },
      output: {
        manualChunks: { preact: ["preact", "preact/hooks"] },
        entryFileNames: "[name].js",
        chunkFileNames: "[name].js",
        assetFileNames: "[name][extname]",
      },
    },
  },
});
